#!/usr/bin/env python3
"""Writes the captures of this folder: the cases below, copied from a full set of recordings.

usage: captures/choose.py FULL_SET

The full set is 24 MB; what is kept here stays below 16 MB and still has every operation, both cache types,
one and several groups, and the corner cases.
"""
import fnmatch, json, pathlib, struct, sys

CHOICE = {
    "corners": "*",
    "decode_attention": "case0 case2 gate",
    "norm_rope": "indexer* joint0 joint2 joint3",
    "pack": "plain0 decode0 decode2 logits0_n2 logits1_n1 logits1_n2",
    "prefill": "metadata* gather1",
    "scores": "decode0 decode1 decode2 decode3 decode5",
    "select": "*_sorted",
    "steps": "decode1 prefill1 prefill2",
    "summary": "case1/* case2/step10_verify",
}


def choose(source, target, patterns):
    data = source.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header, body = json.loads(data[8 : 8 + size]), data[8 + size :]
    metadata = header.pop("__metadata__")
    kept = lambda case: any(fnmatch.fnmatchcase(case, p) for p in patterns.split())
    out, parts, end = {}, [], 0
    for name, tensor in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        if kept(name.rsplit("/", 1)[0]):
            begin, stop = tensor["data_offsets"]
            out[name] = dict(tensor, data_offsets=[end, end + stop - begin])
            parts.append(body[begin:stop])
            end += stop - begin
    out["__metadata__"] = {k: v for k, v in metadata.items() if k == "format" or kept(k)}
    text = json.dumps(out, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    target.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(parts))


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    here, full = pathlib.Path(__file__).parent, pathlib.Path(sys.argv[1])
    (here / "calls").mkdir(exist_ok=True)
    for name, patterns in CHOICE.items():
        choose(full / f"{name}.safetensors", here / "calls" / f"{name}.safetensors", patterns)
    (here / "smollm2.safetensors").write_bytes((full / "smollm2.safetensors").read_bytes())


main()
