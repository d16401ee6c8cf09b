#!/usr/bin/env bash
# headers.sh HEADER...: each public header by itself is C11 and C++17, without a warning, included twice.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
warnings=(-Wall -Wextra -Wpedantic -Werror -Wshadow -Wundef)

for header in "$@"; do
    name=csa/$(basename "$header")
    for language in "c c11 ${CC:-cc}" "c++ c++17 ${CXX:-c++}"; do
        read -r kind standard compiler <<<"$language"
        printf '#include <%s>\n#include <%s>\n' "$name" "$name" |
            "$compiler" -x "$kind" -std="$standard" "${warnings[@]}" -I "$root/include" -fsyntax-only -
        echo "$name: $standard"
    done
done
