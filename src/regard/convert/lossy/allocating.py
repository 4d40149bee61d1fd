"""The rank of each layer's latent within a total, by how much the model's predictions depend on it.

A direction that a latent leaves out changes the predictions by an energy that is known
(`energies_of`, with the gradients of the predictions). The total goes to the directions that cost
most, in whichever layer.
"""

from collections.abc import Sequence

from jaxtyping import Float64
from torch import Tensor

SMALLEST = 4  # a rank is at least the mean rank divided by this


def allot(costs: Sequence[Float64[Tensor, " R"]], mean: int) -> list[int]:
    """A rank for each layer, with the sum of `mean` for each, and the least cost of the rest.

    Args:
        costs: for each layer, the cost of leaving out each direction, the largest first.
        mean: the mean of the ranks.

    Raises:
        ValueError: if there are not so many directions.

    Examples:
        >>> import torch
        >>> allot([torch.tensor([4.0, 3, 2]).double(), torch.tensor([1, 0.5, 0.2]).double()], 2)
        [3, 1]
    """
    total, most = mean * len(costs), sum(map(len, costs))
    if total > most:
        raise ValueError(
            f"latents of mean rank {mean} have {total} directions, of which are {most}"
        )
    ranks = [max(1, mean // SMALLEST)] * len(costs)
    dearest = sorted(
        ((float(cost), layer) for layer, each in enumerate(costs) for cost in each[ranks[layer] :]),
        reverse=True,
    )
    for _, layer in dearest[: total - sum(ranks)]:
        ranks[layer] += 1
    return ranks
