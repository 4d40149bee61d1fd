"""The cache of a fixed size: its buffers are allocated once and never moved."""

from torch import Tensor

from regard.cache.streams import (
    Lengths,
    Part,
    Stored,
    appended,
    bytes_a_token,
    check_rows,
    check_streams,
    check_whole,
    chosen,
    empty_like,
    wants_grad,
    write,
)
from regard.span import Span


class StaticCache(Stored):
    """Fixed buffers for `max_length` tokens: nothing is allocated after the first update.

    For `torch.compile`. Takes no gradients.

    >>> import torch
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
        check_whole("max_length", max_length, least=1)
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
        self._lengths = self._lengths.truncated(length, self._held)

    def reorder(self, rows: Tensor) -> None:
        check_rows(rows, self._held)
        picked = chosen(self._held, rows)
        if self._held and len(rows) == self._held[0].shape[0]:
            for held, each in zip(self._held, picked, strict=True):
                held.copy_(each)
        else:
            self._held = picked
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
