"""A cache of a fixed size, whose buffers are allocated once."""

from typing import Any

from torch import Tensor

from regard.cache.growing import Contiguous
from regard.cache.parts import Part
from regard.cache.saving import Record
from regard.cache.streams import (
    check_whole,
    empty_like,
    needs_gradients,
    with_room,
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
        """The slots of a call with `new` more tokens. Raises a ValueError if they have no room."""
        self._check_room(new)
        return super().span(new)

    def update(self, *new: Tensor) -> tuple[Part, ...]:
        """Append `[B, G, L, W]` streams; return all tokens, as one part.

        Raises:
            ValueError: if they do not fit, or require gradients.
        """
        added = self._check(new)
        if not self._held or not self._held[0].shape[2]:
            self._held = tuple(empty_like(each, self.max_length) for each in new)
        write_tokens(self._held, new, self._lengths)
        self._lengths = self._lengths.grown(added)
        stop = self._lengths.longest
        return (Part(0, stop, tuple([each.narrow(2, 0, stop) for each in self._held])),)

    def reorder(self, rows: Tensor) -> None:
        """Keep these batch rows, in this order; in place if there are as many as before."""
        buffers = self._held
        super().reorder(rows)
        if buffers and buffers[0].shape == self._held[0].shape:
            for buffer, selected in zip(buffers, self._held, strict=True):
                buffer.copy_(selected)
            self._held = buffers

    @property
    def arguments(self) -> dict[str, Any]:
        return {"max_length": self.max_length}

    def fill(self, record: Record) -> None:
        super().fill(record)
        self._check_room(0)
        if self.length:  # a file without tokens may claim rows that no memory has room for
            self._held = with_room(self._held, self.length, self.max_length)

    def _check(self, new: tuple[Tensor, ...]) -> int:
        added = super()._check(new)
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
