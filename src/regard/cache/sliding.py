"""A cache for sliding windows, which drops the tokens that no later query may attend to."""

from typing import Any

from torch import Tensor

from regard.cache.growing import FIRST_CAPACITY, Contiguous
from regard.cache.parts import Part
from regard.cache.streams import (
    Lengths,
    check_streams,
    check_whole,
    concatenated,
    needs_derivatives,
    requires_grad,
    with_room,
    write_tokens,
)


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
        check_whole("size", size, least=1)  # with the query's own key
        check_whole("rollback", rollback, least=0)
        super().__init__()
        self.size = self.window = size
        self.rollback, self._first = rollback, 0

    def update(self, *new: Tensor) -> tuple[Part, ...]:
        """Append `[B, G, L, W]` streams; return the keys in the windows of the new tokens.

        Raises:
            ValueError: if the streams do not fit each other or those held.
        """
        added = check_streams(new, self._held)
        start, stop = self._oldest(), self.length + added
        keep = max(self._first, stop - self.size + 1 - self.rollback, 0)
        used, graph = self.length - self._first, needs_derivatives(new, self._held)
        has_room = bool(self._held) and used + added <= self._held[0].shape[2]
        if graph or not has_room or requires_grad(self._held):
            whole = Part(self._first, stop, concatenated(self._held, new, Lengths(used, used)))
            window = whole.narrow(keep, stop).streams
            if graph:
                self._held = tuple(each.clone() for each in window)
            else:
                most = self.size + self.rollback + self.size // 4
                capacity = min(most, max(FIRST_CAPACITY, 2 * (stop - keep)))
                self._held = with_room(window, stop - keep, capacity)
            self._first = keep
        else:
            write_tokens(self._held, new, Lengths(used, used))
            whole = Part(self._first, stop, self._held)
        self._lengths = self._lengths.grown(added)
        return (whole.narrow(start, stop),)

    def truncate(self, length: int | Tensor) -> None:
        """Keep the first `length` tokens, if the window of the next one is still held.

        Raises:
            ValueError: if it is not, or `length` is a tensor, negative or above the tokens so far.

        Examples:
            >>> import torch
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
        lengths = self._lengths.truncated(length)
        oldest = max(0, length - self.size + 1)
        if oldest < min(length, self._first):  # 0 tokens, or a window of 1, need no cached token
            raise ValueError(
                f"length={length} needs keys from slot {oldest} on, those "
                f"before {self._first} were dropped; give SlidingCache({self.size}, rollback="
                f"{self.length - length}) or more"
            )
        self._lengths, self._first = lengths, min(self._first, length)

    @property
    def arguments(self) -> dict[str, Any]:
        return {"size": self.size, "rollback": self.rollback}

    def __repr__(self) -> str:
        rollback = f", rollback={self.rollback}" if self.rollback else ""
        return f"SlidingCache({self.size}{rollback})"
