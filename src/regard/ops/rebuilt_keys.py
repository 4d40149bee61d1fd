"""Keys that are a product with latents, rotated: computed when they are read.

A kernel may compute a block of them where it needs them, so that they are never stored.
"""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from jaxtyping import Float, Int
from torch import Tensor

from regard.heads import split_heads
from regard.matrices import multiply

Tables = tuple[Tensor, Tensor]  # cosines and signed sines of positions, `[P, rotated]`


class Rotates(Protocol):
    """A rope, as rebuilt keys need it."""

    def rotate(self, x: Float[Tensor, "B H L D"], positions: Tensor) -> Float[Tensor, "B H L D"]:
        """Rotate keys at positions `[B, L]`."""


class RebuiltKeys(NamedTuple):
    """Keys of every head, `[B, G, S, D]`, as the latents that they are computed from.

    Attributes:
        latents: of all heads, `[B, 1, S, R]`.
        positions: of the tokens, `[B, 1, S, 1]`.
        weights: of all heads, `[G D, R]`.
        heads: the number of key heads, G.
        rope: rotates the keys after the product.
        tables: by which a kernel rotates channels half the rotated width apart; None where it
            cannot.
    """

    latents: Float[Tensor, "B 1 S R"]
    positions: Int[Tensor, "B 1 S 1"]
    weights: Float[Tensor, "GD R"]
    heads: int
    rope: Rotates
    tables: Tables | None = None

    @property
    def head_dim(self) -> int:
        """Channels of a key."""
        return self.weights.shape[0] // self.heads

    @property
    def by_head(self) -> Float[Tensor, "G D R"]:
        """The weights of each head, as a kernel reads them."""
        return self.weights.detach().unflatten(0, (self.heads, -1)).contiguous()

    @property
    def outline(self) -> Tensor:
        """A tensor of the shape and dtype of the keys, all zero."""
        batch, _, tokens, _ = self.latents.shape
        return self.latents.new_zeros(()).expand(batch, self.heads, tokens, self.head_dim)

    @property
    def kinds(self) -> tuple[type, ...]:
        """The class of this stream."""
        return (RebuiltKeys,)

    @property
    def bits(self) -> None:
        """None: latents are no codes."""

    @property
    def rotation(self) -> tuple[int, ...]:
        """Nothing is rotated for the sake of codes."""
        return ()

    @property
    def is_shared(self) -> bool:
        """Whether all rows of a batch of several read the same latents."""
        return self.latents.shape[0] > 1 and self.latents.stride(0) == 0

    @property
    def is_scattered(self) -> bool:
        """Latents lie side by side."""
        return False

    def to_tensor(self) -> Float[Tensor, "B G S D"]:
        """The keys."""
        keys = multiply(self.latents.squeeze(1), self.weights.mT)
        return self.rope.rotate(split_heads(keys, self.head_dim), self.positions[:, 0, :, 0])

    def narrow(self, start: int, size: int) -> "RebuiltKeys":
        """The tokens `start..start + size`."""
        return self._cut(2, start, size)

    def rows(self, start: int, size: int) -> "RebuiltKeys":
        """The rows `start..start + size` of the batch."""
        return self._cut(0, start, size)

    def _cut(self, dim: int, start: int, size: int) -> "RebuiltKeys":
        latents, positions = (x.narrow(dim, start, size) for x in (self.latents, self.positions))
        return self._replace(latents=latents, positions=positions)

    def in_one(self) -> "RebuiltKeys":
        """These keys: their latents lie side by side."""
        return self

    def cuts(self, most: int) -> Iterator[tuple[int, int]]:
        """The range of all tokens, which is not copied."""
        yield 0, self.latents.shape[2]
