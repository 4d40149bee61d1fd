"""The implementations of attention itself: torch's kernel called in each way, FlexAttention.

Every peer gets what it wants beforehand: a mask as a tensor, lengths as numbers, a compiled kernel.
regard gets the rule, and makes of it what it needs within the time that is measured.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from common import Cold, Store
from torch import Tensor

from cases import LATENT, Case
from regard import (
    Causal,
    Dense,
    Documents,
    KVCache,
    Mask,
    Padding,
    Part,
    Prefix,
    QuantizedCache,
    SlidingWindow,
    Span,
    attend,
    prepare,
)

Run = Callable[[], Tensor]


def rule_of(case: Case) -> Mask:
    """The mask of a case as a rule."""
    n = case.keys
    if case.mask == "window":
        return Causal() & SlidingWindow(case.window)
    if case.mask == "documents":
        sizes = torch.tensor(document_lengths(case))
        return Causal() & Documents(torch.arange(len(sizes)).repeat_interleave(sizes))
    if case.mask == "prefix":
        return Causal() | Prefix(case.window)
    if case.mask == "padding":
        return Causal() & Padding.from_lengths(torch.tensor(case.lengths()), n)
    if case.mask == "blocks":
        return Dense(random_blocks(n))
    return Causal()


def document_lengths(case: Case) -> list[int]:
    """Five documents of unequal lengths."""
    shares = [case.keys * share // 16 for share in (5, 1, 4, 2)]
    return [*shares, case.keys - sum(shares)]


def random_blocks(n: int, kept: float = 0.25) -> Tensor:
    """A quarter of the blocks of 128 by 128, and the diagonal."""
    side = min(128, max(1, n // 8))
    blocks = -(-n // side)
    generator = torch.Generator().manual_seed(0)
    keep = torch.rand(blocks, blocks, generator=generator) < kept
    keep.fill_diagonal_(True)
    return keep.repeat_interleave(side, 0).repeat_interleave(side, 1)[:n, :n].contiguous()


@dataclass
class Problem:
    """A case with its tensors: `cold()` returns keys and values in no cache of the processor."""

    case: Case
    q: Tensor
    cold: Cold
    mask: Mask
    keep: Tensor | None  # the mask as peers take it; None where a flag says it, or nothing is

    @property
    def flags(self) -> dict[str, Any]:
        """The arguments of torch for the mask."""
        if self.keep is not None:
            return {"attn_mask": self.keep}
        return {"is_causal": True} if self.case.length > 1 else {}


def problem(case: Case, cold: int) -> Problem:
    """Tensors for a case, keys spread over `cold` bytes."""
    store = Store(case.torch_dtype, min(cold, 1 << 26))
    width = sum(LATENT) if case.latent else case.head_dim
    q = store(case.batch, case.heads, case.length, width).clone()

    def keys() -> tuple[Tensor, Tensor]:
        if case.latent:
            joined = store(case.batch, 1, case.keys, width).clone()
            return joined, joined[..., : LATENT[0]]
        shape = (case.batch, case.kv_heads, case.keys, width)
        return store(*shape).clone(), store(*shape).clone()

    mask, keep = rule_of(case), None
    if case.kind == "ragged":
        lengths = torch.tensor(case.lengths()).view(-1, 1, 1, 1)
        keep = torch.arange(case.keys) < lengths
    elif case.kind == "mask" and case.mask != "causal":
        keep = mask.dense(Span(0, case.keys, 0, case.keys), batch=case.batch)
        while keep.dim() < 4:
            keep = keep.unsqueeze(0)
    return Problem(case, q, Cold(keys, case.nbytes(), cold), mask, keep)


def cells(given: Problem) -> int:
    """Scores that are not hidden, over all heads and rows."""
    case = given.case
    if case.kind == "ragged":
        return case.heads * sum(case.lengths())
    if given.keep is not None:
        rows = case.batch // given.keep.shape[0]
        return int(given.keep.sum()) * case.heads * rows
    hidden = case.length * (case.length - 1) // 2
    return case.batch * case.heads * (case.length * case.keys - hidden)


@dataclass
class Contest:
    """Implementations of a case by name; its operations; the buffers they alternate on."""

    runs: dict[str, Run]
    flops: int
    cold: Cold


def contest(case: Case, *, cold: int, flex: bool) -> Contest:
    """Everything that can run a case, regard first."""
    given = problem(case, cold)
    runs: dict[str, Run] = {}
    for name, make in PEERS.items():
        if name == "FlexAttention" and not flex:
            continue
        run = make(given)
        if run is not None:
            runs[name] = _backward(given, run) if case.kind == "backward" else run
    width = 2 * LATENT[0] + LATENT[1] if case.latent else 2 * case.head_dim
    flops = 2 * cells(given) * width * (3 if case.kind == "backward" else 1)
    return Contest(runs, flops, given.cold)


def _backward(given: Problem, forward: Run) -> Run:
    """Forward and backward; the result is the gradient of the queries."""
    for x in (given.q, *(each for pair in given.cold.buffers for each in pair)):
        x.requires_grad_(True)

    def run() -> Tensor:
        with torch.enable_grad():
            total = forward().sum()
        k, v = given.cold.buffers[given.cold.turn]
        return torch.autograd.grad(total, (given.q, k, v))[0]

    return run


def _regard(given: Problem) -> Run:
    case, q = given.case, given.q
    span = Span(case.keys - case.length, case.keys, 0, case.keys)
    if case.kind == "ragged":
        return _cached(given, KVCache)
    if case.kind == "int8 cache":
        return _cached(given, QuantizedCache)
    if case.latent:
        scale = case.head_dim**-0.5

        def absorbed() -> Tensor:
            joined, v = given.cold()
            call = prepare(q, joined, v, mask=given.mask, span=span, scale=scale)
            return call.run(q, (Part(0, case.keys, (joined,)),))

        return absorbed
    return lambda: attend(q, *given.cold(), mask=given.mask, span=span)


def _regard_float(given: Problem) -> Run | None:
    return _cached(given, KVCache) if given.case.kind == "int8 cache" else None


def _cached(given: Problem, make: Callable[[], Any]) -> Run:
    """A step on the caller's caches: append one token's keys, attend, truncate."""
    case, q = given.case, given.q
    before = torch.tensor([length - 1 for length in case.lengths()])
    start: Any = int(before) if case.batch == 1 else before

    def filled(k: Tensor, v: Tensor) -> tuple[Any, Tensor, Tensor]:
        cache = make()
        cache.update(k, v)
        cache.truncate(start)
        last = before.view(-1, 1, 1, 1).expand(-1, k.shape[1], 1, k.shape[3])
        return cache, k.gather(2, last), v.gather(2, last)

    caches = [filled(*pair) for pair in given.cold.buffers]

    def run() -> Tensor:
        given.cold()
        cache, k, v = caches[given.cold.turn]
        call = prepare(q, k, v, mask=given.mask, span=cache.span(1))
        out = call.run(q, cache.update(k, v))
        cache.truncate(start)
        return out

    return run


def _scale(given: Problem) -> dict[str, Any]:
    return {"scale": given.case.head_dim**-0.5} if given.case.latent else {}


def _sdpa(given: Problem) -> Run | None:
    """As in its manual: a flag makes query heads share key heads."""
    flags = {**given.flags, **_scale(given)}
    grouped = given.case.heads != given.case.kv_heads
    return lambda: F.scaled_dot_product_attention(
        given.q, *given.cold(), enable_gqa=grouped, **flags
    )


def _repeated(given: Problem) -> Run | None:
    """As most models do it: every key head copied for each query head that reads it."""
    case = given.case
    group = case.heads // case.kv_heads
    if group == 1 or case.latent:
        return None

    def run() -> Tensor:
        k, v = (x.repeat_interleave(group, 1) for x in given.cold())
        return F.scaled_dot_product_attention(given.q, k, v, **given.flags)

    return run


def _packed(given: Problem) -> Run | None:
    """By hand: the queries that share a key head become its rows. Latents are their own values."""
    case = given.case
    if case.length != 1 or case.heads == case.kv_heads:
        return None
    group = case.heads // case.kv_heads
    flags = {**given.flags, **_scale(given)}

    def run() -> Tensor:
        k, v = given.cold()
        rows = given.q.view(case.batch, case.kv_heads, group, -1)
        out = F.scaled_dot_product_attention(rows, k, k if case.latent else v, **flags)
        return out[..., : v.shape[-1]].reshape(case.batch, case.heads, 1, -1)

    return run


def _piecewise(given: Problem) -> Run | None:
    """By hand: a call for each row of a ragged batch, or for each document."""
    case = given.case
    if case.kind == "ragged" and case.batch > 1:
        lengths = case.lengths()

        def by_rows() -> Tensor:
            k, v = given.cold()
            pieces = [
                (given.q[b : b + 1], k[b : b + 1, :, :n], v[b : b + 1, :, :n])
                for b, n in enumerate(lengths)
            ]
            each = [F.scaled_dot_product_attention(*piece, enable_gqa=True) for piece in pieces]
            return torch.cat(each)

        return by_rows
    if case.mask != "documents":
        return None
    sizes = document_lengths(case)

    def by_documents() -> Tensor:
        pieces = zip(*(x.split(sizes, 2) for x in (given.q, *given.cold())), strict=True)
        each = [
            F.scaled_dot_product_attention(*piece, is_causal=True, enable_gqa=True)
            for piece in pieces
        ]
        return torch.cat(each, 2)

    return by_documents


def _flex(given: Problem) -> Run | None:
    """Compiled for this shape, with its block mask made before timing."""
    case = given.case
    if case.latent or case.kind in ("backward", "ragged", "int8 cache"):
        return None
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, dynamic=False)
    blocks = None
    if case.length > 1:
        keep = given.keep

        def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return i >= j if keep is None else keep[b % keep.shape[0], 0, i, j]

        rows = None if keep is None or keep.shape[0] == 1 else keep.shape[0]
        blocks = create_block_mask(visible, rows, None, case.length, case.keys, device="cpu")
    grouped = case.heads != case.kv_heads
    return lambda: compiled(given.q, *given.cold(), block_mask=blocks, enable_gqa=grouped)


PEERS: dict[str, Callable[[Problem], Run | None]] = {
    "regard": _regard,
    "regard, float cache": _regard_float,
    "sdpa": _sdpa,
    "sdpa, repeated keys": _repeated,
    "sdpa, packed queries": _packed,
    "sdpa, piece by piece": _piecewise,
    "FlexAttention": _flex,
}
