#!/usr/bin/env bash
# symbols.sh HEADER...: the shared library exports what the public headers declare, and nothing else; the module its
# entry.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)

# One declaration per line, those marked for export, the name before the first parenthesis after the mark.
declared=$(for header in "$@"; do "${CC:-cc}" -E -P -x c -I "$root/include" "$header"; done |
    tr '\n' ' ' | tr ';{}' '\n' |
    sed -n 's/.*visibility("default"))) *\([^(]*[ *]\)\(csa_[a-z0-9_]*\) *(.*/\2/p' | sort -u)
# Names that start with two underscores or a dot are the toolchain's (sanitizers, coverage, Clang's OpenMP).
exported=$(nm -D --defined-only "$CSA_LIBRARY" | awk '{ print $3 }' | grep -vE '^(__|\.)' | sort -u)

[ -n "$declared" ] || { echo "no declaration found in $*" >&2; exit 1; }
diff <(echo "$declared") <(echo "$exported") || {
    echo "< declared only, > exported only" >&2
    exit 1
}
echo "$(wc -l <<<"$exported") functions"

# The module exports its entry alone, and brings what it needs of CUDA: the driver is looked for at run time.
module=$(dirname "$CSA_LIBRARY")/libcsa_cuda.so
[ -e "$module" ] || exit 0
diff <(echo csa_cuda_enter) <(nm -D --defined-only "$module" | awk '{ print $3 }') || {
    echo "< expected of libcsa_cuda.so, > exported" >&2
    exit 1
}
! readelf -d "$module" | grep -E 'NEEDED.*lib(cu|nv)' || { echo "libcsa_cuda.so needs a library of CUDA's" >&2; exit 1; }
echo "libcsa_cuda.so: its entry alone"
