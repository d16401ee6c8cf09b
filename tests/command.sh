# What the tests of the command share; to be sourced: . command.sh BINARY CAPTURES.
# $csa is the command, $captures a folder with captures, $work an empty folder that goes away at the end.
# shellcheck shell=bash
set -euo pipefail
csa=$(realpath "${1:-${CSA_TOOL:?the path of the command}}")
captures=${2:-${CSA_CAPTURES:-captures}}
[ -e "$captures/smollm2.safetensors" ] || captures=captures
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
out=$work/stdout err=$work/stderr

die() {
    echo "FAILED: $*" >&2
    sed 's/^/  stdout: /' "$out" >&2
    sed 's/^/  stderr: /' "$err" >&2
    exit 1
}

# expect CODE ARGUMENT...: runs the command, its output goes to $out and $err. A failure must say why on stderr
# and print no data, except for failed checks; a success says nothing there.
expect() {
    local want=$1 got=0
    shift
    "$csa" "$@" >"$out" 2>"$err" || got=$?
    [ "$got" = "$want" ] || die "csa $*: exit code $got, not $want"
    case $want in
    0) [ ! -s "$err" ] || die "csa $*: writes to stderr" ;;
    1) [ -s "$out" ] || die "csa $*: no output" ;;
    *) if [ ! -s "$err" ] || [ -s "$out" ]; then die "csa $*: no message, or data beside it"; fi ;;
    esac
}

# says TEXT: it is on stdout or stderr of the last command.
says() { grep -qF -- "$1" "$out" "$err" || die "does not say '$1'"; }

# is_json: stdout of the last command is. The command's own parser decides, so that no other tool is needed.
is_json() {
    local code=0
    "$csa" size --bench "$out" >/dev/null 2>"$work/json" || code=$?
    [ "$code" = 0 ] || grep -q 'no positive number' "$work/json" || die "not JSON: $(cat "$work/json")"
}

# field NAME [OBJECT]: a value of the JSON on stdout: the first NAME, from OBJECT on.
field() { sed -n "/\"${2:-}/,\$s/^ *\"$1\": \([^,]*\),*\$/\1/p" "$out" | sed 1q; }

# is NAME [OBJECT] VALUE
is() {
    local value=${!#}
    [ "$(field "${@:1:$#-1}")" = "$value" ] || die "${*:1:$#-1} is '$(field "${@:1:$#-1}")', not $value"
}
