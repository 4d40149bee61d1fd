"""Bounds of the products of a query with the keys of a page: which pages may matter for it."""

import math
from typing import NamedTuple

import torch
from jaxtyping import BFloat16, Float
from torch import Tensor

from regard.cache.quantizing import has_numba
from regard.tracing import is_immediate, without_autocast

GREATEST = 1e30  # of a spread: sums of products with squares of queries stay finite


class Bounds(NamedTuple):
    """The mean of each channel of the keys of a full page, `[B, G, pages, D]`, and `2 ln n` times
    the variance, n the tokens of a page: the greatest of n normal numbers is on average at most
    `sqrt(2 ln n)` deviations above their mean. Both are rounded to bfloat16, since they choose
    pages and enter no output. These tensors are replaced, never written."""

    mean: BFloat16[Tensor, "B G n D"]
    spread: BFloat16[Tensor, "B G n D"]

    @classmethod
    def of(cls, keys: Float[Tensor, "B G S D"], page_size: int) -> "Bounds":
        """The bounds of whole pages of keys."""
        pages = keys.detach().float().unflatten(2, (-1, page_size))
        variance, mean = torch.var_mean(pages, 3, correction=0)
        spread = (2 * math.log(page_size) * variance).clamp(max=GREATEST)
        return cls(mean.bfloat16(), spread.bfloat16())

    def followed_by(self, other: "Bounds") -> "Bounds":
        """With further pages after these."""
        return type(self)(*(torch.cat(pair, 2) for pair in zip(self, other, strict=True)))

    def between(self, first: int, stop: int) -> "Bounds":
        """Of the pages from `first` to before `stop`."""
        return type(self)(*(each[:, :, first:stop] for each in self))

    def highest(self, q: Float[Tensor, "B H 1 D"]) -> Float[Tensor, "B G n"]:
        """For each page the logarithm of its share of the exponentials of the bounds, by the head
        of the group for which that is greatest; queries are scaled, and rounded to bfloat16."""
        q = q.bfloat16()
        if q.is_cpu and is_immediate(q, *self) and has_numba():
            from regard.sparse.bounds_kernel import highest  # imports numba

            found = highest(q, *self)
            if found is not None:
                return found
        grouped = q.float().reshape(*self.mean.shape[:2], -1, q.shape[3])
        with without_autocast(q.device):
            above = (self.spread.float() @ grouped.square().mT).sqrt_()  # few columns: quicker
            return (above + self.mean.float() @ grouped.mT).mT.log_softmax(-1).amax(2)
