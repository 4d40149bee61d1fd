"""The mean and the covariance of a layer's queries over some text, as a value."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from regard.rope import NO_ROPE, Rope


@dataclass(frozen=True, eq=False)
class QueryMoments:
    """The mean and the covariance of the queries of each head, before rotation.

    `regard.convert.query_moments` gathers them over calibration text.

    Args:
        mean: `[H, D]`.
        covariance: `[H, D, D]`, centred.
        rope: rotates the layer's queries.

    Raises:
        ValueError: if the shapes do not fit each other.

    Examples:
        >>> import torch
        >>> from regard.sparse import QueryMoments
        >>> moments = QueryMoments(torch.ones(2, 4), torch.zeros(2, 4, 4))
        >>> moments.ahead(10, 5)[0].shape  # without a rope, wherever the queries are
        torch.Size([2, 4])
    """

    mean: Float[Tensor, "H D"]
    covariance: Float[Tensor, "H D D"]
    rope: Rope = NO_ROPE

    def __post_init__(self) -> None:
        heads, width = self.mean.shape if self.mean.dim() == 2 else (0, 0)
        if not heads or self.covariance.shape != (heads, width, width):
            raise ValueError(
                f"mean is [H, D] and covariance [H, D, D], got {list(self.mean.shape)} and "
                f"{list(self.covariance.shape)}"
            )

    def ahead(self, length: int, horizon: int) -> tuple[Tensor, Tensor]:
        """Both for rotated queries, with the rotation averaged over `horizon` positions; float32.

        Args:
            length: the first of these positions.
            horizon: their number.
        """
        positions = torch.arange(length, length + horizon, device=self.mean.device)
        mean, covariance = self.mean.float(), self.covariance.float()
        units = torch.eye(mean.shape[-1], dtype=mean.dtype, device=mean.device)
        units = units[None, :, None].expand(-1, -1, horizon, -1)
        mean_rotation = self.rope.rotate(units, positions).mean(2)[0]  # row i: of unit vector i
        return mean @ mean_rotation, mean_rotation.mT @ covariance @ mean_rotation

    def __repr__(self) -> str:
        return f"QueryMoments(<{list(self.mean.shape)}>, rope={self.rope!r})"
