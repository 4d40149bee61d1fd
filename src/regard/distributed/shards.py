"""The assignment of a sequence's tokens to ranks."""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Int
from torch import Tensor

from regard.constants import Device
from regard.plan.sent import pieces

Layout = Literal["zigzag", "contiguous"]
Pieces = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Shards:
    """The tokens of each rank: one piece of the sequence, or two in a zig-zag.

    In a zig-zag the sequence is cut into twice as many pieces as ranks, and rank r holds the pieces
    r and `2 * ranks - 1 - r`. Under a causal mask every rank then has as many visible keys (striped
    and zig-zag layouts: Brandon et al. 2023, arXiv:2311.09431; Llama 3, arXiv:2407.21783). Lengths
    need not divide: pieces differ by one token at most.

    Args:
        length: tokens of the sequence.
        ranks: their number.
        layout: `"zigzag"` or `"contiguous"`.

    Raises:
        ValueError: if `length` is negative, `ranks` below 1 or `layout` another word.

    Examples:
        >>> from regard.distributed import Shards
        >>> shards = Shards(10, 2)
        >>> shards.pieces(0), shards.pieces(1), shards.lengths
        (((0, 2), (7, 10)), ((2, 5), (5, 7)), (5, 5))
        >>> shards.positions(1).tolist()
        [2, 3, 4, 5, 6]
    """

    length: int
    ranks: int
    layout: Layout = "zigzag"

    def __post_init__(self) -> None:
        if self.length < 0:
            raise ValueError(f"length is 0 or more tokens, got {self.length}")
        if self.ranks < 1:
            raise ValueError(f"ranks is 1 or more, got {self.ranks}")
        if self.layout not in ("zigzag", "contiguous"):
            raise ValueError(f"layout is 'zigzag' or 'contiguous', got {self.layout!r}")

    def pieces(self, rank: int) -> Pieces:
        """The slots of a rank's tokens, as ranges in their order; empty ones are left out."""
        held = pieces(self.layout == "zigzag", self.length, self.ranks, rank)
        return tuple((each.start, each.stop) for each in held if each)

    @property
    def lengths(self) -> tuple[int, ...]:
        """The number of tokens of each rank."""
        return tuple(
            sum(stop - start for start, stop in self.pieces(rank)) for rank in range(self.ranks)
        )

    def positions(self, rank: int, device: Device = None) -> Int[Tensor, " L"]:
        """The slots of a rank's tokens."""
        ranges = [torch.arange(*piece, device=device) for piece in self.pieces(rank)]
        return torch.cat([torch.arange(0, device=device), *ranges])

    def take(self, x: Tensor, rank: int, dim: int = 1) -> Tensor:
        """A rank's tokens of a whole sequence, along `dim`.

        Raises:
            ValueError: if `x` has another length there.
        """
        if x.shape[dim] != self.length:
            raise ValueError(
                f"x has {x.shape[dim]} tokens along dim {dim} (shape {tuple(x.shape)}), the "
                f"shards are of {self.length}; give the whole sequence, and its dim"
            )
        pieces = [x.narrow(dim, start, stop - start) for start, stop in self.pieces(rank)]
        return torch.cat([x.narrow(dim, 0, 0), *pieces], dim)

    def joined(self, shards: list[Tensor], dim: int = 1) -> Tensor:
        """The whole sequence of the tokens of every rank, in order of ranks.

        Examples:
            >>> import torch
            >>> from regard.distributed import Shards
            >>> shards, x = Shards(5, 2), torch.arange(5)
            >>> shards.joined([shards.take(x, rank, 0) for rank in (0, 1)], 0).tolist()
            [0, 1, 2, 3, 4]
        """
        slots = [self.positions(rank, shards[0].device) for rank in range(self.ranks)]
        return torch.cat(shards, dim).index_select(dim, torch.cat(slots).argsort())


def shards_of(lengths: list[int], layout: Layout) -> Shards:
    """The shards of the sequence of which the ranks have so many tokens each. Raises a ValueError
    if the numbers do not follow from the layout."""
    shards = Shards(sum(lengths), len(lengths), layout)
    if lengths != list(shards.lengths):
        raise ValueError(
            f"each rank gives its tokens of the whole sequence, here {list(shards.lengths)} of "
            f"{shards.length} in layout={layout!r}, got {lengths}; plan.shard(x) has them"
        )
    return shards
