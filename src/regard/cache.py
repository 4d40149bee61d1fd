"""The past of a layer: one verb, and no idea what it stores.

Keys and values, one joined latent, integer positions: anything that grows along dim 2. One cache a
layer, held by the caller. An operation that cannot be done raises before it changes anything.
"""

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from regard.span import Span
from regard.streams import (
    Lengths,
    Part,
    appended,
    bytes_a_token,
    check_rows,
    check_streams,
    empty_like,
    wants_grad,
    write,
)

__all__ = ["NO_CACHE", "Cache", "KVCache", "NoCache", "Part", "SlidingCache", "StaticCache"]

_FIRST_CAPACITY = 256  # tokens: decoding a while from an empty cache copies nothing


@runtime_checkable
class Cache(Protocol):
    """What a layer asks of a cache. What `update` returns is read-only until the next call."""

    @property
    def length(self) -> int:
        """Tokens seen."""

    def span(self, new: int) -> Span:
        """Which queries will meet which keys, once `new` tokens are added."""

    def update(self, *new: Tensor) -> tuple[Part, ...]:
        """Append along dim 2; give what may be attended."""

    def peek(self, *new: Tensor) -> tuple[Part, ...]:
        """The same, leaving the cache as it was."""

    def truncate(self, length: int | Tensor) -> None:
        """Keep the first `length` tokens, or `[B]` lengths, one for each row."""

    def reorder(self, rows: Tensor) -> None:
        """Become the cache of these batch rows: beams, selection, repetition."""


class NoCache:
    """The neutral cache, `NO_CACHE`: nothing came before, nothing is kept."""

    length = 0
    nbytes = 0

    def span(self, new: int) -> Span:
        return Span(0, new, 0, new)

    def update(self, *new: Tensor) -> tuple[Part, ...]:
        return (Part(0, new[0].shape[2], new),)

    peek = update

    def truncate(self, length: int | Tensor) -> None:
        Lengths().truncated(length)

    def reorder(self, rows: Tensor) -> None:
        """There is nothing to reorder."""

    def __repr__(self) -> str:
        return "NO_CACHE"

    def __reduce__(self) -> str:
        return "NO_CACHE"

    def __copy__(self) -> "NoCache":
        return self

    def __deepcopy__(self, memo: object) -> "NoCache":
        return self


NO_CACHE = NoCache()


class KVCache:
    """Grows as needed, by doubling; by concatenation while gradients are wanted.

    >>> cache = KVCache()
    >>> k = torch.zeros(1, 2, 5, 8)
    >>> [part.kv_stop for part in cache.update(k, k)], cache.length
    ([5], 5)
    >>> cache.truncate(3); cache.length
    3
    """

    def __init__(self) -> None:
        self._lengths = Lengths()
        self._held: tuple[Tensor, ...] = ()

    @property
    def length(self) -> int:
        return self._lengths.longest

    @property
    def nbytes(self) -> int:
        """Bytes stored for the tokens held."""
        return sum(bytes_a_token(held) for held in self._held) * self.length

    @property
    def allocated_bytes(self) -> int:
        return sum(held.numel() * held.element_size() for held in self._held)

    def span(self, new: int) -> Span:
        return self._lengths.span(new)

    def update(self, *new: Tensor) -> tuple[Part, ...]:
        """Append `[B, G, L, W]` streams; give everything held, as one part.

        Raises:
            ValueError: if the streams do not fit each other or those held.
        """
        added = check_streams(new, self._held)
        if wants_grad(new, self._held):
            self._held = appended(self._held, new, self._lengths)
        else:
            self._held = self._reserve(new, self.length + added)
            write(self._held, new, self._lengths)
        self._lengths = self._lengths.grown(added)
        return (self._part(self._held),)

    def peek(self, *new: Tensor) -> tuple[Part, ...]:
        added = check_streams(new, self._held)
        return (Part(0, self.length + added, appended(self._held, new, self._lengths)),)

    def truncate(self, length: int | Tensor) -> None:
        self._lengths = self._lengths.truncated(length)

    def reorder(self, rows: Tensor) -> None:
        check_rows(rows, self._held)
        self._held = tuple(held.index_select(0, rows.to(held.device)) for held in self._held)
        self._lengths = self._lengths.reordered(rows)

    def _part(self, held: tuple[Tensor, ...]) -> Part:
        return Part(0, self.length, tuple(each.narrow(2, 0, self.length) for each in held))

    def _reserve(self, new: tuple[Tensor, ...], total: int) -> tuple[Tensor, ...]:
        """Buffers for `total` tokens, holding what is held."""
        if (
            self._held
            and self._held[0].shape[2] >= total
            and not any(h.requires_grad for h in self._held)
        ):
            return self._held
        capacity = max(_FIRST_CAPACITY, total)
        if self._held and total > self._held[0].shape[2]:
            capacity = max(capacity, 2 * self._held[0].shape[2])
        buffers = tuple(empty_like(each, capacity) for each in new)
        for buffer, held in zip(buffers, self._held, strict=False):
            buffer.narrow(2, 0, self.length).copy_(held.detach().narrow(2, 0, self.length))
        return buffers

    def __repr__(self) -> str:
        return "KVCache()"


