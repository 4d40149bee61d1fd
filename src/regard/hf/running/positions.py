"""Where tokens stand, for layers that turn by positions instead of by the model's own angles."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor


def of_queries(
    x: Float[Tensor, "B L E"], given: Int[Tensor, "*B L"] | None, cache: Any, layer: int | None
) -> Int[Tensor, "*B L"]:
    """The positions of new tokens, as the model gives them; else counted on from the cache."""
    if given is not None:
        return given
    past = 0 if cache is None else cache.get_seq_length(layer)
    return (torch.arange(x.shape[1], device=x.device) + past).unsqueeze(0)


def of_keys(queries: Int[Tensor, "*B L"], cache: Any, layer: int | None) -> Int[Tensor, "*B S"]:
    """The positions of the keys that a cache of transformers returns once it is given these tokens.

    Such a cache knows slots, not positions. New keys stand where their queries do; older ones are
    as far before the first query as their slots are, which holds where positions count on by one.
    """
    new = queries.shape[-1]
    held, first = cache.get_mask_sizes(new, layer)
    after = torch.arange(held, device=queries.device) + first - cache.get_seq_length(layer)
    own = queries[:, after.clamp(0, new - 1)]
    return torch.where((after >= 0) & (after < new), own, queries[:, :1] + after)
