"""How much faster is decoding from codes than from the values? One step each, keys cold.

python benchmarks/decode_low_bit.py
python benchmarks/decode_low_bit.py --warm --keys 3008

Keys and values are float32, bfloat16, or codes, each in bits of their own (K8V4: 8 and 4), in one
tensor for each, or in pages of 64 tokens: one page after another, or shuffled.

Targets, as a ratio of time to regard's own float32: K8V8 0.45 for 32 heads on 8, and 0.6 for
absorbed MLA. Besides, 32 heads on 8: K8V8 takes at most 0.8 of the time of bfloat16, and K4V4 no
more than K8V8; with queries in bfloat16, whose products with codes are of integers, both take at
most 0.75; shuffled pages take at most 1.1 of the time of one tensor. For 1 and for 2 threads.

With `--warm` the keys stay in the processor's caches, where codes save no time that memory takes.
"""

import argparse
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from common import (
    Cold,
    Store,
    card,
    finish,
    interleave,
    product_rate,
    quartiles,
    read_bandwidth,
    summary,
)
from torch import Tensor

from regard import Causal, Part, Span, prepare
from regard.cache.codes import QuantizedStream, quantize, quantize_channels
from regard.cache.paging.formats import GROUP, format_of
from regard.cache.paging.reading import PagedStream
from regard.cache.parts import Streams

BASE = "float32"
FORMATS = (BASE, "bfloat16", "K8V8", "K8V4", "K6V4", "K4V4")
PAGED = (BASE, "bfloat16", "K8V8", "K4V4")  # that are measured in pages too
HALF = ", queries in bfloat16"
PAGE = 64  # tokens


class Shape(NamedTuple):
    """Of a call with one query; where `joined`, the values are the first columns of the keys."""

    name: str
    heads: int
    kv_heads: int
    width: int
    values: int
    joined: bool = False
    warm: bool = False  # whether the keys stay in the processor's caches


WARM = Shape("6 heads, in the processor's caches", 6, 6, 96, 96, warm=True)
GQA = Shape("32 heads on 8", 32, 8, 128, 128)
MLA = Shape("absorbed MLA, 16 heads", 16, 1, 576, 512, joined=True)


class Variant(NamedTuple):
    """How keys and values are stored."""

    format: str
    pages: str = ""  # "in pages", "in shuffled pages", or in one tensor for each
    half: bool = False  # codes for queries in bfloat16, which are multiplied as integers

    def __str__(self) -> str:
        return f"{self.format} {self.pages}".strip() + self.half * HALF

    def bits(self, index: int) -> int:
        """Of an element of a stream."""
        if self.is_floating:
            return 32 if self.format == BASE else 16
        return format_of(self.format).bits_of_stream(index) or 32

    @property
    def is_floating(self) -> bool:
        return self.format in (BASE, "bfloat16")

    @property
    def dtype(self) -> torch.dtype:
        """Of the queries."""
        half = self.half or self.format == "bfloat16"
        return torch.bfloat16 if half else torch.float32

    def stored(self, stream: Tensor, index: int) -> Tensor | QuantizedStream:
        """A stream in this format."""
        if self.is_floating:
            return stream.to(self.dtype)
        bits, sizes = self.bits(index), (stream.shape[3], stream.dtype)
        run, group = format_of(self.format).shares(index, PAGE if self.pages else 1)
        if run > 1:
            stored = quantize_channels(stream, bits, run)
            return QuantizedStream(*stored, bits, group, *sizes, run=run)
        return QuantizedStream(*quantize(stream, bits, group), bits, group, *sizes)


ORDERS = "in pages", "in shuffled pages"
VARIANTS = [
    *(Variant(each) for each in FORMATS),
    *(Variant(each, half=True) for each in FORMATS[2:]),
    *(Variant(each, order) for each in PAGED for order in ORDERS),
]
TARGETS = {  # at most so much of the time of another variant
    (GQA.name, "K8V8", BASE): 0.45,
    (GQA.name, "K8V8", "bfloat16"): 0.8,
    (GQA.name, "K4V4", "K8V8"): 1.0,
    (GQA.name, "K8V8" + HALF, "bfloat16"): 0.75,
    (GQA.name, "K4V4" + HALF, "K8V8" + HALF): 0.75,
    (MLA.name, "K8V8", BASE): 0.6,
    (MLA.name, "K8V8" + HALF, BASE): 0.6,
    **{(GQA.name, f"{each} {order}", each): 1.1 for each in PAGED for order in ORDERS},
}


