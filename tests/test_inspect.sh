#!/usr/bin/env bash
# csa inspect: test_inspect.sh BINARY CAPTURES
# shellcheck source-path=SCRIPTDIR
. "$(dirname "$0")/command.sh"
calls=$captures/calls
[ -d "$calls" ] || calls=captures/calls # a full set has its files elsewhere, and more cases in each
real=$captures/smollm2.safetensors

# is_svg FILE: a well-formed picture without scripts.
is_svg() {
    [ "$(head -c 5 "$1")" = '<?xml' ] || die "$1 is no XML"
    [ "$(tail -n 1 "$1")" = '</svg>' ] || die "$1 ends early"
    ! grep -qiE 'script|nan|inf' "$1" || die "$1 holds a script, or a number that is none"
    ! command -v xmllint >/dev/null || xmllint --noout "$1" || die "$1 is not well-formed"
}

# ---- Cases of every op ----

expect 0 inspect "$calls/steps.safetensors" --case decode1
for text in 'decode1 (decode_step): 12 rows (6 tokens x 2 groups), 16 regions, topk 8' 'scores: recorded' \
    'row 0 (token 0, group 0): position 115, in region 14; 8 of 14 earlier regions selected' \
    'threshold  -3.93696, region 10; the best that is not selected: -4.21638, region 4' \
    'selected   0-1, 5-6, 9-11, 13-14' 'mass kept  0.5933'; do
    says "$text"
done

# Everything is selected, so that nothing is lost: rows 4 to 7 see 8 regions.
expect 0 inspect "$calls/steps.safetensors" --case decode1 --row 5 --json
is_json
is number 5
is current 7
is ranked 7
is kept 1.0

# Another topk is selected anew: the two best, and the row's own region.
expect 0 inspect "$calls/steps.safetensors" --case decode1 --topk 2 --best 2 --json
is_json
is topk 2
is scores_from '"recorded"'
[ "$(tr -d ' \n' <"$out" | sed 's/.*"selected":\[\([0-9,]*\)\].*/\1/')" = 1,6,14 ] || die 'wrong regions'
is region best 1
is region threshold 6
is region next 5
is ties 1
is differ 0
[ "$(grep -c '"score":' "$out")" = 4 ] || die 'not two best regions, a threshold and the next'

# Both back ends compute what was recorded.
expect 0 inspect "$calls/scores.safetensors" --case decode3 --topk 5
says 'decode3 (score_decode)'
says '5 of 55 earlier regions selected'
expect 0 inspect "$calls/select.safetensors" --json
is_json
[ "$(grep -c '"differ": 0' "$out")" = "$(grep -c '"case"' "$out")" ] || die 'a recorded selection is not the best'
expect 0 inspect "$calls/decode_attention.safetensors" --row 0
says 'scores: none; selection: input'
says 'mass kept  1.0000'
expect 0 inspect "$calls/steps.safetensors" --case 'prefill*'
says 'prefill1 (prefill_step)'
says 'prefill2 (prefill_step)'

# NaN scores rank last, and JSON knows no NaN.
expect 0 inspect "$calls/corners.safetensors" --row 0 --best 4096 --json
is_json
is nan 1
grep -q '"score": null' "$out" || die 'a NaN score is not null'
expect 0 inspect "$calls/corners.safetensors" --row 0
says '1 NaN'

# A recorded context: the first region holds most, whatever computes the scores.
for back_end in ref cpu; do
    expect 0 inspect "$real" --row 100 --best 1 --backend "$back_end"
    says "scores: $back_end; selection: $back_end"
    says 'row 100 (token 33, group 1): position 4065, in region 508; 16 of 508 earlier regions selected'
    says 'selected   0, 489-491, 493, 497-508'
    says 'mass kept  0.8926'
done

# ---- Pictures ----

for pair in steps:decode1 select:finite1_sorted decode_attention:case0 scores:decode3; do
    expect 0 inspect "$calls/${pair%:*}.safetensors" --case "${pair#*:}" --svg "$work/out.svg"
    is_svg "$work/out.svg"
    grep -q 'region (8 tokens)' "$work/out.svg" || die 'an axis has no name'
done
expect 0 inspect "$real" --topk 64 --svg "$work/out.svg" --json
is_json
is_svg "$work/out.svg"
grep -q 'softmax mass' "$work/out.svg" || die 'no panel for the softmax mass'

# ---- Errors ----

expect 0 inspect --help
says 'usage: csa inspect'
says 'examples:'
expect 2 inspect
expect 2 inspect "$real" "$real"
for wrong in '--row -1' '--row 192' '--topk 0' '--topk 1025' '--best -1' '--backend gpu' '--case nothing' '--nonsense' \
    '--row'; do
    # shellcheck disable=SC2086
    expect 2 inspect "$real" $wrong
done
expect 2 inspect "$calls/summary.safetensors"
says 'no case that could be inspected'
expect 2 inspect "$calls/steps.safetensors" --svg "$work/out.svg"
says '--svg takes one case'
expect 2 inspect "$calls/decode_attention.safetensors" --topk 3
says 'no scores to select from'
expect 3 inspect "$real" --backend cuda
expect 5 inspect "$real" --svg "$work/none/out.svg"

# broken FILE SED: the file with an edit of equal length.
broken() {
    LC_ALL=C sed "$2" "$1" >"$work/broken"
    ! cmp -s "$1" "$work/broken" || die "the edit $2 changes nothing"
}
refused() { # refused FILE SED TEXT: exit code 4, for that reason
    broken "$1" "$2"
    expect 4 inspect "$work/broken"
    says "$3"
}
q='\\"'
refused "$calls/steps.safetensors" "s/${q}regions$q: 16/${q}regions$q: 99/" 'out.scores'
refused "$calls/steps.safetensors" "s/${q}groups$q: 2/${q}groups$q: 3/" 'in.index_query'
refused "$calls/steps.safetensors" "s/${q}topk$q: 8/${q}topk$q: 0/" 'topk'
refused "$calls/steps.safetensors" "s/${q}block_size$q: 16/${q}block_size$q: 61/" 'kv_cache'
refused "$calls/select.safetensors" 's/in.current/in.currant/' 'in.current'
refused "$calls/scores.safetensors" "s/${q}regions$q: 64/${q}regions$q: -4/" 'regions'
refused "$real" "s/${q}tokens$q: 4096/${q}tokens$q: 4095/" 'in.key is BF16 [4096, 3, 64]'
head -c 100000 "$real" >"$work/broken"
expect 4 inspect "$work/broken"
: >"$work/broken"
expect 4 inspect "$work/broken"
expect 4 inspect "$work"
expect 4 inspect "$work/none"
