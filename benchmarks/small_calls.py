"""What does a layer add to its operators? Short calls against the same work written by hand.

python benchmarks/small_calls.py
python benchmarks/small_calls.py --calls  # of Python inside regard, and of attend beside torch

By hand: the layer's four projections, a table of cosines and sines, a fixed buffer for keys and
values, scaled_dot_product_attention; nothing is checked and nothing is chosen. Decode steps append
one token after 100, as a loop of generation does; or each after the cache is cut back to these, as
for drafts that were refused.

Targets: a decode step of the layer of 64 channels at most 1.25 times as long as by hand, that of 72
(heads of 12) at most 1.4 times; that of the layer of 576 at most 25 us longer.
"""

import argparse
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from common import THREADS, card, finish, interleave, summary
from torch import Tensor, nn

from regard import (
    Attention,
    Causal,
    KVCache,
    LatentKVAttention,
    MultiHeadLatentAttention,
    Padding,
    PagedCache,
    PagePool,
    QuantizedCache,
    Rotary,
    SlidingCache,
    SlidingWindow,
    Span,
    StaticCache,
    attend,
)
from regard.cache import Cache

PAST, STEPS = 100, 64  # tokens before the first step; steps before the cache is cut back to them
SIZES = {64: (8, 2), 72: (6, 2), 576: (9, 3)}  # hidden size: query heads, key heads
TARGETS = {64: "ratio 1.25", 72: "ratio 1.4", 576: "25 us more"}
BY_HAND = "by hand"
SHORT = (2, 8, 10, 64)  # rows, heads, tokens, head dim of calls of `attend`
CALLS = {  # Python calls inside regard and modules that they are in, at most
    "layer, inference": (50, 14),
    "layer, training": (70, 16),
    "attend, plain": (70, 15),
    "attend, padded": (70, 15),
    "step, KVCache": (60, None),
    "step, MLA": (90, None),
    "step, PagedCache": (120, None),
}
TIMES = {"no_grad": 1.3, "grad mode": 1.4, "padded": 1.8}  # ratios to torch's kernel, at most


