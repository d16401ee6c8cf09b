#!/usr/bin/env bash
# csa info: test_info.sh BINARY CAPTURES
# shellcheck source-path=SCRIPTDIR
. "$(dirname "$0")/command.sh"

expect 0 info
says 'libcsa '
says 'ref '
says 'instruction sets: '
says 'threads: '
says 'block sizes: 16 32 64 128'

expect 0 info --json
is_json
is name backends '"default"'
is available ref true
is region sizes 8
is max_topk sizes 1024
[ "$(field threads)" -ge 1 ] || die "threads"
version=$(field version)
is header_version "$version"

# A back end that is missing says so; none is left out.
for backend in default ref cpu cuda; do
    says "\"name\": \"$backend\""
done
says '"devices": ['
OMP_NUM_THREADS=3 expect 0 info --json
is threads 3

expect 0 info --help
says 'usage: csa info'
says 'examples:'
expect 2 info --nonsense
says "unknown argument '--nonsense'"
expect 2 info extra
expect 2 info --json=yes
says 'takes no value'
