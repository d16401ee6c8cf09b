#!/usr/bin/env bash
# csa size: test_size.sh BINARY CAPTURES
# shellcheck source-path=SCRIPTDIR
. "$(dirname "$0")/command.sh"

expect 0 size
for word in prepare summarize score select attend gate total dense 'KV cache' workspace '384 MiB'; do
    says "$word"
done
if grep -q GB/s "$out"; then die "a time without a bandwidth"; fi

# One group at 8K: 1023 summaries, 513 regions, a block table of 128 entries.
expect 0 size --context 8192 --groups 1 --json
is_json
is read score $((1023 * 256))
is read attend $((513 * 8 * 768 + 128 * 4))
is operations score $((1023 * 4 * (512 + 3)))
is read dense $((8192 * 768 + 128 * 4))
is kv_per_request $((8192 * 768))
is summaries_per_request $((1024 * 256))
is ring_per_request $((7 * 1024))
[ "$(field workspace)" -gt 0 ] || die "workspace"
[ "$(field workspace_cuda)" -ge $((65 * 12416)) ] || die "workspace_cuda: room for 65 parts"
if grep -q second "$out"; then die "a time without a bandwidth"; fi

# Everything is attended: nothing to score. e4m3 halves the rows; the position is the fourth of its region.
expect 0 size --context 4100 --kv e4m3 --batch 3 --query-len=1 --json
is read score 0
is operations select 0
is read attend $((3 * (4 * 4100 * 384 + 65 * 4)))

# Four tokens of a request share its summaries, and together select no more than there is.
expect 0 size --context 8192 --query-len 4 --groups 1 --json
is read score $((1023 * 256))
is read attend $((8192 * 768 + 128 * 4))
is ring_per_request $((10 * 1024))

# Prefill from the start: 8200 tokens see 1 + 2 + ... of them; those past the 513th region rank 513 to 1024.
expect 0 size --context 8200 --prefill-rows 8200 --groups 1 --heads 1 --index-heads 1 --json
rest=$(sed -n '/"prefill": {/,$p' "$out")
printf '%s\n' "$rest" >"$out"
is operations select $((8 * (513 + 1024) * 512 / 2))
is operations dense $((4100 * 8201 * (768 + 4) + 8200 * 192))
is written summarize $((1025 * 256 + 7 * 1024))

# Layers and requests multiply what is held.
expect 0 size --layers 23 --batch 2 --json
one=$(field per_request)
is all_requests_and_layers $((46 * one))
expect 0 size --layers 23
says 'all 23 layers'

# Times.
expect 0 size --bandwidth 4300 --json
is_json
is bandwidth_gb_s 4300.0
cp "$out" "$work/bench.json"
least=$(field least_seconds)
expect 0 size --bench "$work/bench.json" --json
is least_seconds "$least"
expect 0 size --bandwidth 60.5
says 'at 60.5 GB/s'

# What cannot be counted in 64 bits is refused.
for wrong in '--context 9223372036854775807' '--batch 9223372036854775807' '--batch 100000000000 --layers 100' \
    '--context 4611686018427387904 --topk 1 --groups 1' '--context 20000000000 --prefill-rows 20000000000'; do
    # shellcheck disable=SC2086
    expect 2 size $wrong
    says 'past 2^63'
done

expect 0 size --help
says 'usage: csa size'
says 'examples:'
for wrong in '--context 0' '--context -1' '--context x' '--context 99999999999999999999' '--context' '--groups 9' \
    '--heads 17' '--topk 1025' '--topk 0' '--block-size 48' '--kv fp16' '--bandwidth 0' '--bandwidth nan' \
    '--bandwidth 1x' '--query-len 9 --context 8' '--prefill-rows 9 --context 8' '--nonsense' 'extra' \
    "--bandwidth 1 --bench $work/bench.json"; do
    # shellcheck disable=SC2086
    expect 2 size $wrong
done
expect 3 size --index-heads 9

expect 4 size --bench "$work/none.json"
echo '{"bandwidth_gb_s": "fast"}' >"$work/bench.json"
expect 4 size --bench "$work/bench.json"
says 'no positive number "bandwidth_gb_s"'
echo '[1, 2' >"$work/bench.json"
expect 4 size --bench "$work/bench.json"
echo '{"bandwidth_gb_s": 1, "bandwidth_gb_s": 2}' >"$work/bench.json"
expect 4 size --bench "$work/bench.json"
