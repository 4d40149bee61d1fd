"""Attention over some of the keys, and the merge of several such results.

Used wherever keys are split: split-KV decoding, caches in parts, chunks, shards over ranks.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from regard.constants import accumulating_dtype


class Partial(NamedTuple):
    """Attention over some of the keys: its output, and the log-sum-exp of its scores.

    Axes of size one broadcast in `merge`.

    Attributes:
        out: `[B, H, L, Dv]` in float32 (float64 for float64); 0 in a fully masked row.
        lse: `[B, H, L]`, the log-sum-exp; -inf in a fully masked row.

    Examples:
        >>> import torch
        >>> from regard import Partial, merge
        >>> attended = Partial(torch.ones(1, 1, 2, 3), torch.zeros(1, 1, 2))
        >>> merge(attended, Partial.nothing()).out.mean().item()
        1.0
    """

    out: Float[Tensor, "*B L Dv"]
    lse: Float[Tensor, "*B L"]

    @classmethod
    def nothing(cls, device: torch.device | None = None) -> "Partial":
        """The neutral element: attention over no key."""
        return cls(
            torch.zeros(1, 1, 1, 1, device=device, dtype=torch.float32),
            torch.full((1, 1, 1), -torch.inf, device=device, dtype=torch.float32),
        )

    @classmethod
    def of_sinks(cls, sinks: Float[Tensor, " H"]) -> "Partial":
        """One key for each head, of score `sinks` and value 0 (gpt-oss, arXiv:2508.10925).

        Examples:
            >>> half = merge(Partial(torch.ones(1, 1, 1, 1), torch.zeros(1, 1, 1)),
            ...              Partial.of_sinks(torch.zeros(1)))
            >>> half.out.item()
            0.5
        """
        lse = sinks.to(accumulating_dtype(sinks.dtype))[None, :, None]
        return cls(torch.zeros_like(lse).unsqueeze(-1), lse)


def merge(*partials: Partial) -> Partial:
    """Join attention over disjoint sets of keys. Associative, commutative, differentiable.

    The merge of online softmax, as in FlashAttention (Dao et al. 2022, arXiv:2205.14135) and
    Flash-Decoding.

    Raises:
        ValueError: if nothing is given.

    Examples:
        >>> import torch
        >>> from regard import Partial, merge
        >>> one, other = (Partial(torch.full((1, 1, 1), x), torch.zeros(1, 1)) for x in (2.0, 4.0))
        >>> merged = merge(one, other)  # the same sum of exponentials: the mean
        >>> merged.out.item(), round(merged.lse.item(), 4)
        (3.0, 0.6931)
    """
    if not partials or not isinstance(partials[0], Partial):
        raise ValueError(f"merge() takes Partials, as Partial.nothing(), got {partials!r:.40}")
    dtype = accumulating_dtype(*(part.lse.dtype for part in partials))
    lse = [part.lse.to(dtype) for part in partials]
    top = lse[0]
    for other in lse[1:]:
        top = torch.maximum(top, other)
    top = top.detach().masked_fill(top == -torch.inf, 0.0)
    shares = [torch.exp(each - top) for each in lse]
    total = sum(shares[1:], start=shares[0])
    empty = total == 0
    total = total.masked_fill(empty, 1.0)
    terms = [
        part.out.to(dtype) * share.unsqueeze(-1)
        for part, share in zip(partials, shares, strict=True)
    ]
    out = sum(terms[1:], start=terms[0]) / total.unsqueeze(-1)
    return Partial(out, (top + total.log()).masked_fill(empty, -torch.inf))
