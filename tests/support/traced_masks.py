"""Masks in compiled and exported graphs, at other sizes than the traced; run by test_algebra."""

import torch
from torch import Tensor

from regard import (
    EVERYTHING,
    Causal,
    Chunked,
    Dense,
    Documents,
    Mask,
    Padding,
    Prefix,
    SlidingWindow,
    Span,
    Where,
)
from session import LONG

VALID = torch.tensor([[0, 1, 1, 1, 0, 1, 1], [1, 1, 1, 0, 0, 1, 0]])
STARTS = torch.tensor([0, 2])
MASKS = [
    EVERYTHING,
    Causal(),
    ~Causal(),
    Causal() & SlidingWindow(3),
    Causal() & Chunked(2, start=STARTS) | Prefix([1, 4], start=STARTS),
    Documents(VALID.cumsum(1)) & Causal() & Padding(VALID),
    Causal() & Where(lambda b, h, q, kv: (q + kv + h) % 2 == 0),
]


def build(length: int, valid: Tensor, keep: Tensor) -> Mask:
    """A mask with every kind of data, made of what it is given."""
    padding = Padding(valid)
    mask = Causal() & padding & Documents(valid.long()) & Dense(keep) & SlidingWindow(length)
    return mask & Chunked(3, start=padding.start) | Prefix(padding.start)


class Lower(torch.nn.Module):
    def forward(self, x: Tensor, valid: Tensor, keep: Tensor) -> Tensor:
        span = Span(0, x.shape[1], 0, x.shape[1])
        return build(x.shape[1], valid, keep).within(span).dense(span, batch=2)


def ragged(x: Tensor, starts: Tensor) -> Tensor:
    span = Span.ragged(starts, queries=x.shape[1], kv_start=0, kv_stop=9, bounds=(0, 4))
    mask = (Causal() & SlidingWindow(3)).within(span)
    return mask.dense(span, batch=2)


def check_compiled(mask: Mask) -> None:
    def lower(x: Tensor, past: Tensor) -> Tensor:
        queries, keys = x.shape[1], past.shape[1] + x.shape[1]
        span = Span(keys - queries, keys, 0, keys)
        low, high = mask.reach(span)
        seen = mask.within(span).dense(span, batch=2, heads=3).expand(2, 3, queries, keys)
        return seen.float() + (low or 0) - (high or 0)

    torch.compiler.reset()
    compiled = torch.compile(lower, fullgraph=True, dynamic=True, backend="eager")
    for queries, past in ((3, 4), (1, 6), (5, 2), (6, 3)):
        given = torch.zeros(2, queries), torch.zeros(2, past)
        assert torch.equal(compiled(*given), lower(*given)), mask


def check_exported(strict: bool) -> None:
    size = torch.export.Dim("size", min=3, max=64)
    shapes = ({1: size}, None, {0: size, 1: size})
    given = [(torch.zeros(2, n), VALID, torch.rand(n, n) < 0.8) for n in (6, 9)]
    program = torch.export.export(Lower(), given[0], dynamic_shapes=shapes, strict=strict).module()
    for arguments in given:
        assert torch.equal(program(*arguments), Lower()(*arguments))


def main() -> None:
    torch.set_num_threads(1)
    for mask in MASKS if LONG else MASKS[4:]:
        check_compiled(mask)
    for strict in (False, True) if LONG else (False,):
        check_exported(strict)
    for run in (Lower(), ragged):
        compiled = torch.compile(run, fullgraph=True, backend="eager")
        given = (torch.zeros(2, 5), VALID, torch.rand(5, 5) < 0.8)
        if run is ragged:
            given = (torch.zeros(2, 3), torch.tensor([1, 4]))
        assert torch.equal(compiled(*given), run(*given))


if __name__ == "__main__":
    main()
