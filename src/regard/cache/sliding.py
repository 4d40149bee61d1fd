"""A cache that forgets: it keeps what a window needs, and what a rollback may ask for again."""

import torch
from torch import Tensor

from regard.cache.streams import (
    Part,
    Stored,
    check_rows,
    check_streams,
    check_whole,
    chosen,
    empty_like,
    is_followed,
)
from regard.span import Span


class SlidingCache(Stored):
    """Keeps a window of `size` keys, counting the query's own, and `rollback` more for truncation.

    Storage is at most 1.25 times the window, plus a chunk, plus the rollback. The layer's mask must
    be a `SlidingWindow` no wider than `size`.

    Raises:
        ValueError: if `size` is below 1 or `rollback` negative.

    >>> cache = SlidingCache(4)
    >>> k = torch.zeros(1, 2, 10, 8)
    >>> _ = cache.update(k, k)
    >>> cache.span(1).kv_start, cache.length
    (7, 10)
    """

    def __init__(self, size: int, rollback: int = 0) -> None:
        check_whole("size", size)
        check_whole("rollback", rollback)
        if size < 1:
            raise ValueError(f"size counts the query's own key and is at least 1, got {size}")
        if rollback < 0:
            raise ValueError(f"rollback is 0 or more tokens, got {rollback}")
        self.size, self.rollback = size, rollback
        self._length = 0
        self._first = 0  # the slot of the oldest token held
        self._held: tuple[Tensor, ...] = ()

    @property
    def length(self) -> int:
        return self._length

    @property
    def nbytes(self) -> int:
        """Bytes stored for the tokens held."""
        if not self._held:
            return 0
        share = (self._length - self._first) / self._held[0].shape[2]
        return round(self.allocated_bytes * share) if share else 0

    @property
    def allocated_bytes(self) -> int:
        return sum(held.numel() * held.element_size() for held in self._held)

    def span(self, new: int) -> Span:
        return Span(self._length, self._length + new, self._needed(), self._length + new)

    def update(self, *new: Tensor) -> tuple[Part, ...]:
        """Append `[B, G, L, W]` streams; give the keys that a window at the first of them needs.

        Raises:
            ValueError: if the streams do not fit each other or those held.
        """
        added = check_streams(new, self._held)
        start, stop = self._needed(), self._length + added
        keep = max(self._first, stop - self.size + 1 - self.rollback, 0)
        used = self._length - self._first
        if not self._held or is_followed(new, self._held) or not self._fits(used + added):
            whole = self._joined(new)
            part = self._view(whole, self._first, start, stop)
            self._store(whole, keep, stop, is_followed(new, self._held))
        else:
            for held, each in zip(self._held, new, strict=True):
                held.narrow(2, used, added).copy_(each.detach())
            part = self._view(self._held, self._first, start, stop)
        self._length = stop
        return (part,)

    def peek(self, *new: Tensor) -> tuple[Part, ...]:
        added = check_streams(new, self._held)
        whole = self._joined(new)
        return (self._view(whole, self._first, self._needed(), self._length + added),)

    def truncate(self, length: int | Tensor) -> None:
        if isinstance(length, Tensor):
            raise ValueError(
                "SlidingCache keeps rows of one length, got a tensor; truncate to a whole number, "
                "or use KVCache() or StaticCache(max_length)"
            )
        check_whole("length", length)
        if not 0 <= length <= self._length:
            raise ValueError(f"length={length} is not among 0..{self._length}, the tokens seen")
        oldest = max(0, length - self.size + 1)
        if oldest < min(length, self._first):  # 0 tokens, or a window of 1, need nothing held
            raise ValueError(
                f"length={length} needs keys from slot {oldest} on, those "
                f"before {self._first} are gone; give SlidingCache({self.size}, rollback="
                f"{self._length - length}) or more"
            )
        self._length = length
        self._first = min(self._first, length)

    def reorder(self, rows: Tensor) -> None:
        check_rows(rows, self._held)
        self._held = chosen(self._held, rows)

    def _needed(self) -> int:
        """The oldest slot that the window of the next token still covers."""
        return max(0, self._length - self.size + 1)

    def _fits(self, tokens: int) -> bool:
        return tokens <= self._held[0].shape[2] and not any(h.requires_grad for h in self._held)

    def _joined(self, new: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if not self._held:
            return tuple(each.clone() for each in new)
        used = self._length - self._first
        pairs = zip(self._held, new, strict=True)
        return tuple(torch.cat([held.narrow(2, 0, used), each], dim=2) for held, each in pairs)

    def _view(self, whole: tuple[Tensor, ...], first: int, start: int, stop: int) -> Part:
        return Part(start, stop, tuple(w.narrow(2, start - first, stop - start) for w in whole))

    def _store(self, whole: tuple[Tensor, ...], keep: int, stop: int, graph: bool) -> None:
        """Hold the tokens `keep..stop` in buffers with room to append."""
        kept = [each.narrow(2, keep - self._first, stop - keep) for each in whole]
        if graph:
            self._held = tuple(each.clone() for each in kept)
        else:
            capacity = self.size + self.rollback + self.size // 4
            buffers = tuple(empty_like(each, capacity) for each in kept)
            for buffer, each in zip(buffers, kept, strict=True):
                buffer.narrow(2, 0, stop - keep).copy_(each.detach())
            self._held = buffers
        self._first = keep

    def __repr__(self) -> str:
        return f"SlidingCache({self.size}" + (
            f", rollback={self.rollback})" if self.rollback else ")"
        )
