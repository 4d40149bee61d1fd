"""The cache that grows as needed: every token is kept, buffers double."""

from torch import Tensor

from regard.cache.streams import (
    Lengths,
    Part,
    Stored,
    appended,
    bytes_a_token,
    check_rows,
    check_streams,
    chosen,
    empty_like,
    is_followed,
    write,
)
from regard.span import Span

_FIRST_CAPACITY = 256  # tokens: decoding a while from an empty cache copies nothing


class KVCache(Stored):
    """Grows as needed, by doubling; by concatenation while gradients are wanted.

    >>> import torch
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
        if is_followed(new, self._held):
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
        self._lengths = self._lengths.truncated(length, self._held)

    def reorder(self, rows: Tensor) -> None:
        check_rows(rows, self._held)
        self._held = chosen(self._held, rows)
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
