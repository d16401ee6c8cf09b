#!/usr/bin/env bash
# csa run: test_run.sh BINARY CAPTURES
# shellcheck source-path=SCRIPTDIR
. "$(dirname "$0")/command.sh"
file=$captures/smollm2.safetensors

# is_svg FILE: a well-formed picture without scripts.
is_svg() {
    [ "$(head -c 5 "$1")" = '<?xml' ] || die "$1 is no XML"
    [ "$(tail -n 1 "$1")" = '</svg>' ] || die "$1 ends early"
    ! grep -qiE 'script|nan|inf' "$1" || die "$1 holds a script, or a number that is none"
    ! command -v xmllint >/dev/null || xmllint --noout "$1" || die "$1 is not well-formed"
}

# shares TOPK=SHARE...: to three digits, as captures/README.md has them.
shares() {
    local pair share
    for pair; do
        share=$(sed -n "/\"topk\": ${pair%=*},/,\$s/^ *\"share_kept\": \([0-9.]*\).*/\1/p" "$out" | sed 1q)
        LC_ALL=C awk -v a="$share" -v b="${pair#*=}" 'BEGIN { d = a - b; exit !(a != "" && d * d <= 0.0006 ^ 2) }' ||
            die "share kept with topk ${pair%=*} is '$share', not ${pair#*=}"
    done
}

expect 0 run --context "$file" --json
is_json
shares 16=0.755 32=0.790 64=0.817 128=0.876
is ok true
is tokens 4096
is queries 64

