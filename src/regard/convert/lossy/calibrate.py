"""Calibration: the second moments of what a layer reads, gathered while a model runs over text."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn


@dataclass
class Moments:
    """The mean of `x x^T` over tokens: which directions of the input matter, and how much."""

    total: Float[Tensor, "E E"] | None = None
    sum: Float[Tensor, " E"] | None = None
    tokens: int = 0

    def add(self, x: Float[Tensor, "... E"]) -> None:
        """Count these tokens in; sums are kept in float64."""
        rows = x.detach().flatten(0, -2)
        product = (rows.mT @ rows).double()
        column = rows.double().sum(0)
        self.total = product if self.total is None else self.total + product
        self.sum = column if self.sum is None else self.sum + column
        self.tokens += rows.shape[0]

    @property
    def covariance(self) -> Float[Tensor, "E E"]:
        """`E[x x^T]`, float64, not centred.

        Raises:
            ValueError: if nothing was seen.
        """
        if self.total is None:
            raise ValueError("no token was seen; run the model over some text inside watch()")
        return self.total / self.tokens

    @property
    def augmented(self) -> Float[Tensor, "E1 E1"]:
        """The same of inputs with a 1 appended, for maps with biases.

        Raises:
            ValueError: if nothing was seen.
        """
        inner = self.covariance
        assert self.sum is not None
        mean = self.sum / self.tokens
        one = torch.ones(1, 1).to(inner)
        return torch.cat(
            [torch.cat([inner, mean[:, None]], dim=1), torch.cat([mean[None], one], dim=1)]
        )


def moments_of(x: Float[Tensor, "N L E"]) -> Moments:
    """Of all tokens, window by window."""
    seen = Moments()
    for window in x:
        seen.add(window)
    return seen


@contextmanager
def watch(modules: Sequence[nn.Module]) -> Iterator[list[Moments]]:
    """Gather the moments of what each module reads (its first argument, or `hidden_states`).

    >>> import torch
    >>> layer = nn.Linear(2, 2)
    >>> with watch([layer]) as moments:
    ...     _ = layer(torch.tensor([[1.0, 0.0], [1.0, 2.0]]))
    >>> moments[0].covariance
    tensor([[1., 1.],
            [1., 2.]], dtype=torch.float64)
    """
    moments = [Moments() for _ in modules]

    def note(seen: Moments) -> Any:
        def hook(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            seen.add(given[0] if given else named["hidden_states"])

        return hook

    hooks = [
        module.register_forward_pre_hook(note(seen), with_kwargs=True)
        for module, seen in zip(modules, moments, strict=True)
    ]
    try:
        yield moments
    finally:
        for handle in hooks:
            handle.remove()
