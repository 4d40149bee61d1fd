"""The tensors of a case: queries, keys in no cache of the processor, and the mask in each form."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from common import Cold, Store
from torch import Tensor

from cases import LATENT, Case
from regard import Causal, Dense, Documents, Mask, Padding, Prefix, SlidingWindow, Span

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

    shape = (case.batch, 1 if case.latent else case.kv_heads, case.keys, width)
    k, v = store(*shape).clone(), store(*shape).clone()

    def keys() -> tuple[Tensor, Tensor]:
        """The same numbers in every buffer, so that contestants quantise them once."""
        mine = k.clone()
        return mine, mine[..., : LATENT[0]] if case.latent else v.clone()

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
    """Implementations of a case by name; its operations; the buffers they alternate on.

    `failed` says of each peer that could not be made why.
    """

    runs: dict[str, Run]
    flops: int
    cold: Cold
    failed: list[str] = field(default_factory=list)


def first_line(name: str, error: Exception) -> str:
    """How a peer failed."""
    return f"{name} failed: {next(iter(str(error).strip().splitlines()), repr(error))[:200]}"
