"""What does a layer add to its operators? Short calls against the same work written by hand.

python benchmarks/small_calls.py

By hand: the layer's four projections, a table of cosines and sines, a fixed buffer for keys and
values, scaled_dot_product_attention; nothing is checked and nothing is chosen. Decode steps append
one token after 100, as a loop of generation does.

Targets: a decode step of the layer of 64 channels at most 1.5 times as long as by hand; that of the
layer of 576 at most 25 us longer.
"""

import argparse
from collections.abc import Callable
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
    QuantizedCache,
    Rotary,
    SlidingCache,
    SlidingWindow,
    StaticCache,
)
from regard.cache import Cache

PAST, STEPS = 100, 64  # tokens before the first step; steps before the cache is cut back to them
SIZES = {64: (8, 2), 576: (9, 3)}  # hidden size: query heads, key heads
TARGETS = {64: "ratio 1.5", 576: "25 us more"}
BY_HAND = "by hand"


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
    target = TARGETS[size] if kind == "decode" else None
    print(f"  KVCache: {more:.0f} us more than by hand; target {target or 'none'}")
    case = {"kind": kind, "size": size, "dtype": name}
    return {**case, "target": target, "us_more": more, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--length", type=int, default=16, help="tokens of the short prompt")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    print(f"{THREADS} threads")
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        for size in options.sizes:
            results.append(decoding(size, dtype, options.rounds))
            results.append(prefilling(size, dtype, options.length, options.rounds))
    finish("small_calls", results)


if __name__ == "__main__":
    main()