class StaticCache:
    """Fixed buffers for `max_length` tokens: nothing is allocated after the first update.

    For `torch.compile`. Takes no gradients.

    >>> cache = StaticCache(8)
    >>> k = torch.zeros(1, 2, 5, 4)
    >>> cache.update(k, k)[0].kv_stop
    5
    >>> cache.update(k, k)
    Traceback (most recent call last):
    ...
    ValueError: 5 tokens held and 5 new ones are more than max_length=8; make a longer \
StaticCache, truncate this one, or use KVCache()
    """

    def __init__(self, max_length: int) -> None:
        if max_length < 1:
            raise ValueError(f"max_length is at least 1, got {max_length}")
        self.max_length = max_length
        self._lengths = Lengths()
        self._held: tuple[Tensor, ...] = ()

    @property
    def length(self) -> int:
        return self._lengths.longest

    @property
    def nbytes(self) -> int:
        """Bytes stored for the tokens held."""
        return sum(bytes_a_token(held) for held in self._held) * self.length

    @property
    def allocated_bytes(self) -> int:
        return sum(held.numel() * held.element_size() for held in self._held)

    def span(self, new: int) -> Span:
        self._check_room(new)
        return self._lengths.span(new)

    def update(self, *new: Tensor) -> tuple[Part, ...]:
        """Write `[B, G, L, W]` streams behind those held; give what has been written.

        Raises:
            ValueError: if they do not fit, or gradients are wanted.
        """
        added = self._check(new)
        if not self._held:
            self._held = tuple(empty_like(each, self.max_length) for each in new)
        write(self._held, new, self._lengths)
        self._lengths = self._lengths.grown(added)
        total = self.length
        return (Part(0, total, tuple(held.narrow(2, 0, total) for held in self._held)),)

    def peek(self, *new: Tensor) -> tuple[Part, ...]:
        added = self._check(new)
        return (Part(0, self.length + added, appended(self._held, new, self._lengths)),)

    def truncate(self, length: int | Tensor) -> None:
        self._lengths = self._lengths.truncated(length)

    def reorder(self, rows: Tensor) -> None:
        check_rows(rows, self._held)
        chosen = [held.index_select(0, rows.to(held.device)) for held in self._held]
        if self._held and len(rows) == self._held[0].shape[0]:
            for held, each in zip(self._held, chosen, strict=True):
                held.copy_(each)
        else:
            self._held = tuple(chosen)
        self._lengths = self._lengths.reordered(rows)

    def _check(self, new: tuple[Tensor, ...]) -> int:
        added = check_streams(new, self._held)
        self._check_room(added)
        if wants_grad(new, self._held):
            raise ValueError(
                "StaticCache writes in place, which gradients cannot follow; use KVCache(), or "
                "torch.no_grad()"
            )
        return added

    def _check_room(self, new: int) -> None:
        if self.length + new > self.max_length:
            raise ValueError(
                f"{self.length} tokens held and {new} new ones are more than max_length="
                f"{self.max_length}; make a longer StaticCache, truncate this one, or use KVCache()"
            )

    def __repr__(self) -> str:
        return f"StaticCache({self.max_length})"


class SlidingCache:
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
        if not self._held or wants_grad(new, self._held) or not self._fits(used + added):
            whole = self._joined(new)
            part = self._view(whole, self._first, start, stop)
            self._store(whole, keep, stop, wants_grad(new, self._held))
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
        if not 0 <= length <= self._length:
            raise ValueError(f"length={length} is not among 0..{self._length}, the tokens held")
        if max(0, length - self.size + 1) < self._first:
            raise ValueError(
                f"length={length} needs keys from slot {max(0, length - self.size + 1)} on, those "
                f"before {self._first} are gone; give SlidingCache({self.size}, rollback="
                f"{self._length - length}) or more"
            )
        self._length = length
        self._first = min(self._first, length)

    def reorder(self, rows: Tensor) -> None:
        check_rows(rows, self._held)
        self._held = tuple(held.index_select(0, rows.to(held.device)) for held in self._held)

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
