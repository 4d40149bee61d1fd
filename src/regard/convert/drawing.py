"""Tokens drawn from a model's predictions."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def drawn(weights: Float[Tensor, "N V"], chance: torch.Generator) -> Int[Tensor, "N 1"]:
    """For each row a token, with a probability in proportion to its weight; never one of weight 0.

    `torch.multinomial` draws a number for every token, which takes as long as the product with the
    embeddings; this draws one for each row.

    Examples:
        >>> weights = torch.tensor([[0.0, 3.0, 0.0], [0.0, 0.0, 0.5]])
        >>> drawn(weights, torch.Generator().manual_seed(0)).tolist()
        [[1], [2]]
    """
    sums = weights.cumsum(-1)
    shares = torch.rand(len(weights), 1, generator=chance, dtype=torch.float32, device="cpu")
    below = sums[:, -1:].nextafter(torch.zeros_like(sums[:, -1:]))  # a share may round to 1
    return torch.searchsorted(sums, (shares.to(sums) * sums[:, -1:]).minimum(below), right=True)
