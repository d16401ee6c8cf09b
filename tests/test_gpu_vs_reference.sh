#!/usr/bin/env bash
# bench/gpu_vs_reference without a GPU: recorded files, and a whole run with a stand-in on either side.
set -euo pipefail
script=$(cd "$(dirname "$0")/.." && pwd)/bench/gpu_vs_reference
command -v python3 >/dev/null || {
    echo "skipped: no python3"
    exit 77
}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

die() {
    echo "FAILED: $*" >&2
    cat "$work/out" >&2
    exit 1
}
run() { # run CODE ARGUMENT...
    local got=0
    python3 "$script" "${@:2}" --out "$work/results" >"$work/out" 2>&1 || got=$?
    [ "$got" = "$1" ] || die "${*:2}: exit code $got, not $1"
}
says() { grep -qF -- "$1" "$work/out" || die "does not say '$1'"; }
holds() { grep -qF -- "$1" "$work/results/comparison.md" || die "comparison.md: no '$1'"; }

# Two recorded files: a shape that both have, one on each side alone, and a prefill step.
cat >"$work/ours.json" <<'END'
{"processor": "a GPU", "version": "1.2.3", "tier": "sm90",
 "limits": [{"stream_gb_s": 4500.4, "cache_gb_s": 6000, "gather_6144_gb_s": 4300, "gather_3072_gb_s": 4200}],
 "runs": [
 {"context": 131072, "batch": 8, "groups": 1, "heads": 16, "query_len": 1, "rows": 0, "topk": 512, "kv": "bf16",
  "stages": {"score": {"median_seconds": 9e-6}, "select": {"median_seconds": 5e-6},
             "attend": {"median_seconds": 1e-5}, "decode": {"median_seconds": 2.5e-5}}},
 {"context": 1024, "batch": 1, "groups": 2, "heads": 4, "query_len": 3, "rows": 0, "topk": 512, "kv": "e4m3",
  "stages": {"score": {"median_seconds": 1e-6}, "select": {"median_seconds": 1e-6},
             "attend": {"median_seconds": 1e-6}, "decode": {"median_seconds": 1e-5}}},
 {"context": 8192, "batch": 1, "groups": 1, "heads": 16, "query_len": 1, "rows": 2048, "topk": 512, "kv": "bf16",
  "stages": {"score": {"median_seconds": 1e-4}, "select": {"median_seconds": 1e-4},
             "attend": {"median_seconds": 3e-4}, "prefill": {"median_seconds": 5e-4}}}]}
END
cat >"$work/reference.json" <<'END'
[{"batch": 8, "context": 131072, "groups": 1, "kv": "bf16", "query_len": 1, "heads": 16, "topk": 512,
  "scores": 12.3, "select": 37.2, "attention": 14.5, "whole": 75.0, "byte_floor": 13.66},
 {"batch": 64, "context": 8192, "groups": 4, "kv": "bf16", "query_len": 1, "heads": 16, "topk": 512,
  "scores": 19.4, "select": 23.3, "attention": 202.2, "whole": 243.9, "byte_floor": 191.5},
 {"rows": 2048, "context": 8192, "heads": 16, "topk": 512, "plan": 0.5, "scores": 0.24, "select": 0.14,
  "attention": 0.78, "whole": 1.1, "union8": 1.4}]
END
run 0 --recorded "$work/ours.json" "$work/reference.json"
# The floor is the reference script's own; 25 / (1.25 * 13.66 + 9) = 0.96.
grep -Eq 'listed +8 +131072 .* 75\.0 +25\.0 +3\.00 +13\.7 +0\.96$' "$work/out" || die "the row of both"
grep -Eq 'listed +64 +8192 +4 .* 243\.9 +- +- +191\.5 +-$' "$work/out" || die "the row of the reference alone"
grep -Eq '2048 rows .* 1100\.0 +500\.0 +2\.20 +- +-$' "$work/out" || die "the row of prefill"
# A context of no more regions than topk is read once: 6 rows of 128 regions.
grep -Eq 'listed +1 +1024 +2 +e4m3 +3 +4 .* - +10\.0 +- +0\.6 +1\.0[0-9]$' "$work/out" || die "the row of ours alone"
says 'worst ratio of all: 2.20'
says 'farthest from the limit of 2 shapes: 1.0'
says 'not run: batch 64, context 8192, 4 groups of 16 heads, topk 512, bf16, 1 tokens: csa'
says 'not run: batch 1, context 1024, 2 groups of 4 heads, topk 512, e4m3, 3 tokens: reference'
holds '# csa 1.2.3 and the reference on a GPU'
holds 'streaming read 4500 GB/s'
holds '12.3 / 37.2 / 14.5 | 9.0 / 5.0 / 10.0 |'

