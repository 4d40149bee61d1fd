"""The tokens that each rank needs of each other rank: keys that its queries may attend to.

Every rank computes the same table from the mask and the shards alone, so that sender and receiver
of a message agree on it without a message.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from regard.distributed.shards import Shards
from regard.masks import Mask, Span
from regard.masks.row_data import row_masks
from regard.masks.runs import Finder, Runs, intersection, union

QUERIES = 128  # in a block whose visible keys are found together
_MOST = 64  # tables that are memoised: the masks of a model's layers, for some sequences


class Bytes(NamedTuple):
    """Bytes that a rank sends in the forward pass and in the backward pass."""

    forward: int
    backward: int


@dataclass(frozen=True)
class Needs:
    """The slots that each rank needs of each other rank's tokens.

    Examples:
        >>> from regard.distributed import Shards
        >>> from regard.masks import Causal, SlidingWindow
        >>> needs = needs_of(Causal() & SlidingWindow(3), Shards(8, 2, "contiguous"))
        >>> needs.of(1, 0), needs.of(0, 1), needs.sent_tokens(0)  # a window's two earlier tokens
        ([(2, 4)], [], 2)
    """

    shards: Shards  # the tokens of each rank
    # runs of slots, by receiver and sender; on the diagonal, a rank's own tokens that its queries
    # may attend to
    table: tuple[tuple[tuple[tuple[int, int], ...], ...], ...] = field(repr=False)

    def of(self, receiver: int, sender: int) -> Runs:
        """The slots of `sender` that `receiver` needs."""
        return list(self.table[receiver][sender])

    def tokens(self, receiver: int, sender: int) -> int:
        """The number of tokens of `sender` that `receiver` needs."""
        return length_of(self.of(receiver, sender))

    def sent_tokens(self, rank: int) -> int:
        """Tokens that a rank sends to all others, each as often as it is sent."""
        return sum(self.tokens(other, rank) for other in self._others(rank))

    def received_tokens(self, rank: int) -> int:
        """Tokens that a rank receives from all others."""
        return sum(self.tokens(rank, other) for other in self._others(rank))

    def _others(self, rank: int) -> list[int]:
        return [other for other in range(self.shards.ranks) if other != rank]


def bytes_sent(
    needs: Needs, rank: int, *, token_bytes: int, gradient_bytes: int = 0, exchange: str = "ring"
) -> Bytes:
    """The bytes that a rank sends in a call.

    The backward pass of a ring sends the tokens again, that of a gather has kept them; both return
    the gradients of the received tokens. `token_bytes` are of one token's streams, over all rows of
    the batch and all heads, `gradient_bytes` of their gradients; 0 if they have none.

    Examples:
        >>> from regard.distributed import Shards
        >>> from regard.masks import Causal
        >>> needs = needs_of(Causal(), Shards(8, 2))
        >>> bytes_sent(needs, 0, token_bytes=16, gradient_bytes=32)  # two tokens, then four back
        Bytes(forward=32, backward=160)
    """
    forward = needs.sent_tokens(rank) * token_bytes
    again = forward if exchange == "ring" else 0
    return Bytes(forward, again + needs.received_tokens(rank) * gradient_bytes)


_TABLES: OrderedDict[tuple[Mask, Shards], Needs] = OrderedDict()


def needs_of(mask: Mask, shards: Shards) -> Needs:
    """The table of a mask about the whole sequence; memoised. Reads the mask's data, once.

    A rule's keys are found for blocks of `QUERIES` queries and for each row of the batch, and
    joined. Rules without a known structure (`Where`) need every token.
    """
    mask = mask.within(Span(0, shards.length, 0, shards.length))
    known = _TABLES.get((mask, shards))
    if known is None:
        known = _TABLES[mask, shards] = _needs(mask, shards)
        if len(_TABLES) > _MOST:
            _TABLES.popitem(last=False)
    return known


def _needs(mask: Mask, shards: Shards) -> Needs:
    seen: list[Runs] = [[] for _ in range(shards.ranks)]
    for row in row_masks(mask, mask.batch or 1):
        find = row.finder()
        for rank in range(shards.ranks):
            blocks = (block for piece in shards.pieces(rank) for block in _blocks(find, *piece))
            seen[rank] = union(seen[rank], *(find(*block).some for block in blocks))
    slots = [slots_of(shards, rank) for rank in range(shards.ranks)]
    table = tuple(tuple(tuple(intersection(mine, its)) for its in slots) for mine in seen)
    return Needs(shards, table)


def slots_of(shards: Shards, rank: int) -> Runs:
    """The slots of a rank's tokens; pieces that follow one another are one run."""
    return union(list(shards.pieces(rank)))


def _blocks(find: Finder, start: int, stop: int) -> list[tuple[int, int]]:
    """The first and the last query of blocks that begin where a rule shows other keys."""
    cuts = [start, *find(start, stop - 1).edges_between(start, stop), stop]
    return [
        (first, min(first + QUERIES, end) - 1)
        for begin, end in pairwise(cuts)
        for first in range(begin, end, QUERIES)
    ]


def length_of(runs: Runs) -> int:
    """The number of slots in runs."""
    return sum(stop - start for start, stop in runs)
