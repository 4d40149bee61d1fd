"""The assignment of slots to ranks, in pages; every rank computes the same table by itself."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from operator import attrgetter
from typing import NamedTuple

from regard.masks.runs import Runs


class Piece(NamedTuple):
    """Slots `start..stop` that one rank holds, the first at index `at` of its storage."""

    rank: int
    start: int
    stop: int
    at: int


class Segment(NamedTuple):
    """Tokens that lie side by side in a rank's storage, at the indices `start..stop`."""

    start: int  # index of the first
    stop: int  # one past the last
    runs: Runs  # their slots


class Slots:
    """The slots of every rank's tokens. A rank stores its tokens in order of their slots.

    A new page goes to the rank with the fewest tokens, so that the ranks of an empty table take
    turns: page p is then held by rank `p % ranks`. A page takes about 150 bytes.

    Examples:
        >>> from regard.distributed.decode.slots import Slots
        >>> slots = Slots(2, page_size=2)
        >>> slots.add(slots.following(7))
        >>> slots.counts, [(piece.start, piece.stop) for piece in slots.pieces[1]]
        ([4, 3], [(2, 4), (6, 7)])
    """

    def __init__(self, ranks: int, page_size: int) -> None:
        self.page_size = page_size
        self.length = 0
        self.counts = [0] * ranks
        self.pieces: list[list[Piece]] = [[] for _ in range(ranks)]

    def following(self, new: int) -> list[Piece]:
        """The pieces of the next `new` tokens."""
        counts, pieces = list(self.counts), []
        slot, end = self.length, self.length + new
        rank, room = self._open_page()
        while slot < end:
            if room <= 0:
                rank, room = counts.index(min(counts)), self.page_size
            stop = min(end, slot + room)
            pieces.append(Piece(rank, slot, stop, counts[rank]))
            counts[rank] += stop - slot
            slot, room = stop, 0
        return pieces

    def _open_page(self) -> tuple[int, int]:
        """The rank that holds the last token, and how many more fit its page."""
        for rank, pieces in enumerate(self.pieces):
            if pieces and pieces[-1].stop == self.length:
                return rank, self.page_size - (pieces[-1].stop - pieces[-1].start)
        return 0, 0

    def placed(self, pieces_of: Iterable[Iterable[tuple[int, int]]]) -> list[Piece]:
        """Pieces for each rank's ranges of the next slots, counted from the first new one. Raises a
        ValueError if the ranges of all ranks are not each slot once."""
        counts, pieces, first = self.counts, [], self.length
        for rank, ranges in enumerate(pieces_of):
            at = counts[rank]
            for start, stop in sorted(ranges):
                pieces.append(Piece(rank, first + start, first + stop, at))
                at += stop - start
        pieces.sort(key=attrgetter("start"))
        edges = [first, *(piece.stop for piece in pieces)]
        if any(piece.start != edge for piece, edge in zip(pieces, edges, strict=False)):
            spans = [(piece.start - first, piece.stop - first) for piece in pieces]
            raise ValueError(f"the pieces of all ranks hold each slot once, got {spans}")
        return pieces

    def add(self, pieces: Iterable[Piece]) -> None:
        """Append pieces of `following` or `placed`."""
        for piece in pieces:
            mine = self.pieces[piece.rank]
            last = mine[-1] if mine else None
            size = piece.stop - (last.start if last else 0)
            if last is not None and last.stop == piece.start and size <= self.page_size:
                mine[-1] = last._replace(stop=piece.stop)
            else:
                mine.append(piece)
            self.counts[piece.rank] += piece.stop - piece.start
            self.length = piece.stop

    def held_below(self, slot: int, rank: int) -> int:
        """The number of a rank's tokens with slots below `slot`."""
        index = bisect_left(self.pieces[rank], slot, key=attrgetter("start"))
        if not index:
            return 0
        last = self.pieces[rank][index - 1]
        return last.at + min(slot, last.stop) - last.start

    def truncate(self, length: int) -> None:
        """Keep the slots below `length`."""
        for rank, pieces in enumerate(self.pieces):
            self.counts[rank] = self.held_below(length, rank)
            while pieces and pieces[-1].start >= length:
                pieces.pop()
            if pieces and pieces[-1].stop > length:
                pieces[-1] = pieces[-1]._replace(stop=length)
        self.length = length

    def segments(self, rank: int, runs: Runs) -> list[Segment]:
        """A rank's tokens with slots in `runs`, as few segments of its storage as possible.

        Examples:
            >>> slots = Slots(2, page_size=2)
            >>> slots.add(slots.following(8))
            >>> slots.segments(0, [(1, 6)])
            [Segment(start=1, stop=4, runs=[(1, 2), (4, 6)])]
        """
        segments: list[Segment] = []
        pieces = self.pieces[rank]
        for low, high in runs:
            index = bisect_right(pieces, low, key=attrgetter("stop"))
            for piece in pieces[index:]:
                if piece.start >= high:
                    break
                start, stop = max(low, piece.start), min(high, piece.stop)
                first = piece.at + start - piece.start
                self._append(segments, first, (start, stop))
        return segments

    @staticmethod
    def _append(segments: list[Segment], first: int, run: tuple[int, int]) -> None:
        stop = first + run[1] - run[0]
        if not segments or segments[-1].stop != first:
            segments.append(Segment(first, stop, [run]))
            return
        last = segments[-1]
        if last.runs[-1][1] == run[0]:
            last.runs[-1] = (last.runs[-1][0], run[1])
        else:
            last.runs.append(run)
        segments[-1] = last._replace(stop=stop)

    def __copy__(self) -> "Slots":
        new = Slots(len(self.counts), self.page_size)
        new.length, new.counts = self.length, list(self.counts)
        new.pieces = [list(pieces) for pieces in self.pieces]
        return new