# Stand-ins: csa fails wherever batch 128 is in the list; the reference has no groups but 1, and dies at batch 32.
cat >"$work/csa" <<'END'
#!/usr/bin/env python3
import json, sys
runs = []
for line in open(sys.argv[sys.argv.index("--list") + 1]):
    words = [word for word in line.split() if word != "--gate"]
    run = {key[2:].replace("-", "_"): value for key, value in zip(words[::2], words[1::2])}
    run = {key: value if key == "kv" else int(value) for key, value in run.items()}
    if run["batch"] == 128:
        sys.exit("csa bench: a fault")
    names = ("score", "select", "attend", "prefill" if "rows" in run else "decode")
    runs.append({"query_len": 1, "rows": 0, **run, "stages": {name: {"median_seconds": 2e-5} for name in names}})
print(json.dumps({"processor": "none", "version": "0", "tier": "", "limits": [], "runs": runs}))
END
chmod +x "$work/csa"
mkdir "$work/kit" "$work/kit/torch"
echo "export PYTHONPATH=$work/kit" >"$work/kit/activate"
cat >"$work/kit/torch/__init__.py" <<'END'
class cuda:
    synchronize = staticmethod(lambda: None)
END
cat >"$work/kit/bench_decode.py" <<'END'
import os, sys
assert sys.argv[1:5] == ["--heads", sys.argv[2], "--topk", sys.argv[4]] and len(sys.argv) == 6
batch, context, groups, kv, query_len = sys.argv[5].split(",")
assert groups == "1", "one group"
if batch == "32":
    os._exit(9)
print("a warning")
print({"batch": int(batch), "scores": 1.0, "select": 2.0, "attention": 3.0, "whole": 10.0 * int(batch)})
END
run 1 --csa "$work/csa" --kit "$work/kit" --random 3 --seed 5 --budget 60
says 'worst ratio of all: 0.50'
says '4 groups of 16 heads, topk 512, bf16, 1 tokens: reference: failed: AssertionError one group'
says 'failed: batch 32, context 131072, 1 groups of 16 heads, topk 512, bf16, 1 tokens: reference: it ended'
says 'failed: batch 128, context 32768, 1 groups of 16 heads, topk 512, bf16, 1 tokens: csa: csa bench: a fault'
grep -Eq 'listed +64 +131072 .* 640\.0 +20\.0 +32\.00 ' "$work/out" || die "a row behind the end of a process"
grep -Eq 'axes +256 .* 2560\.0 +20\.0 +128\.00 ' "$work/out" || die "a row of an axis"
[ "$(grep -c '^ *random ' "$work/out")" = 3 ] || die "random rows"

# Without a kit: csa and the floor. Without time: nothing is compared, and everything is named.
run 0 --csa "$work/csa" --phases prefill
if grep -q farthest "$work/out"; then die "prefill has a floor"; fi
run 1 --csa "$work/csa" --kit "$work/kit" --phases axes --budget 0
says 'not run: batch 256, context 131072, 1 groups of 16 heads, topk 512, bf16, 1 tokens: csa'
run 2 --phases nothing
run 2 --recorded "$work/none" "$work/reference.json"
says "$work/none: No such file"
run 2 --recorded "$script" "$work/reference.json"
says 'not JSON'
run 2 --recorded "$work/reference.json" "$work/ours.json"
says 'are not what --recorded takes'
run 2 --kit "$work/nowhere"
printf '#!/bin/sh\necho "csa bench: no GPU" >&2\nexit 3\n' >"$work/csa"
run 3 --csa "$work/csa" --kit "$work/kit"
says 'no GPU'
echo "bench/gpu_vs_reference: tables and runs are right"
