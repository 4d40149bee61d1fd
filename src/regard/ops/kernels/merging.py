"""Attention over keys in several places: the kernel runs on each, and their results are merged."""

from collections.abc import Sequence
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from regard.cache.codes import QuantizedStream
from regard.cache.rotation import hadamard
from regard.ops.kernels.launching import decode, empty_results
from regard.ops.kernels.tiles import KeyPages

LOWEST = -3e38  # instead of the log-sum-exp of no key, which is -inf: shares stay numbers


class Source(NamedTuple):
    """Keys and values that the kernel reads, all of them or those in some pages."""

    k: Tensor | QuantizedStream
    v: Tensor | QuantizedStream | None  # None: the first columns of the keys
    pages: KeyPages | None = None


def decode_all(
    q: Float[Tensor, "B G M D"], sources: Sequence[Source], *, scale: float, width: int
) -> Float[Tensor, "B G M Dv"]:
    """Attention over the keys of all sources, in float32; `width` is that of a value. Queries of
    codes that stand for rotated channels are rotated alike, and their outputs back."""
    if len(sources) == 1:
        return _decode(q, sources[0], scale, width)
    outs, lses = empty_results((len(sources), *q.shape[:3], width))
    for source, *results in zip(sources, outs.unbind(), lses.unbind(), strict=True):
        _decode(q, source, scale, width, results)
    shares = lses.clamp_min_(LOWEST).softmax(0)  # of a source of infinite keys, all may be -inf
    return (outs * shares.unsqueeze(-1)).sum(0)


def _decode(
    q: Tensor, source: Source, scale: float, width: int, results: Sequence[Tensor] | None = None
) -> Tensor:
    """The output over one source; it and the log-sum-exps are written to the `results`."""
    k, v, pages = source
    of_keys, of_values = _rotation(k), _rotation(k if v is None else v)
    rows = hadamard(q.float(), of_keys) if of_keys else q
    out, _ = decode(rows, k, v, scale=scale, width=width, pages=pages, results=results)
    return out.copy_(hadamard(out, of_values)) if of_values else out


def _rotation(x: Tensor | QuantizedStream) -> tuple[int, ...]:
    return () if isinstance(x, Tensor) else x.rotation