# Neither threads, blocks, chunks nor the order of topk may change anything.
expect 0 run --context "$file" --json --backend ref --threads 1 --block-size 16 --chunk 7 --topk 128,16
is threads 1
shares 16=0.755 128=0.876
errors=$(grep -E '"(share_kept|error|rounding)' "$out")
expect 0 run --context "$file" --json --backend ref --threads 3 --block-size 128 --chunk 100000 --topk 128,16
[ "$errors" = "$(grep -E '"(share_kept|error|rounding)' "$out")" ] || die "other blocks, other results"

expect 0 run --context "$file" --json --plain-mean --topk 16,32,64,128
shares 16=0.532 32=0.617 64=0.712 128=0.822

# Everything selected: dense attention, to rounding.
expect 0 run --context "$file" --json --topk 512
shares 512=1

expect 0 run --context "$file" --topk 64
for word in 'layer15: 4096 tokens' 'King James' 'share kept' '0.817' 'dense / CSA' 'ok: '; do
    says "$word"
done

expect 0 run --context "$file" --topk 16 --svg "$work/real.svg"
is_svg "$work/real.svg"
grep -q 'softmax mass' "$work/real.svg" || die 'no panel for the softmax mass'

expect 0 run --help
says 'usage: csa run'
says 'examples:'
for wrong in '--topk 0' '--topk 1025' '--topk 16,,32' '--topk 16,' '--topk 1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17' \
    '--backend gpu' '--threads 0' '--block-size 8' '--chunk 0' '--nonsense' 'extra' '--topk' '--prompt 1000' \
    '--drafts 0' '--seed 1' '--kv bf16' '--backend ref --tier plain'; do
    # shellcheck disable=SC2086
    expect 2 run --context "$file" $wrong
done

# broken SED: the file with an edit of equal length.
broken() {
    LC_ALL=C sed "$1" "$file" >"$work/broken"
    ! cmp -s "$file" "$work/broken" || die "the edit $1 changes nothing"
}
refused() { # refused SED TEXT: exit code 4, for that reason
    broken "$1"
    expect 4 run --context "$work/broken"
    says "$2"
}
q='\\"'
refused "s/${q}tokens$q: 4096/${q}tokens$q: 4095/" 'in.key is BF16 [4096, 3, 64]'
refused "s/${q}tokens$q: 4096/${q}tokens$q: 9e99/" 'no whole number "tokens"'
refused "s/${q}tokens$q: 4096/${q}tokens$q: -409/" 'tokens is -409'
refused "s/${q}queries$q: 64/${q}queries$q: 65/" 'in.query is BF16 [64, 9, 64]'
refused "s/${q}queries$q: 64/${q}queries$q:  0/" 'queries is 0'
refused "s/${q}groups$q: 3/${q}groups$q: 9/" 'groups is 9'
refused "s/${q}heads$q: 3/${q}heads$q: 4/" 'in.query is BF16'
refused "s/${q}head_size$q: 64/${q}head_size$q: 65/" 'in.key is BF16'
refused "s/${q}scale$q: 0.125/${q}scale$q: null /" 'no finite number "scale"'
refused "s/${q}scale$q: 0.125/${q}scale$q: 9e299/" 'no finite number "scale"'
refused "s/${q}op$q: ${q}context$q/${q}op$q: ${q}contexx$q/" 'no case has the op "context"'
refused 's/csa-capture.1/csa-capture\/2/' 'csa-capture/1'
refused 's/layer15.in.z/layer15\/in.y/' 'no tensor in.z'
refused 's/layer15.in.index_query/layer15\/in.index_quarr/' 'in.index_query must be'
head -c 1000000 "$file" >"$work/broken"
expect 4 run --context "$work/broken"
: >"$work/broken"
expect 4 run --context "$work/broken"
expect 4 run --context "$work"
expect 4 run --context "$work/none"

# Sound files whose contents are not what they say: the check fails.
broken "s/${q}scale$q: 0.125/${q}scale$q: 0.126/"
expect 1 run --context "$work/broken" --topk 16
says 'FAILED: dense attention is'
cp "$file" "$work/broken"
printf '\377\377' | dd of="$work/broken" bs=1 seek=$(($(stat -c %s "$file") - 3000000)) conv=notrunc status=none
expect 1 run --context "$work/broken" --topk 16 --json
is_json
is ok false

# ---- A generated context ----

small=(run --prompt 1000 --steps 8 --topk 24 --heads 4)
expect 0 "${small[@]}" --json --svg "$work/generated.svg"
is_json
is_svg "$work/generated.svg"
grep -q 'needle asked for' "$work/generated.svg" || die 'the picture does not show the needles'
is ok true
is same drafts_check true
is asked needles 16
is found needles 16
is seed 1
is tokens prefill 2000
is tokens decode 64

# What a decode step gives depends neither on threads, blocks and chunks nor on the other requests' drafts.
figures() { sed -n '/"decode"/,/}/p' "$out" | grep -E '"(accepted|share_kept|error|rounding)'; }
first=$(figures)
[ "$(echo "$first" | wc -l)" = 4 ] || die "no figures: $first"
expect 0 "${small[@]}" --json --threads 1 --block-size 16 --chunk 77
[ "$first" = "$(figures)" ] || die "other blocks, other results"
expect 0 "${small[@]}" --json --threads 3 --block-size 128 --chunk 5000
[ "$first" = "$(figures)" ] || die "other chunks, other results"
expect 0 "${small[@]}" --json --seed 2
[ "$first" != "$(figures)" ] || die "another seed, the same results"

expect 0 run --prompt 700 --requests 3 --steps 6 --drafts 5 --topk 8 --groups 2 --heads 2 --index-heads 2 --kv e4m3
for word in 'generated, seed 1: 3 requests of 700 tokens' 'KV e4m3' '18 of 18 found' 'share kept' 'tokens a second' \
    'the same bits' 'times as long' 'ok: '; do
    says "$word"
done
expect 0 run --prompt 300 --requests 1 --steps 3 --drafts 0 --backend ref --heads 1 --plain-mean --json
is_json
is backend '"ref"'
is tier '"none"'
is drafts_check null
expect 0 run --prompt 64 --requests 1 --steps 1 --needles 0 --tier plain --heads 1 --threads 1
says 'tier plain'
expect 3 run --tier nothing
for wrong in '--topk 16,32' '--prompt 63' '--requests 0' '--steps 0' '--drafts 16' '--needles 9 --steps 8' \
    '--needles 3 --prompt 64' '--seed x' '--groups 9' '--heads 17' '--index-heads 3' '--kv fp8' '--backend ref --tier avx2'; do
    # shellcheck disable=SC2086
    expect 2 run $wrong
done
expect 5 "${small[@]}" --svg "$work/none/x.svg"
