#!/usr/bin/env bash
# The mirror stands in front of the command's calls, of the right ones only, and cuda replays behind it where there
# is one: mirror.sh MIRROR
set -euo pipefail
calls=(captures/calls/*.safetensors)

# replayed [VARIABLE=VALUE...] -- ARGUMENT...: replays all recorded calls behind the mirror, prints all output.
replayed() {
    local variables=()
    while [ "$1" != -- ]; do variables+=("$1") && shift; done
    env "${variables[@]}" CSA_MIRROR_COUNT=1 LD_PRELOAD="$mirror" "$CSA_TOOL" replay "${calls[@]}" "${@:2}" 2>&1
}

# says TEXT PATTERN
says() { grep -qE "$2" <<<"$1" || { printf '%s\nno "%s" in this\n' "$1" "$2" >&2 && exit 1; }; }

mirror=$1
for backend in ref cpu; do
    text=$(replayed CSA_MIRROR=all -- --backend $backend)
    says "$text" ' 0 failed, '
    says "$text" '^mirror: [1-9][0-9]* calls'
done
says "$(replayed --)" '^mirror: 0 calls' # host memory is for the host

if "$CSA_TOOL" info | grep -qE '^ *cuda +available'; then
    text=$(replayed -- --backend cuda)
    says "$text" ' 0 failed, '
    says "$text" '^mirror: [1-9][0-9]* calls'
else
    echo "skipped: no back end cuda here"
fi
