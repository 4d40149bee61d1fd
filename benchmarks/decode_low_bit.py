"""How much faster is decoding from codes than from the values? One step each, keys cold.

python benchmarks/decode_low_bit.py

Targets, as a ratio of time to regard's own float32: 8-bit codes 0.45 for 32 heads on 8, and 0.6 for
absorbed MLA. Besides, 32 heads on 8: 8-bit codes take at most 0.8 of the time of bfloat16, and
4-bit codes no more time than 8-bit ones. For 1 and for 2 threads.
"""

import argparse
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from common import Cold, Store, card, finish, interleave, quartiles, read_bandwidth, summary
from torch import Tensor

from regard import Causal, Part, QuantizedCache, Span, prepare
from regard.cache.codes import QuantizedStreams

BASE = "float32"
STORED = {BASE: 32, "bfloat16": 16, "int8": 8, "int4": 4}  # bits of an element


class Shape(NamedTuple):
    """Of a call with one query; where `joined`, the values are the first columns of the keys."""

    name: str
    heads: int
    kv_heads: int
    width: int
    values: int
    joined: bool = False

    @property
    def elements(self) -> int:
        """Elements of a token that are cached."""
        return self.kv_heads * (self.width + (0 if self.joined else self.values))


GQA = Shape("32 heads on 8", 32, 8, 128, 128)
MLA = Shape("absorbed MLA, 16 heads", 16, 1, 576, 512, joined=True)
TARGETS = {  # at most so much of the time of another variant
    (GQA.name, "int8", BASE): 0.45,
    (GQA.name, "int8", "bfloat16"): 0.8,
    (GQA.name, "int4", "int8"): 1.0,
    (MLA.name, "int8", BASE): 0.6,
}


def parts_of(shape: Shape, stored: str, keys: int, store: Store) -> Cold:
    """What a cache returns for so many tokens, in copies that are together too large to stay in the
    processor's caches."""
    widths = (shape.width,) if shape.joined else (shape.width, shape.values)
    streams = [store(1, shape.kv_heads, keys, width) for width in widths]
    if stored == "bfloat16":
        streams = [each.bfloat16() for each in streams]
    cache = QuantizedCache(STORED[stored]) if stored.startswith("int") else None
    codes = None if cache is None else cache.update(*streams)[0].quantized

    def copy() -> Part:
        if codes is None:
            return Part(0, keys, tuple(each.clone() for each in streams))
        copies = [x._replace(codes=x.codes.clone(), scales=x.scales.clone()) for x in codes]
        return Part(0, keys, QuantizedStreams(copies))

    return Cold(copy, nbytes_of(shape, stored, keys))


def nbytes_of(shape: Shape, stored: str, keys: int) -> int:
    """Bytes that a step reads; codes have a scale and a zero for 64 elements."""
    bits = STORED[stored] + (32 / 64 if stored.startswith("int") else 0)
    return round(shape.elements * keys * bits / 8)


def step(shape: Shape, stored: str, keys: int, store: Store) -> Any:
    """A function that decodes one token."""
    cold = parts_of(shape, stored, keys, store)
    dtype = torch.bfloat16 if stored == "bfloat16" else torch.float32
    q = torch.randn(1, shape.heads, 1, shape.width).to(dtype)
    k = q[:, : shape.kv_heads]
    bits = STORED[stored] if stored.startswith("int") else None
    span = Span(keys - 1, keys, 0, keys)

    def run() -> Tensor:
        call = prepare(q, k, k[..., : shape.values], mask=Causal(), span=span, bits=bits)
        return call.run(q, (cold(),))

    return run


def sdpa(shape: Shape, keys: int, store: Store) -> Any:
    """torch's own kernel on float32."""
    cold, q = parts_of(shape, BASE, keys, store), torch.randn(1, shape.heads, 1, shape.width)

    def run() -> Tensor:
        k, *rest = cold().streams
        v = rest[0] if rest else k[..., : shape.values]
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    return run


def case(shape: Shape, keys: int, threads: int, rounds: int, bandwidth: float) -> dict[str, object]:
    store = Store()
    variants = {stored: step(shape, stored, keys, store) for stored in STORED}
    variants["sdpa, float32"] = sdpa(shape, keys, store)
    times = interleave(variants, rounds=rounds)
    rows = summary(times, BASE)
    plural = "thread" if threads == 1 else "threads"
    card(f"{shape.name}, {keys:,} keys, {threads} {plural}", rows, BASE)
    found = []
    for (name, stored, other), target in TARGETS.items():
        if name == shape.name:
            ratio, _, _ = quartiles(times[stored], times[other])
            found.append({"of": stored, "to": other, "ratio": ratio, "target": target})
            print(f"  {stored} takes {ratio:.2f} of the time of {other}; target {target}")
    read = {}
    for stored in STORED:
        seconds = rows[stored]["ms"] / 1e3
        read[stored] = nbytes_of(shape, stored, keys) / seconds / bandwidth
    shares = ", ".join(f"{stored} {share:.0%}" for stored, share in read.items())
    print(f"  of the measured read bandwidth: {shares}")
    about = {"shape": shape.name, "keys": keys, "threads": threads}
    return {**about, "targets": found, "of_bandwidth": read, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--keys", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--threads", type=int, nargs="+", default=[2, 1])
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    results = []
    for threads in options.threads:
        torch.set_num_threads(threads)
        bandwidth = read_bandwidth()
        print(f"\n{threads} threads, {bandwidth / 1e9:.1f} GB/s read")
        for shape in (GQA, MLA):
            for keys in options.keys:
                results.append(case(shape, keys, threads, options.rounds, bandwidth))
    finish("decode_low_bit", results)


if __name__ == "__main__":
    main()
