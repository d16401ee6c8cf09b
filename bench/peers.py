#!/usr/bin/env python3
"""What else could be used: PyTorch on the shapes of `csa bench decode`, in one table.

Peers: dense attention (scaled_dot_product_attention) in four forms, and the same sparse attention written with
plain PyTorch operations. Each shape is first timed by `csa bench decode --dense --json`, which this script runs
itself on the same number of threads; ratios are a peer's median time over that of csa's whole decode step.

PyTorch is installed by name into bench/.venv (ignored by git) if it is not there; what is done is printed.
SPDX-License-Identifier: Apache-2.0
"""
import argparse
import gc
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
VENV = HERE / ".venv"
REGION, HEAD, KV, SUMMARY = 8, 192, 384, 256

EXAMPLES = """examples:
  bench/peers.py
  bench/peers.py --contexts 131072,1048576 --threads 2 --cold
  bench/peers.py --contexts 8192 --batch 4 --json
"""


def parse():
    parser = argparse.ArgumentParser(description=__doc__, epilog=EXAMPLES,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csa", default=str(HERE.parent / "build/release/tools/csa"), help="the command")
    parser.add_argument("--contexts", default="8192,32768,131072", help="tokens, with commas between")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=16, help="query heads over one KV head")
    parser.add_argument("--index-heads", type=int, default=4)
    parser.add_argument("--topk", type=int, default=512)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--samples", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=3, help="a peer's samples stop after so long")
    parser.add_argument("--cold", action="store_true", help="flush the caches before each sample, of all")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


# ---- PyTorch ----


def say(text):
    print(f"peers: {text}", file=sys.stderr, flush=True)


def ensure_torch():
    """Goes on in the virtual environment, which is made first if need be."""
    python = VENV / "bin/python"
    if pathlib.Path(sys.prefix) == VENV:
        return
    if not python.exists():
        say(f"python -m venv {VENV.relative_to(HERE.parent)}")
        subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)
    if subprocess.run([str(python), "-c", "import torch"], capture_output=True, check=False).returncode:
        say("pip install torch numpy (this takes a while)")
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", "torch", "numpy"], check=True)
    os.execv(str(python), [str(python), *sys.argv])


# ---- Timing ----


def measure(call, args, flush):
    """The median of at least three samples, in seconds."""
    call()
    times, start = [], time.perf_counter()
    while len(times) < 3 or (len(times) < args.samples and time.perf_counter() - start < args.seconds):
        if flush is not None:
            flush.sum()
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def run_csa(args, context):
    command = [args.csa, "bench", "decode", "--context", str(context), "--batch", str(args.batch), "--heads",
               str(args.heads), "--index-heads", str(args.index_heads), "--topk", str(args.topk), "--threads",
               str(args.threads), "--samples", str(args.samples), "--dense", "--json"]
    command += ["--cold"] if args.cold else []
    say(" ".join(command))
    report = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    stages = report["runs"][0]["stages"]
    dense = stages["dense"]
    return {"report": report, "csa": stages["decode"]["median_seconds"], "dense_share": dense["limit_share"],
            "dense_limit": dense["limit"], "peers": {"csa dense attention, bf16": dense["median_seconds"]}}


# ---- Peers: each returns its name and a call without arguments ----


def dense_peers(torch, args, context):
    attention = torch.nn.functional.scaled_dot_product_attention
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype).rsplit(".", maxsplit=1)[-1]
        key = torch.randn(args.batch, 1, context, HEAD).to(dtype)
        value = torch.randn(args.batch, 1, context, HEAD).to(dtype)
        query = torch.randn(args.batch, args.heads, 1, HEAD).to(dtype)
        rows = query.transpose(1, 2).contiguous()
        yield f"sdpa {name}, heads as rows", lambda q=rows, k=key, v=value: attention(q, k, v)
        yield f"sdpa {name}, enable_gqa", lambda q=query, k=key, v=value: attention(q, k, v, enable_gqa=True)