def streams_of(shape: Shape, variant: Variant, keys: int, store: Store) -> list[Any]:
    """What a cache stores of so many tokens, or a slab of their pages in any order."""
    widths = (shape.width,) if shape.joined else (shape.width, shape.values)
    streams = [store(1, shape.kv_heads, keys, width) for width in widths]
    return [variant.stored(each, index) for index, each in enumerate(streams)]


def parts_of(shape: Shape, variant: Variant, keys: int, store: Store) -> Cold:
    """What a cache returns for so many tokens, in copies that are together too large to stay in the
    processor's caches; one copy of a shape whose keys stay there."""
    streams = streams_of(shape, variant, keys, store)
    order = (
        torch.arange(keys // PAGE) if variant.pages == ORDERS[0] else torch.randperm(keys // PAGE)
    )

    def copy() -> Part:
        copies = [
            x.clone()
            if isinstance(x, Tensor)
            else x._replace(codes=x.codes.clone(), scales=x.scales.clone())
            for x in streams
        ]
        if variant.pages:
            paged = [PagedStream(x, order[None], PAGE, 0, keys) for x in copies]
            return Part(0, keys, Streams(paged))
        return Part(0, keys, tuple(copies) if variant.is_floating else Streams(copies))

    found = Cold(copy, nbytes_of(shape, variant, keys))
    if shape.warm:
        del found.buffers[1:]
    return found


def nbytes_of(shape: Shape, variant: Variant, keys: int) -> int:
    """Bytes that a step reads; codes have a scale and a zero for a group of elements."""
    widths = (shape.width,) if shape.joined else (shape.width, shape.values)
    more = 0 if variant.is_floating else 32 / GROUP
    bits = sum(width * (variant.bits(index) + more) for index, width in enumerate(widths))
    return round(shape.kv_heads * keys * bits / 8)


def step(shape: Shape, variant: Variant, keys: int, store: Store) -> Any:
    """A function that decodes one token."""
    cold = parts_of(shape, variant, keys, store)
    q = torch.randn(1, shape.heads, 1, shape.width).to(variant.dtype)
    k = q[:, : shape.kv_heads]
    span = Span(keys - 1, keys, 0, keys)

    def run() -> Tensor:
        call = prepare(q, k, k[..., : shape.values], mask=Causal(), span=span, backend="fused")
        return call.run(q, (cold(),))

    return run


def sdpa(shape: Shape, keys: int, store: Store) -> Any:
    """torch's own kernel on float32."""
    cold, q = (
        parts_of(shape, Variant(BASE), keys, store),
        torch.randn(1, shape.heads, 1, shape.width),
    )

    def run() -> Tensor:
        k, *rest = cold().streams
        v = rest[0] if rest else k[..., : shape.values]
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    return run


def flops_of(shape: Shape, keys: int) -> int:
    """Floating-point operations of the products of a step."""
    return 2 * shape.heads * keys * (shape.width + shape.values)


class Rates(NamedTuple):
    """Of the machine, with so many threads."""

    bandwidth: float  # bytes a second
    products: float  # floating-point operations a second, of float32 products


def case(shape: Shape, keys: int, threads: int, rounds: int, rates: Rates) -> dict[str, object]:
    store = Store()
    variants = {str(each): step(shape, each, keys, store) for each in VARIANTS}
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
    for each in VARIANTS:
        seconds = rows[str(each)]["ms"] / 1e3
        read[str(each)] = nbytes_of(shape, each, keys) / seconds / rates.bandwidth
    shares = ", ".join(f"{stored} {share:.0%}" for stored, share in read.items())
    print(f"  of the measured read bandwidth: {shares}")
    products = 1e3 * flops_of(shape, keys) / rates.products / rows[BASE]["ms"]
    print(f"  products in float32 alone would take {products:.2f} of the time of {BASE}")
    about = {"shape": shape.name, "keys": keys, "threads": threads, "products": products}
    return {**about, "targets": found, "of_bandwidth": read, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--keys", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--threads", type=int, nargs="+", default=[2, 1])
    parser.add_argument("--warm", action="store_true", help="keys in the processor's caches")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    results = []
    for threads in options.threads:
        torch.set_num_threads(threads)
        rates = Rates(read_bandwidth(), product_rate(torch.float32))
        read, products = (rate / 1e9 for rate in rates)
        print(f"\n{threads} threads, {read:.1f} GB/s read, {products:.0f} GFLOP/s in float32")
        for shape in (WARM,) if options.warm else (GQA, MLA):
            for keys in options.keys:
                results.append(case(shape, keys, threads, options.rounds, rates))
    finish("decode_low_bit", results)


if __name__ == "__main__":
    main()
