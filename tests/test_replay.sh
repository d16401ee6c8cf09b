#!/usr/bin/env bash
# csa replay: test_replay.sh BINARY CAPTURES
# shellcheck source-path=SCRIPTDIR
. "$(dirname "$0")/command.sh"

# The full set lies flat in its folder, the repository's choice in calls/.
calls=$captures/calls
[ -d "$calls" ] || calls=$captures
context=$captures/smollm2.safetensors
files=(corners decode_attention norm_rope pack prefill scores select steps summary)

# broken ARGUMENT...: exit code 4 with a message.
broken() {
    local got=0
    "$csa" replay "$@" >"$out" 2>"$err" || got=$?
    [ "$got" = 4 ] || die "csa replay $*: exit code $got, not 4"
    [ -s "$err" ] || die "csa replay $*: no message"
}

# renamed FILE FROM TO: a copy of FILE with words of equal length exchanged.
renamed() {
    LC_ALL=C sed "s/$2/$3/g" "$1" >"$work/renamed.safetensors"
    echo "$work/renamed.safetensors"
}

# ---- All recorded calls, and the context beside them ----

all=()
for name in "${files[@]}"; do all+=("$calls/$name.safetensors"); done
expect 0 replay "${all[@]}" "$context"
says ' 0 failed, '
says ' 0 errors '
says 'not a call'
expect 0 replay "${all[@]}" --backend ref --threads 1 --json
is_json
is verdict '"pass"'
is exit 0
is backend '"ref"'
is threads 1

# Every tier of the cpu back end, on two threads, the best one also on one and seven.
for tier in avx512-bf16 avx512 avx2 plain; do
    if "$csa" replay "$calls/select.safetensors" --tier $tier >"$out" 2>"$err"; then
        expect 0 replay "${all[@]}" --tier $tier --threads 2
        says ' 0 failed, '
    else
        says 'does not run here'
        echo "skipped: no tier $tier here"
    fi
done
for threads in 1 7; do expect 0 replay "${all[@]}" --threads $threads; done
expect 3 replay "$calls/select.safetensors" --tier sse9

# Alone it judges nothing.
expect 1 replay "$context"

# ---- Choosing cases, timing ----

expect 0 replay "$calls/summary.safetensors" --case 'case1/*_decode' --bench 3
says 'case1/step2_decode'
! grep -q verify "$out" || die "--case lets others through"
expect 1 replay "$calls/summary.safetensors" --case none
says 'no case matches'

# ---- Writing: what is written passes, completes inputs, and is written again byte for byte ----

for name in "${files[@]}"; do
    expect 0 replay "$calls/$name.safetensors" --write "$work/first"
    expect 0 replay "$work/first" --write "$work/second"
    cmp -s "$work/first" "$work/second" || die "$name: writing again gives other bytes"
    expect 0 replay "$work/second"
done
expect 0 replay "$context" --write "$work/context"
expect 0 replay "$calls/steps.safetensors" --case decode1 --write "$work/one"
expect 0 replay "$work/one" --json

# ---- Files that are not what they should be ----

broken "$work/missing"
broken "$work"
head -c 100 "$calls/select.safetensors" >"$work/short"
broken "$work/short"
says 'cannot be right'
head -c -1 "$calls/select.safetensors" >"$work/shorter"
broken "$work/shorter"
printf 'not a capture' >"$work/text"
broken "$work/text"
: >"$work/empty"
broken "$work/empty"
broken "$(renamed "$calls/select.safetensors" csa-capture.1 csa-capture.2)"
says 'format'
broken "$(renamed "$calls/select.safetensors" '"select' '"selekt')"
says 'selekt is unknown'
broken "$(renamed "$calls/select.safetensors" in.scores in.scorez)"
says 'in.scores: the tensor is missing'
broken "$(renamed "$calls/select.safetensors" '"F32"' '"I32"')"
says 'where F32'
broken "$(renamed "$calls/select.safetensors" topk topq)"
says 'topk'

# A broken file does not hide the others, and nothing is written from one.
broken "$calls/select.safetensors" "$work/text"
says ' 0 failed, '
broken "$(renamed "$calls/select.safetensors" topk topq)" --write "$work/none"
[ ! -e "$work/none" ] || die "wrote what could not be run"

# An output that the op does not have is listed.
expect 1 replay "$(renamed "$calls/select.safetensors" out.regions out.regionz)" --case none
expect 0 replay "$(renamed "$calls/select.safetensors" out.regions out.regionz)"
says 'not an output of this op'

# ---- Usage ----

expect 0 replay --help
says 'usage: csa replay'
says 'examples:'
expect 2 replay
expect 2 replay "${all[@]}" --write "$work/none"
expect 2 replay "${all[0]}" --backend gpu
expect 2 replay "${all[0]}" --backend ref --tier plain
expect 2 replay "${all[0]}" --bench 0
expect 2 replay "${all[0]}" --threads
expect 0 --help
says 'replay'
expect 0 --version
says 'csa '
expect 2 nonsense
expect 2
