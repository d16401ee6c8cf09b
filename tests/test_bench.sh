#!/usr/bin/env bash
# csa bench: test_bench.sh BINARY. Shapes are tiny and no time is judged.
# shellcheck source-path=SCRIPTDIR
. "$(dirname "$0")/command.sh"

# small WHAT ARGUMENT...: a bench that takes no time.
small() { expect 0 bench "$1" --context 700 --samples 2 --no-limits --threads 2 "${@:2}"; }

# columns: every line of a CSV on stdout has as many fields as the first.
columns() {
    LC_ALL=C awk -F, 'NR == 1 { n = NF } NF != n { exit 1 } END { exit NR < 2 || n < 20 }' "$out" || die "CSV is ragged"
}

# stages NAME...: these are the stages of a CSV on stdout, in this order.
stages() { [ "$(cut -d, -f1 "$out" | tail -n +2 | xargs)" = "$*" ] || die "stages are not $*"; }

# Every subject, as a decode step and as a prefill step.
for stage in prepare summarize score select attend gate; do
    small $stage --csv
    stages $stage
    small $stage --csv --rows 3
    stages $stage
done
small decode --csv
stages score select attend decode
small prefill --csv --rows 5
stages score select attend plan prefill
small prefill --csv
stages score select attend plan prefill
small layer --csv
stages prepare summarize score select attend layer
small layer --csv --rows 5
stages prepare summarize score select attend plan layer
small all --csv --gate --kv e4m3
columns
stages prepare summarize score select attend gate decode layer
small all --csv --rows 9 --batch 2 --scaling
columns

# Shapes with a choice of regions; attention and dense attention are compared with double precision.
for shape in '--context 4500 --query-len 4 --groups 2' '--context 9001 --heads 3 --kv e4m3 --query-len 5 --topk 64' \
    '--context 8193 --gate --batch 2 --index-heads 2' '--context 1 --heads 1 --block-size 16' \
    '--context 600 --rows 20 --batch 2 --block-size 128 --topk 7' '--context 5000 --backend ref --topk 3' \
    '--context 5000 --tier plain'; do
    # shellcheck disable=SC2086
    expect 0 bench attend --samples 1 --no-limits --dense --verify --json $shape
    is_json
    for name in attention_error dense_error dense_ratio; do
        [ -n "$(field $name)" ] || die "$name is missing"
    done
    if grep -qi nan "$out"; then die "NaN"; fi
done

# The whole report: limits, shares, the configuration, what `csa size --bench` reads.
expect 0 bench decode --context 4500 --samples 3 --groups 2 --kv e4m3 --cold --dense --threads 2 --json
is_json
cp "$out" "$work/bench.json"
for name in processor tier load_average last_cache_bytes stream_gb_s cache_gb_s gather_6144_gb_s gather_3072_gb_s \
    bf16_gflop_s fp32_gflop_s allocated samples median_seconds p10_seconds p90_seconds least_seconds bytes operations \
    gb_s gflop_s limit limit_seconds limit_share dense_ratio bandwidth_gb_s; do
    [ -n "$(field $name)" ] || die "$name is missing"
done
is what '"decode"'
is cold true
is threads 2
is context 4500
is groups 2
is kv '"e4m3"'
[ "$(field samples)" -ge 3 ] || die "too few samples"
# 562 regions are ranked, as `csa size` counts them: summaries once, queries, weights and scores of two groups.
is operations score $((2 * 562 * 4 * 515))
is bytes score $((562 * 256 + 2 * 4 * 260 + 2 * 562 * 4))
expect 0 size --bench "$work/bench.json"
says 'the bytes alone take at'

expect 0 bench select --context 5000 --samples 1 --scaling --threads 2 --no-limits --json
is_json
is threads runs 1
grep -q '"scaling"' "$out" || die "no ratio"
expect 0 bench all --context 5000 --samples 1 --scaling --threads 2 --dense --verify
for word in machine limits 'load average' prepare summarize score select attend gate decode layer dense_ratio \
    'verified: ' 'times one thread' 'fp32' median p90; do
    says "$word"
done

# A list: what stands on the command line holds where a line says nothing else.
printf '%s\n' '# shapes' '' '--context 300   # a comment' '	--context=400 --kv e4m3 --gate' >"$work/list"
expect 0 bench gate --list "$work/list" --batch 3 --no-limits --threads 1 --samples 1 --csv
columns
grep -q '^gate,300,3,1,.*,bf16,0,' "$out" || die "the first shape"
grep -q '^gate,400,3,1,.*,e4m3,1,' "$out" || die "the second shape"
wrong_line() { # wrong_line LINE TEXT
    printf '%s\n' '--context 300' "$1" >"$work/list"
    expect 4 bench gate --list "$work/list"
    says "$work/list:2: "
    says "$2"
}
wrong_line '--context 0' '--context takes a number'
wrong_line '--context' '--context needs a value'
wrong_line '--kv fp16' '--kv takes bf16 or e4m3'
wrong_line '--context 300 --query-len 301' 'a step of 301 tokens'
wrong_line '--block-size 48' '--block-size takes'
wrong_line '--index-heads 15' '--index-heads takes'
wrong_line '--threads 2' "unknown argument '--threads'"
wrong_line 'decode' "unknown argument 'decode'"
wrong_line '--help' 'belongs to the command line'
wrong_line "$(printf -- '--gate %.0s' {1..60})" 'too many words'
wrong_line "$(printf '#%.0s' {1..2000})" 'a line of more than'
: >"$work/list"
expect 4 bench gate --list "$work/list"
says 'no shapes'
expect 4 bench gate --list "$work/none"

# What does not fit is refused before anything runs; what cannot be numbered as well.
expect 2 bench decode --context 1048576 --batch 4000
grep -Eq 'needs [0-9]{13} bytes; [0-9]+ are available' "$err" || die "bytes are not named"
expect 2 bench decode --context 68719476736 --batch 1048576
expect 2 bench prefill --context 68719476736 --groups 8

expect 0 bench --help
says 'usage: csa bench'
says 'examples:'
for wrong in '' 'decode prefill' 'fly' 'decode --rows 3' 'decode --json --csv' 'decode --scaling --threads 1' \
    'decode --context 8 --query-len 9' 'prefill --context 8 --rows 9' 'decode --samples 0' 'decode --threads 0' \
    'decode --heads 17' 'decode --groups 9' 'decode --topk 1025' 'decode --kv fp8' 'decode --block-size 8' \
    'decode --backend gpu' 'decode --nonsense'; do
    # shellcheck disable=SC2086
    expect 2 bench $wrong
done
expect 2 bench decode --index-heads 9
says '--index-heads takes 1 to 8 or 16, not 9'
for what in prepare layer all; do
    expect 2 bench $what --context 100 --index-heads 8 --no-limits
    says "--index-heads takes 2 or 4 for $what, not 8"
done
expect 2 bench decode --backend ref --tier avx2
says '--tier is for'
expect 3 bench decode --backend cuda
says 'cuda'
for wrong in --dense --scaling --verify; do
    expect 2 bench decode --backend cuda $wrong
    says 'are for back ends of the host'
done
expect 3 bench decode --tier sm90
says 'back end cpu: tier sm90 is unknown'