def sparse_step(torch, data, args):
    """Scores by a product of matrices, topk, a gather, softmax: CSA as one would write it down."""
    dots = torch.relu(data["index_query"] @ data["summaries"].transpose(1, 2))
    scores = (dots * data["weights"]).sum(1)[:, :-1]
    best = scores.topk(min(args.topk, scores.shape[1]), dim=1).indices
    current = torch.full((args.batch, 1), scores.shape[1])
    selected = torch.cat([best, current], dim=1).sort(dim=1).values
    rows = data["kv"][data["requests"], selected].flatten(1, 2)
    key, value = rows.split(HEAD, dim=2)
    logits = (data["query"] @ key.transpose(1, 2)) * HEAD**-0.5
    return torch.softmax(logits.float(), dim=2).to(value.dtype) @ value


def sparse_peers(torch, args, context):
    regions = context // REGION
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype).rsplit(".", maxsplit=1)[-1]
        data = {
            "summaries": torch.randn(args.batch, regions, SUMMARY).to(dtype),
            "index_query": torch.randn(args.batch, args.index_heads, SUMMARY).to(dtype),
            "weights": torch.rand(args.batch, args.index_heads, 1).to(dtype),
            "kv": torch.randn(args.batch, regions, REGION, KV).to(dtype),
            "query": torch.randn(args.batch, args.heads, HEAD).to(dtype),
            "requests": torch.arange(args.batch)[:, None],
        }
        yield f"CSA in PyTorch, {name}", lambda d=data: sparse_step(torch, d, args)


def peers_at(torch, args, context, flush):
    results = {}
    for peers in (dense_peers, sparse_peers):
        for name, call in peers(torch, args, context):
            results[name] = measure(call, args, flush)
            gc.collect()
    return results


# ---- The table ----


def milliseconds(seconds):
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.1 else f"{seconds * 1e3:.3g} ms"


def print_table(torch, args, runs):
    contexts = list(runs)
    report = runs[contexts[0]]["report"]
    print(f"{report['processor']}, {args.threads} threads, csa {report['version']} ({report['backend']}, "
          f"{report['tier']}), PyTorch {torch.__version__}, {'cold' if args.cold else 'warm'} caches,\n"
          f"batch {args.batch}, {args.heads} heads over one KV head, {args.index_heads} index heads, topk "
          f"{args.topk}; in brackets: times csa's decode step\n")
    print("| decode step | " + " | ".join(f"{c}" for c in contexts) + " |")
    print("| --- |" + " --- |" * len(contexts))
    print("| csa decode, bf16 | " + " | ".join(milliseconds(runs[c]["csa"]) for c in contexts) + " |")
    for name in runs[contexts[0]]["peers"]:
        cells = []
        for context in contexts:
            seconds = runs[context]["peers"][name]
            cells.append(f"{milliseconds(seconds)} ({seconds / runs[context]['csa']:.1f})")
        print(f"| {name} | " + " | ".join(cells) + " |")
    shares = (f"{runs[c]['dense_share']:.0%} ({runs[c]['dense_limit']})" for c in contexts)
    print("| its share of the machine's limit | " + " | ".join(shares) + " |")


def print_json(torch, args, runs):
    shapes = [{"context": c, "csa_seconds": r["csa"], "dense_share": r["dense_share"],
               "peers": {n: {"seconds": s, "ratio": s / r["csa"]} for n, s in r["peers"].items()}}
              for c, r in runs.items()]
    print(json.dumps({"torch": torch.__version__, "threads": args.threads, "batch": args.batch, "heads": args.heads,
                      "cold": args.cold, "shapes": shapes}, indent=2))


def main():
    args = parse()
    ensure_torch()
    import torch  # pylint: disable=import-outside-toplevel

    torch.set_num_threads(args.threads)
    torch.manual_seed(1)
    runs = {}
    with torch.inference_mode():
        for context in (int(c) for c in args.contexts.split(",")):
            run = runs[context] = run_csa(args, context)
            flush = torch.ones(2 * run["report"]["last_cache_bytes"] // 4) if args.cold else None
            run["peers"].update(peers_at(torch, args, context, flush))
    (print_json if args.json else print_table)(torch, args, runs)


if __name__ == "__main__":
    main()
