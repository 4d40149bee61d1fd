"""Sequences in caches of every kind: the operations, and what holds after each."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from listed import STREAMS
from regard.cache import truncate_all
from sequences import Kind, Read, Sequence

MOST = 90  # tokens of a row: a page table of many pages, and still quick to compare


class World:
    """Sequences that come and go. An operation that finds no sequence that suits does nothing."""

    def __init__(self, kinds: dict[str, Kind], folder: Path) -> None:
        self.kinds, self.folder = kinds, folder
        self.sequences: list[Sequence] = []
        self.next = 0  # the next token: each is a number of its own
        self.done = 0  # operations
        self.checked = 0  # of these, those after which everything was right
        self.names: dict[str, int] = {}  # operations by name

    def chosen(self, at: int) -> Sequence | None:
        return self.sequences[at % len(self.sequences)] if self.sequences else None

    def count(self, name: str) -> None:
        self.done += 1
        self.names[name] = self.names.get(name, 0) + 1

    def new_tokens(self, batch: int, length: int) -> list[list[int]]:
        """Numbers that no row has had."""
        first, self.next = self.next, self.next + batch * length
        return [list(range(first + b * length, first + (b + 1) * length)) for b in range(batch)]

    # Operations

    def begin(self, kind: str, streams: str, batch: int) -> None:
        self.count("begin")
        self.sequences.append(Sequence(kind, self.kinds[kind], STREAMS[streams], batch))

    def update(self, at: int, length: int) -> None:
        held = self.room(at, length)
        if held is None:
            return
        self.count("update")
        new = self.new_tokens(len(held.rows), length)
        drawn = held.drawn(new)
        if held.kind.most is not None and held.length + length > held.kind.most:
            return self.refused(held, lambda cache, layer: cache.update(*drawn[layer]))
        read = self.written(held, new, drawn)
        if read is None:
            return None
        held.read = read
        if held.kind.page is not None:
            if self.done % 2:
                return None  # pages return the tokens of a long update as they were given
            held.check_read(read)
            held.read = None
        for each in (stream for streams in drawn for stream in streams):
            each.zero_()  # a cache copies what it is given
        return None

    def room(self, at: int, length: int) -> Sequence | None:
        """A sequence, cut to nothing if it would grow too long."""
        held = self.chosen(at)
        if held is not None and held.length + length > MOST:
            self.cut(held, 0, [0] * len(held.rows))
        return held

    def written(self, held: Sequence, new: list[list[int]], drawn: list) -> Read | None:
        """The tokens appended to all layers, and what these should return; None: to no layer."""
        before, page = held.lengths, held.kind.page
        grown = [row.copy() for row in held.rows]
        for row, tokens in zip(grown, new, strict=True):
            row.add(tokens, page)
        parts = self.updated(held, drawn)
        if parts is None:
            return None
        held.rows = grown
        returned = [row.copy() for row in grown]
        for row, length in zip(returned, before, strict=True):
            if page is not None and len(set(before)) == 1 and len(row.tokens) - length > 1:
                row.rounds[length:] = [0] * (len(row.tokens) - length)
        return Read(parts, returned, before)

    def updated(self, held: Sequence, drawn: list) -> list | None:
        """What the layers return; a layer may have no room, and those before it are restored."""
        return [cache.update(*each) for cache, each in zip(held.caches, drawn, strict=True)]

    def peek(self, at: int, length: int) -> None:
        held = self.room(at, length)
        if (
            held is None
            or held.length + length > (held.kind.most or MOST)
            or not (held.length or length)
        ):
            return
        self.count("peek")
        held.read = None
        new = self.new_tokens(len(held.rows), length)
        rows = [row.copy() for row in held.rows]
        for row, tokens in zip(rows, new, strict=True):
            row.add(tokens, held.kind.page)
        layers = zip(held.caches, held.drawn(new), strict=True)
        parts = [cache.peek(*drawn) for cache, drawn in layers]
        held.check_read(Read(parts, rows, held.lengths))

    def truncate(self, at: int, length: int) -> None:
        """All rows to one length; windows refuse what they have dropped."""
        held = self.chosen(at)
        if held is None:
            return
        self.count("truncate")
        length %= held.length + 1
        self.cut(held, length, [min(length, n) for n in held.lengths])

    def roll_back(self, at: int, tokens: int) -> None:
        """The latest tokens are taken back."""
        held = self.chosen(at)
        if held is None:
            return
        self.count("roll back")
        length = max(0, held.length - tokens)
        self.cut(held, length, [min(length, n) for n in held.lengths])

    def truncate_rows(self, at: int, seed: int) -> None:
        """Each row to a length of its own."""
        held = self.chosen(at)
        if held is None or not held.kind.ragged:
            return
        self.count("truncate rows")
        lengths = [seed // (b + 1) % (n + 1) for b, n in enumerate(held.lengths)]
        self.cut(held, torch.tensor(lengths), lengths)

    def cut(self, held: Sequence, length: Any, lengths: list[int]) -> None:
        """All layers, or none where one of them cannot."""
        held.read = None
        unable = [cache for cache in held.caches if not cache.can_truncate(length)]
        if not unable:
            truncate_all(held.caches, length)
            for row, n in zip(held.rows, lengths, strict=True):
                row.cut(n, held.kind.page)
            return
        assert held.kind.rollback is not None, f"{held.name} can always be truncated"
        back = max(row.furthest - n for row, n in zip(held.rows, lengths, strict=True))
        assert back > held.kind.rollback, f"{held.name} can be rolled back by {back}"
        with pytest.raises(ValueError, match=r"\w+ \w+"):
            truncate_all(held.caches, length)
        for cache in unable:
            with pytest.raises(ValueError, match=r"\w+ \w+"):
                cache.truncate(length)

    def reorder(self, at: int, rows: list[int]) -> None:
        """Select, repeat and drop rows."""
        held = self.chosen(at)
        if held is None or not held.rows:
            return
        self.count("reorder")
        held.read = None
        rows = [row % len(held.rows) for row in rows]
        if not held.length:
            return  # a cache without streams does not know its rows
        for cache in held.caches:
            cache.reorder(torch.tensor(rows))
        held.rows = [held.rows[row].copy() for row in rows]

    def fork(self, at: int) -> None:
        held = self.chosen(at)
        if held is None:
            return
        self.count("fork")
        held.read = None
        self.sequences.append(held.twin([cache.fork() for cache in held.caches]))

    def copy(self, at: int) -> None:
        """A copy goes on beside it; caches with memory of their own are pickled too."""
        held = self.chosen(at)
        if held is None:
            return
        self.count("copy")
        held.read = None
        if held.kind.page is None:
            held.caches = [pickle.loads(pickle.dumps(cache)) for cache in held.caches]
        self.sequences.append(held.twin([copy.deepcopy(cache) for cache in held.caches]))

    def undo(self, at: int, length: int) -> None:
        """A call that fails after its update: the snapshot is restored."""
        held = self.room(at, length)
        if held is None or held.length + length > (held.kind.most or MOST):
            return
        self.count("undo")
        held.read = None
        rows = held.rows
        new = self.new_tokens(len(rows), length)
        before = [cache.snapshot() for cache in held.caches]
        if self.written(held, new, held.drawn(new)) is None:
            return
        for cache, each in zip(held.caches, before, strict=True):
            cache.restore(each)
        held.rows = rows

    def wrong(self, at: int, which: int) -> None:
        """Streams, lengths and rows that do not fit are refused."""
        held = self.chosen(at)
        if held is None or not held.length:
            return
        self.count("wrong")
        good = held.drawn(self.new_tokens(len(held.rows), 2))
        first = {
            0: lambda streams: (streams[0][:, :, :, 1:], *streams[1:]),  # another width
            1: lambda streams: (streams[0].double(), *streams[1:]),
            2: lambda streams: tuple(torch.cat([each, each]) for each in streams),  # rows
            3: lambda streams: (*streams, streams[0]),
            4: lambda streams: (),
        }
        rest: dict[int, Callable[[Any, int], Any]] = {
            5: lambda cache, layer: cache.truncate(held.length + 1),
            6: lambda cache, layer: cache.truncate(-1),
            7: lambda cache, layer: cache.reorder(torch.tensor([0, len(held.rows)])),
            8: lambda cache, layer: cache.truncate(torch.tensor([0] * (len(held.rows) + 1))),
        }
        which %= len(first) + len(rest)
        if which in rest:
            return self.refused(held, rest[which])
        call = first[which]
        self.refused(held, lambda cache, layer: cache.peek(*call(good[layer])))
        return self.refused(held, lambda cache, layer: cache.update(*call(good[layer])))

    def refused(self, held: Sequence, call: Callable[[Any, int], Any]) -> None:
        """Every layer raises in a sentence; `check` sees that nothing changed."""
        for layer, cache in enumerate(held.caches):
            with pytest.raises((ValueError, TypeError), match=r"\w+ \w+"):
                call(cache, layer)

    def save(self, at: int) -> None:
        """Saved and loaded into an empty cache; other weights are refused."""
        held = self.chosen(at)
        if held is None or not held.length:
            return
        self.count("save")
        held.read = None
        path = self.folder / "cache.safetensors"
        loaded = [make() for make in held.kind.make]
        for cache, empty in zip(held.caches, loaded, strict=True):
            cache.save(path, weights="ours")
            with pytest.raises(ValueError, match="weights"):
                empty.load(path, weights="of another model")
            assert empty.length == 0
            empty.load(path, weights="ours")
        self.sequences.append(held.twin(loaded))

    def drop(self, at: int) -> None:
        """Nothing refers to the caches any more, and no cycle of references holds them."""
        held = self.chosen(at)
        if held is None:
            return
        self.count("drop")
        self.sequences.remove(held)
        held.caches.clear()
        held.read = None

    # What holds after every operation

    def check(self) -> None:
        for held in self.sequences:
            held.check()
        self.checked = self.done

    def end(self) -> None:
        """Every sequence is dropped."""
        while self.sequences:
            self.drop(0)
