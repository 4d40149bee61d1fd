"""A cache for sliding windows, which drops the tokens that no later query may attend to."""

from typing import Any

import torch
from torch import Tensor

from regard.cache.parts import Part
from regard.cache.stored import Contiguous
from regard.cache.streams import (
    Lengths,
    check_rows,
    check_streams,
    check_whole,
    empty_like,
    needs_derivatives,
    select_rows,
    write_slots,
)
from regard.span import Span

_FIRST_CAPACITY = 256  # tokens; a short sequence does not need the window of a long one


class SlidingCache(Contiguous):
    """A cache of the last `size` tokens, and of `rollback` more so that it can be truncated.

    The layer's mask must be a `SlidingWindow` of `size` or less. Buffers grow by doubling, to at
    most 1.25 times the window, plus the tokens of one update, plus the rollback.

    Args:
        size: tokens, the query's own counted, as `SlidingWindow` does.
        rollback: tokens that `truncate` may remove.

    Raises:
        ValueError: if `size` is below 1 or `rollback` negative.

    Examples:
        >>> import torch
        >>> from regard import SlidingCache
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
        super().__init__()
        self.size, self.rollback = size, rollback
        self._first = 0

    def span(self, new: int) -> Span:
        """The slots of a call with `new` more tokens; keys begin with the window of the first."""
        return self._lengths.span(new, self._needed())

    def update(self, *new: Tensor) -> tuple[Part, ...]:
        """Append `[B, G, L, W]` streams; return the keys in the windows of the new tokens.

        Raises:
            ValueError: if the streams do not fit each other or those held.
        """
        added = check_streams(new, self._held)
        start, stop = self._needed(), self.length + added
        keep = max(self._first, stop - self.size + 1 - self.rollback, 0)
        used, graph = self.length - self._first, needs_derivatives(new, self._held)
        if not self._held or graph or not self._fits(used + added):
            whole = self._joined(new)
            part = self._view(whole, start, stop)
            self._store(whole, keep, stop, graph)
        else:
            write_slots(self._held, new, used)
            part = self._view(self._held, start, stop)
        self._lengths = self._lengths.grown(added)
        return (part,)

    def peek(self, *new: Tensor) -> tuple[Part, ...]:
        """The result of `update`, in new tensors, without changing the cache."""
        added = check_streams(new, self._held)
        whole = self._joined(new)
        return (self._view(whole, self._needed(), self.length + added),)

    def truncate(self, length: int | Tensor) -> None:
        """Keep the first `length` tokens, if the window of the next one is still held.

        Raises:
            ValueError: if it is not, or `length` is a tensor, negative or above the tokens so far.

        Examples:
            >>> cache, k = SlidingCache(4, rollback=2), torch.zeros(1, 2, 10, 8)
            >>> _ = cache.update(k, k)
            >>> cache.truncate(8)
            >>> cache.span(1).kv_start
            5
        """
        if isinstance(length, Tensor):
            raise ValueError(
                "SlidingCache has rows of one length, got a tensor; truncate to a whole number, "
                "or use KVCache() or StaticCache(max_length)"
            )
        check_whole("length", length)
        if not 0 <= length <= self.length:
            raise ValueError(f"length={length} is not in 0..{self.length}, the tokens so far")
        oldest = max(0, length - self.size + 1)
        if oldest < min(length, self._first):  # 0 tokens, or a window of 1, need no cached token
            raise ValueError(
                f"length={length} needs keys from slot {oldest} on, those "
                f"before {self._first} were dropped; give SlidingCache({self.size}, rollback="
                f"{self.length - length}) or more"
            )
        self._lengths = Lengths(length, length)
        self._first = min(self._first, length)

    def reorder(self, rows: Tensor) -> None:
        """Keep these batch rows, `[N]` integers, in this order."""
        check_rows(rows, self._held)
        self._held = select_rows(self._held, rows)

    @property
    def arguments(self) -> dict[str, Any]:
        """What the cache was constructed with, for its file."""
        return {"size": self.size, "rollback": self.rollback}

    def _check_first(self, length: int, first: int) -> None:
        if max(0, length - self.size + 1) < min(length, first):
            raise ValueError(
                f"{self!r} holds the {self.size - 1} tokens before the next one, got those from "
                f"slot {first} of {length}"
            )

    def _needed(self) -> int:
        """The oldest slot in the window of the next token."""
        return max(0, self.length - self.size + 1)

    def _fits(self, tokens: int) -> bool:
        return tokens <= self._held[0].shape[2] and not any(h.requires_grad for h in self._held)

    def _joined(self, new: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if not self._held:
            return tuple(each.clone() for each in new)
        used = self.length - self._first
        pairs = zip(self._held, new, strict=True)
        return tuple(torch.cat([held.narrow(2, 0, used), each], dim=2) for held, each in pairs)

    def _view(self, whole: tuple[Tensor, ...], start: int, stop: int) -> Part:
        begin, size = start - self._first, stop - start
        return Part(start, stop, tuple(each.narrow(2, begin, size) for each in whole))

    def _store(self, whole: tuple[Tensor, ...], keep: int, stop: int, graph: bool) -> None:
        """Hold the tokens `keep..stop`; without an autograd graph, in buffers with more room."""
        window = [each.narrow(2, keep - self._first, stop - keep) for each in whole]
        if graph:
            self._held = tuple(each.clone() for each in window)
        else:
            most = self.size + self.rollback + self.size // 4
            capacity = min(most, max(_FIRST_CAPACITY, 2 * (stop - keep)))
            buffers = tuple(empty_like(each, capacity) for each in window)
            for buffer, each in zip(buffers, window, strict=True):
                buffer.narrow(2, 0, stop - keep).copy_(each.detach())
            self._held = buffers
        self._first = keep

    def __repr__(self) -> str:
        rollback = f", rollback={self.rollback}" if self.rollback else ""
        return f"SlidingCache({self.size}{rollback})"
