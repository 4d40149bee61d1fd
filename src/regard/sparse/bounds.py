"""Bounds of the keys of pages: which pages may matter for a query, without reading their keys."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor


class Bounds(NamedTuple):
    """The least and the greatest number of each channel of the keys, `[B, G, pages, D]`, of full
    pages. These tensors are replaced, never written."""

    low: Float[Tensor, "B G n D"]
    high: Float[Tensor, "B G n D"]

    @classmethod
    def of(cls, keys: Float[Tensor, "B G S D"], page_size: int) -> "Bounds":
        """The bounds of whole pages of keys."""
        pages = keys.detach().unflatten(2, (-1, page_size))
        return cls(pages.amin(3), pages.amax(3))

    def followed_by(self, other: "Bounds") -> "Bounds":
        """With further pages after these."""
        return Bounds(*(torch.cat(pair, 2) for pair in zip(self, other, strict=True)))

    def between(self, first: int, stop: int) -> "Bounds":
        """Of the pages from `first` to before `stop`."""
        return Bounds(*(each[:, :, first:stop] for each in self))

    def highest(self, q: Float[Tensor, "B H 1 D"]) -> Float[Tensor, "B G n"]:
        """For each page the logarithm of its share of the exponentials of the bounds, by the head
        of the group for which that is greatest."""
        grouped = q.unflatten(1, (self.low.shape[1], -1)).squeeze(3)
        above, below = grouped.clamp(min=0), grouped.clamp(max=0)
        most = above @ self.high.mT + below @ self.low.mT
        return most.float().log_softmax(-1).amax(2)
