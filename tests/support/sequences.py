"""A batch of sequences in the caches of one or more layers, beside plain lists of its tokens."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from listed import Coding, Streams, differences, errors, numbers_at


class Kind(NamedTuple):
    """Caches of one kind, one for each layer, and what the test knows of them."""

    make: tuple[Callable[[], Any], ...]
    codings: tuple[Coding | None, ...] = ()  # of keys, values, positions; empty: all are exact
    joined: Coding | None = None  # of a joined stream
    window: tuple[int | None, ...] = (None,)  # of each layer
    page: int | None = None  # tokens of a page; None: tokens are coded when they are written
    most: int | None = None  # tokens at most
    ragged: bool = True  # whether rows may differ in length
    rollback: int | None = None  # tokens that a window can always take back; None: all

    def coding(self, streams: Streams, index: int) -> Coding | None:
        """How a stream is coded; None where it is exact."""
        if len(streams.shapes) == 1:
            return self.joined
        return self.codings[index] if self.codings else None


@dataclass
class Row:
    """The tokens of a row, and how often each may have been rounded to codes."""

    tokens: list[int] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)
    sealed: int = 0  # pages
    furthest: int = 0  # tokens: a window counts its rollback from there

    def copy(self) -> "Row":
        return Row(list(self.tokens), list(self.rounds), self.sealed, self.furthest)

    def add(self, tokens: list[int], page: int | None) -> None:
        """Append; pages that are full now are sealed. The first one is not coded."""
        self.tokens += tokens
        self.furthest = max(self.furthest, len(self.tokens))
        self.rounds += [1 if page is None else 0] * len(tokens)
        if page is None:
            return
        for at in range(max(1, self.sealed), len(self.tokens) // page):
            for slot in range(at * page, (at + 1) * page):
                self.rounds[slot] += 1
        self.sealed = max(self.sealed, len(self.tokens) // page)

    def cut(self, length: int, page: int | None) -> None:
        """Leave the first tokens; a page that is cut is open again."""
        del self.tokens[length:], self.rounds[length:]
        if page is not None:
            self.sealed = min(self.sealed, length // page)
        if not length:
            self.furthest = 0


class Read(NamedTuple):
    """What the layers of a sequence returned, and what they should hold.

    Attributes:
        parts: of each layer.
        rows: the tokens, with those of the call.
        before: the lengths of the rows before the call: windows reach back from there.
    """

    parts: list[Any]
    rows: list[Row]
    before: list[int]


class Sequence:
    """Caches of one kind, and the lists that they should agree with."""

    def __init__(self, name: str, kind: Kind, streams: Streams, batch: int) -> None:
        self.name, self.kind, self.streams = name, kind, streams
        self.caches = [make() for make in kind.make]
        self.rows = [Row() for _ in range(batch)]
        self.read: Read | None = None  # what the latest update returned
        self.right: dict[int, tuple[Any, list[Tensor]]] = {}  # of each layer: read, and was right
        self.announce()

    def announce(self) -> None:
        """Tell caches which pieces a joined stream has, as MLA does."""
        for cache in self.caches:
            if hasattr(cache, "pieces") and self.streams.pieces is not None:
                cache.pieces = self.streams.pieces

    @property
    def lengths(self) -> list[int]:
        return [len(row.tokens) for row in self.rows]

    @property
    def length(self) -> int:
        return max(self.lengths, default=0)

    @property
    def tokens(self) -> list[list[int]]:
        return [row.tokens for row in self.rows]

    def twin(self, caches: list[Any]) -> "Sequence":
        """Another batch with the same tokens, in other caches."""
        other = object.__new__(Sequence)
        other.name, other.kind, other.streams = self.name, self.kind, self.streams
        other.caches, other.read, other.right = caches, None, {}
        other.rows = [row.copy() for row in self.rows]
        return other

    def drawn(self, tokens: list[list[int]]) -> list[tuple[torch.Tensor, ...]]:
        """The streams of new tokens, for each layer."""
        return [self.streams.of(tokens, layer) for layer in range(len(self.caches))]

    def check(self) -> None:
        """Lengths, spans, bytes and values of all layers are those of the lists."""
        for layer, cache in enumerate(self.caches):
            self.check_span(layer, cache)
        if self.read is not None:  # valid until the next call, which peek would be
            self.check_read(self.read)
        elif self.length:
            none = self.drawn([[]] * len(self.rows))
            peeked = [cache.peek(*new) for cache, new in zip(self.caches, none, strict=True)]
            self.check_read(Read(peeked, self.rows, self.lengths))

    def check_span(self, layer: int, cache: Any) -> None:
        """The lengths of a cache, where its next token would be, and its bytes."""
        assert cache.length == self.length, (self.name, cache.length, self.length)
        first = min(self.first_needed(layer, n) for n in self.lengths)
        self.check_bytes(cache, self.length - first)
        if self.length == self.kind.most:
            return  # there is no room for a next token
        span = cache.span(1)
        starts = span.positions().reshape(-1, 1)[:, 0].expand(len(self.rows))
        assert starts.tolist() == self.lengths, self.name
        assert span.kv_start <= first, (self.name, span, first)
        assert span.kv_stop == self.length + 1

    def first_needed(self, layer: int, length: int) -> int:
        """The first slot in the window of the token after `length` others."""
        window = self.kind.window[layer]
        return 0 if window is None else max(0, length - window + 1)

    def check_bytes(self, cache: Any, needed: int) -> None:
        """Caches that hold their own memory store each token once."""
        if self.kind.page is not None or not self.length:
            return
        codings = [self.kind.coding(self.streams, i) for i in range(len(self.streams.shapes))]
        token = len(self.rows) * self.streams.token_bytes(codings)
        least = needed - 1 if self.kind.rollback is not None else self.length
        if None in self.kind.window and len(self.caches) == 1:
            assert cache.nbytes == token * self.length, (self.name, cache.nbytes, token)
        elif len(self.caches) == 1:
            assert token * least <= cache.nbytes <= token * self.length, (self.name, cache.nbytes)

    def check_read(self, read: Read) -> None:
        """The parts of each layer, in any order, follow each other and hold the rows' tokens."""
        stop = max(len(row.tokens) for row in read.rows)
        for layer, parts in enumerate(read.parts):
            lows = [self.first_needed(layer, n) for n in read.before]
            at = sorted(parts, key=lambda part: part.kv_start)
            assert at, (self.name, "no parts")
            assert at[0].kv_start <= min(lows), (self.name, at[0].kv_start, lows)
            assert at[-1].kv_stop == stop, (self.name, at[-1].kv_stop, stop)
            for one, other in pairwise(at):
                assert one.kv_stop == other.kv_start, (self.name, "slots are missing or twice")
            streams = [self.read_part(part) for part in at]
            whole = [
                each[0] if not each[1:] else torch.cat(each, 2)
                for each in zip(*streams, strict=True)
            ]
            self.check_tokens(whole, at[0].kv_start, layer, read.rows, lows)

    def read_part(self, part: Any) -> list[Tensor]:
        """The streams of a part, which has as many slots as it says."""
        streams = [part.streams[index] for index in range(len(part.streams))]
        assert len(streams) == len(self.streams.shapes)
        assert {each.shape[2] for each in streams} == {part.kv_stop - part.kv_start}
        return streams

    def check_tokens(
        self, read: list[Tensor], start: int, layer: int, rows: list[Row], lows: list[int]
    ) -> None:
        """Each token is near its own, and equal where it is not coded.

        What is equal, bit for bit, to what was right before need not be compared again: most
        operations change one sequence, and all are read after each.
        """
        expected = (start, lows, [(row.tokens, row.rounds) for row in rows])
        before = self.right.get(layer)
        if before is not None and before[0] == expected and all(map(torch.equal, read, before[1])):
            return
        stop = start + read[0].shape[2]
        at, there = numbers_at([row.tokens for row in rows], start, stop, layer)
        for row, low in enumerate(lows):
            there[row, : max(0, low - start)] = False  # before the window of this row
        for index, got in enumerate(read):
            if at.numel():
                self.check_stream(got, layer, index, rows, (start, at, there))
        copied = [(list(row.tokens), list(row.rounds)) for row in rows]
        self.right[layer] = (start, lows, copied), [each.clone() for each in read]

    def check_stream(
        self,
        got: Tensor,
        layer: int,
        index: int,
        rows: list[Row],
        slots: tuple[int, Tensor, Tensor],
    ) -> None:
        """One stream of all slots from the first on, whose tokens are `at` where they are there."""
        start, at, there = slots
        gaps = differences(got, self.streams, index, at)
        allowed = self.allowed(index, rows, start, at)
        wrong = (~(gaps <= allowed) & there).nonzero().tolist()
        assert not wrong, (
            f"{self.name}, layer {layer}, stream {index}: (row, slot) "
            f"{[(b, start + s) for b, s in wrong]} are off by "
            f"{[float(gaps[b, s]) for b, s in wrong]}, of "
            f"{[float((allowed + 0.0 * gaps.nan_to_num())[b, s]) for b, s in wrong]}"
        )

    def allowed(self, index: int, rows: list[Row], start: int, at: Tensor) -> Tensor | float:
        """The bound of each token: as many roundings as it may have had, each a little coarser."""
        coding, stop = self.kind.coding(self.streams, index), start + at.shape[1]
        if coding is None or not any(any(row.rounds[start:stop]) for row in rows):
            return 0.0
        each = [row.rounds[start:stop] for row in rows]
        rounds = torch.tensor([[*row, *[0] * (at.shape[1] - len(row))] for row in each]).float()
        return errors(self.streams, index, coding)[at] * rounds * (1 + 0.15 * (rounds - 1).relu())
