"""A cache of a fixed size, whose buffers are allocated once."""

from typing import Any

from torch import Tensor

from regard.cache.parts import Part
from regard.cache.stored import Contiguous
from regard.cache.streams import (
    check_rows,
    check_streams,
    check_whole,
    concatenated,
    empty_like,
    first_tokens,
    needs_gradients,
    select_rows,
    write_slots,
    write_tokens,
)
from regard.span import Span


class StaticCache(Contiguous):
    """A cache with buffers for `max_length` tokens, allocated by the first update.

    Updates write in place, as `torch.compile` needs. Without gradients.

    Args:
        max_length: the largest number of tokens.

    Raises:
        ValueError: if `max_length` is below 1; by `update`, if there is no room left.

    Examples:
        >>> import torch
        >>> from regard import StaticCache
        >>> cache = StaticCache(8)
        >>> k = torch.zeros(1, 2, 5, 4)
        >>> cache.update(k, k)[0].kv_stop, cache.nbytes, cache.allocated_bytes
        (5, 320, 512)
        >>> cache.update(k, k)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        ValueError: 5 tokens held and 5 new ones are more than max_length=8; make a longer ...
    """

    def __init__(self, max_length: int) -> None:
        check_whole("max_length", max_length, least=1)
        super().__init__()
        self.max_length = max_length

    def span(self, new: int) -> Span:
        """The slots of the queries and keys of a call with `new` more tokens.

        Raises:
            ValueError: if there is no room for them.
        """
        self._check_room(new)
        return self._lengths.span(new)

    def update(self, *new: Tensor) -> tuple[Part, ...]:
        """Append `[B, G, L, W]` streams; return all tokens, as one part.

        Raises:
            ValueError: if they do not fit, or require gradients.
        """
        added = self._check(new)
        if not self._held or not self._held[0].shape[2]:
            self._held = tuple(empty_like(each, self.max_length) for each in new)
        write_tokens(self._held, new, self._lengths)
        self._lengths = lengths = self._lengths.grown(added)
        return (first_tokens(self._held, lengths.longest),)

    def peek(self, *new: Tensor) -> tuple[Part, ...]:
        """The result of `update`, in new tensors, without changing the cache."""
        added = self._check(new)
        return (Part(0, self.length + added, concatenated(self._held, new, self._lengths)),)

    def truncate(self, length: int | Tensor) -> None:
        """Keep the first `length` tokens, or `[B]` lengths; the buffers stay."""
        self._lengths = self._lengths.truncated(length, self._held)

    def reorder(self, rows: Tensor) -> None:
        """Keep these batch rows, in this order; in place if there are as many as before."""
        check_rows(rows, self._held)
        selected = select_rows(self._held, rows)
        if self._held and len(rows) == self._held[0].shape[0]:
            for held, each in zip(self._held, selected, strict=True):
                held.copy_(each)
        else:
            self._held = selected
        self._lengths = self._lengths.reordered(rows)

    @property
    def arguments(self) -> dict[str, Any]:
        """What the cache was constructed with, for its file."""
        return {"max_length": self.max_length}

    def _buffers(self, streams: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Buffers of the whole size. Streams without tokens stay as they are until the next update:
        a file without data may claim rows and heads that no memory has room for."""
        self._check_room(0)
        if not streams or not streams[0].shape[2]:
            return streams
        buffers = tuple(empty_like(each, self.max_length) for each in streams)
        write_slots(buffers, streams, 0)
        return buffers

    def _check(self, new: tuple[Tensor, ...]) -> int:
        added = check_streams(new, self._held)
        self._check_room(added)
        if needs_gradients(new, self._held):
            raise ValueError(
                "StaticCache writes in place, so that gradients do not flow; use KVCache(), or "
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