class ByHand:
    """The work of a layer's decode step, and no more."""

    def __init__(self, layer: Attention, room: int) -> None:
        self.layer, self.length = layer, 0
        self.heads, self.groups, self.dim = layer.num_heads, layer.num_kv_heads, layer.head_dim
        like = layer.q_proj.weight
        self.keys, self.values = like.new_zeros(2, 1, self.groups, room, self.dim).unbind()
        assert isinstance(layer.rope, Rotary)
        angles = layer.rope.angles(torch.arange(room)).repeat(1, 2)
        self.cos, self.sin = angles.cos().to(like.dtype), angles.sin().to(like.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        layer, dim, (batch, length, _) = self.layer, self.dim, x.shape
        start, stop = self.length, self.length + length
        q = layer.q_proj(x).view(batch, length, self.heads, dim).transpose(1, 2)
        k = layer.k_proj(x).view(batch, length, self.groups, dim).transpose(1, 2)
        v = layer.v_proj(x).view(batch, length, self.groups, dim).transpose(1, 2)
        cos, sin = self.cos[start:stop], self.sin[start:stop]
        self.keys[:, :, start:stop] = k * cos + rotate_half(k) * sin
        self.values[:, :, start:stop] = v
        self.length = stop
        out = F.scaled_dot_product_attention(
            q * cos + rotate_half(q) * sin,
            self.keys[:, :, :stop],
            self.values[:, :, :stop],
            is_causal=length > 1,
            enable_gqa=True,
        )
        result: Tensor = layer.o_proj(out.transpose(1, 2).reshape(batch, length, -1))
        return result

    def truncate(self, length: int) -> None:
        self.length = length


def rotate_half(x: Tensor) -> Tensor:
    """The other channel of each pair, as model files of transformers write it."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([-b, a], dim=-1)


def steps(step: Callable[[Tensor], Tensor], cache: Any, new: Tensor) -> Callable[[], Tensor]:
    """One step after another, each with one more token than the last."""

    def run() -> Tensor:
        if cache.length == PAST + STEPS:
            cache.truncate(PAST)
        return step(new)

    return run


def filled(layer: nn.Module, cache: Cache, prompt: Tensor, new: Tensor) -> Callable[[], Tensor]:
    """Steps of a layer after the prompt."""
    layer(prompt, cache=cache)
    return steps(lambda x: layer(x, cache=cache), cache, new)


def plain(size: int, dtype: torch.dtype, **options: Any) -> Attention:
    heads, groups = SIZES[size]
    rope = Rotary(size // heads)
    return Attention(size, heads, num_kv_heads=groups, rope=rope, **options).to(dtype).eval()


def decoding(size: int, dtype: torch.dtype, rounds: int) -> dict[str, object]:
    """A decode step by hand, and with each cache and each layer."""
    layer, window = plain(size, dtype, mask=Causal()), PAST + STEPS
    prompt, new = torch.randn(1, PAST, size).to(dtype), torch.randn(1, 1, size).to(dtype)
    hand = ByHand(layer, PAST + STEPS)
    hand(prompt)
    sliding = plain(size, dtype, mask=Causal() & SlidingWindow(window))
    variants = {BY_HAND: steps(hand, hand, new)}
    variants["KVCache"] = filled(layer, KVCache(), prompt, new)
    variants["StaticCache"] = filled(layer, StaticCache(window), prompt, new)
    variants["SlidingCache"] = filled(sliding, SlidingCache(window, STEPS), prompt, new)
    variants["QuantizedCache"] = filled(layer, QuantizedCache(), prompt, new)
    for other in (latent(size, dtype), latent_kv(size, dtype)):
        variants[f"{type(other).__name__}"] = filled(other, KVCache(), prompt, new)
    check(variants)
    return measured("decode", size, dtype, variants, rounds)


def drafting(size: int, dtype: torch.dtype, rounds: int) -> dict[str, object]:
    """A decode step after the cache is cut back to the prompt, by hand and with a growing cache."""
    layer, cache = plain(size, dtype, mask=Causal()), KVCache()
    prompt, new = torch.randn(1, PAST, size).to(dtype), torch.randn(1, 1, size).to(dtype)
    hand = ByHand(layer, PAST + 1)
    hand(prompt), layer(prompt, cache=cache)

    def cut(step: Callable[[Tensor], Tensor], held: Any) -> Callable[[], Tensor]:
        def run() -> Tensor:
            held.truncate(PAST)
            return step(new)

        return run

    variants = {BY_HAND: cut(hand, hand), "KVCache": cut(lambda x: layer(x, cache=cache), cache)}
    check(variants)
    return measured("decode after a cut", size, dtype, variants, rounds)


def latent(size: int, dtype: torch.dtype) -> nn.Module:
    dim = size // SIZES[size][0]
    layer = MultiHeadLatentAttention(
        size,
        SIZES[size][0],
        kv_lora_rank=4 * dim,
        qk_nope_head_dim=dim,
        qk_rope_head_dim=dim,
        v_head_dim=dim,
        rope=Rotary(dim),
        mask=Causal(),
    )
    return layer.to(dtype).eval()


def latent_kv(size: int, dtype: torch.dtype) -> nn.Module:
    heads, groups = SIZES[size]
    dim = size // heads
    layer = LatentKVAttention(
        size,
        heads,
        num_kv_heads=groups,
        head_dim=dim,
        kv_lora_rank=dim,
        rope=Rotary(dim),
        mask=Causal(),
    )
    return layer.to(dtype).eval()


def prefilling(size: int, dtype: torch.dtype, length: int, rounds: int) -> dict[str, object]:
    """A short prompt, into a new cache and without one."""
    layer, x = plain(size, dtype, mask=Causal()), torch.randn(1, length, size).to(dtype)
    hand = ByHand(layer, length)

    def by_hand() -> Tensor:
        hand.truncate(0)
        return hand(x)

    variants: dict[str, Callable[[], Tensor]] = {BY_HAND: by_hand}
    variants["NO_CACHE"] = lambda: layer(x)
    variants["KVCache"] = lambda: layer(x, cache=KVCache())
    variants["StaticCache"] = lambda: layer(x, cache=StaticCache(length))
    check(variants)
    return measured(f"prefill of {length}", size, dtype, variants, rounds)


def check(variants: dict[str, Callable[[], Tensor]]) -> None:
    """By hand is the same function."""
    expected, found = variants[BY_HAND](), variants["KVCache"]()
    torch.testing.assert_close(found, expected, rtol=0, atol=16 * torch.finfo(found.dtype).eps)


def measured(
    kind: str,
    size: int,
    dtype: torch.dtype,
    variants: dict[str, Callable[[], Tensor]],
    rounds: int,
) -> dict[str, object]:
    times = interleave(variants, rounds=rounds)
    rows: dict[str, dict[str, float]] = summary(times, BY_HAND)
    name = str(dtype).removeprefix("torch.")
    card(f"{kind}, {size} channels, {'/'.join(map(str, SIZES[size]))} heads, {name}", rows, BY_HAND)
    more = 1e3 * (rows["KVCache"]["ms"] - rows[BY_HAND]["ms"])
    target = None if kind.startswith("prefill") else TARGETS[size]
    print(f"  KVCache: {more:.0f} us more than by hand; target {target or 'none'}")
    case = {"kind": kind, "size": size, "dtype": name}
    return {**case, "target": target, "us_more": more, "rows": rows}


def python_calls(run: Callable[[], object]) -> tuple[int, int]:
    """Calls of Python functions inside regard, and the modules they are in, when `run` repeats."""
    package, files = str(Path(sys.modules["regard"].__path__[0])), []

    def count(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(package):
            files.append(frame.f_code.co_filename)

    for _ in range(3):
        run()
    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return len(files), len(set(files))


def counting() -> list[dict[str, object]]:
    """What short calls of a layer and of `attend` pass through."""
    layer, x = plain(64, torch.float32, mask=Causal()), torch.randn(2, 10, 64)
    q, k, v = torch.randn(3, *SHORT).unbind()
    padded = Causal() & Padding.from_lengths([10, 7])
    prompt, new = torch.randn(1, PAST, 64), torch.randn(1, 1, 64)
    mla, pool = latent(64, torch.float32), PagePool(num_pages=40, page_size=16)
    runs = {
        "layer, inference": lambda: layer(x),
        "layer, training": lambda: layer(x),
        "attend, plain": lambda: attend(q, k, v, mask=Causal()),
        "attend, padded": lambda: attend(q, k, v, mask=padded),
        "step, KVCache": filled(layer, KVCache(), prompt, new),
        "step, MLA": filled(mla, KVCache(), prompt, new),
        "step, PagedCache": filled(layer, PagedCache(pool), prompt, new),
    }
    print(f"\n{'Python calls in regard':<38}{'calls':>8}{'modules':>9}   at most")
    rows: list[dict[str, object]] = []
    for name, run in runs.items():
        with torch.enable_grad() if "training" in name else nullcontext():
            calls, modules = python_calls(run)
        most = CALLS[name]
        print(f"  {name:<36}{calls:>8}{modules:>9}   {most[0]}, {most[1] or '-'}")
        rows.append({"call": name, "calls": calls, "modules": modules, "target": most})
    return rows


def beside_torch(rounds: int) -> list[dict[str, object]]:
    """`attend` on few tokens beside torch's kernel, with the mask as a tensor where one is."""
    q, k, v = torch.randn(3, *SHORT).unbind()
    padding, causal = Padding.from_lengths([10, 7]), Causal()
    mask, keep = causal & padding, (causal & padding).dense(span_of(q), batch=2)
    kernel, results = F.scaled_dot_product_attention, []
    for name, target in TIMES.items():
        if name == "padded":
            runs = {
                "torch": lambda: kernel(q, k, v, attn_mask=keep),
                "regard": lambda: attend(q, k, v, mask=mask),
            }
        else:
            runs = {
                "torch": lambda: kernel(q, k, v, is_causal=True),
                "regard": lambda: attend(q, k, v, mask=causal),
            }
        with torch.set_grad_enabled(name == "grad mode"):
            rows = summary(interleave(runs, rounds=rounds), "torch")
        card(f"attend {list(SHORT)}, {name}; target {target}", rows, "torch")
        results.append({"kind": name, "target": target, "rows": rows})
    return results


def span_of(q: Tensor) -> Span:
    return Span(0, q.shape[2], 0, q.shape[2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--length", type=int, default=16, help="tokens of the short prompt")
    parser.add_argument("--calls", action="store_true", help="count Python calls, and time attend")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    print(f"{THREADS} threads")
    if options.calls:
        finish("small_calls", [*counting(), *beside_torch(options.rounds)])
        return
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        for size in options.sizes:
            results.append(decoding(size, dtype, options.rounds))
            results.append(drafting(size, dtype, options.rounds))
            results.append(prefilling(size, dtype, options.length, options.rounds))
    finish("small_calls", results)


if __name__ == "__main__":
    main()
