"""Layers of the forms of newer models beside transformers' own classes, and the caches of each."""

from collections.abc import Callable
from contextlib import contextmanager

import torch

from regard import KVCache, PagedCache, PagePool, QuantizedCache, StaticCache

CACHES: dict[str, Callable] = {
    "KVCache": KVCache,
    "StaticCache": lambda: StaticCache(32),
    "PagedCache": lambda: PagedCache(PagePool(num_pages=24, page_size=4)),
    "QuantizedCache": lambda: QuantizedCache(8, 8),
}


def bound_of(name: str) -> float:
    """How far a result may be from that without a cache: eight bits, or rounding in float64."""
    return 0.05 if name == "QuantizedCache" else 1e-12


@contextmanager
def float64():
    """A block whose default dtype is float64: transformers computes positions and lambdas in it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def additive(tokens: int, hidden: list[int] = ()) -> torch.Tensor:
    """A causal mask as transformers adds it, `[B, 1, L, L]`; row `i` begins with `hidden[i]` tokens
    of padding."""
    rows = []
    for padding in hidden or [0]:
        row = torch.full((tokens, tokens), float("-inf")).triu(1)
        row[padding:, :padding] = float("-inf")
        rows.append(row)
    return torch.stack(rows)[:, None]


def stepwise(layer, x: torch.Tensor, cache, sizes=(4, 1, 1, 3), **options) -> torch.Tensor:
    """The outputs of a layer that reads a sequence in pieces."""
    with torch.no_grad():
        return torch.cat([layer(each, cache=cache, **options) for each in x.split(sizes, 1)], 1)


def gradients(layer, out: torch.Tensor) -> dict[str, torch.Tensor]:
    """The gradients of a loss, by the parameters' names."""
    layer.zero_grad()
    (out * torch.linspace(-1, 1, out.numel()).view_as(out).to(out)).sum().backward()
    named = layer.named_parameters()
    return {name: each.grad.clone() for name, each in named if each.grad is not None}
