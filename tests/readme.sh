#!/usr/bin/env bash
# The program that README.md shows is examples/minimal.c, which another test builds and runs; and the documents
# it links to exist.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck disable=SC2016 # fences of code, not expansions
diff <(sed -n '/^```c$/,/^```$/p' README.md | sed '1d;$d') examples/minimal.c
for document in README.md CONTRIBUTING.md docs/*.md; do
    folder=$(dirname "$document")
    while read -r link; do
        [ -e "$folder/$link" ] || { echo "$document: no $link" >&2; exit 1; }
    done < <(grep -o '](\([^)#:]*\)' "$document" | cut -c3- | sort -u)
done
