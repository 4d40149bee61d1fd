"""Caches that hold each stream in one tensor; one of all tokens, whose buffers grow by doubling."""

from torch import Tensor

from regard.cache.parts import Part
from regard.cache.stored import Stored
from regard.cache.streams import (
    check_rows,
    check_streams,
    concatenated,
    needs_derivatives,
    requires_grad,
    select_rows,
    with_room,
    write_tokens,
)
from regard.span import Span

FIRST_CAPACITY = 256  # tokens; short generations then never copy the buffers


class Contiguous(Stored):
    """Base class of caches that hold each stream in one tensor."""

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """The tensors that hold the tokens, some with room for more after them."""
        return self._held

    @property
    def first(self) -> int:
        """The slot of the first token held; of a window, tokens before it were dropped."""
        return self._first

    def update(self, *new: Tensor) -> tuple[Part, ...]:
        """Append `[B, G, L, W]` streams; return the tokens that the new ones may attend to."""
        raise NotImplementedError

    def count(self, new: int) -> None:
        """Count tokens that have been written to `buffers`, after those held."""
        self._lengths = self._lengths.grown(new)

    def span(self, new: int) -> Span:
        """The slots of the queries and keys of a call with `new` more tokens."""
        return self._lengths.span(new, 0 if self.window is None else self._oldest())

    def peek(self, *new: Tensor) -> tuple[Part, ...]:
        """The result of `update`, in new tensors, without changing the cache."""
        stop = self.length + self._check(new)
        whole = concatenated(self._held, new, self._lengths.grown(-self._first))
        return (Part(self._first, stop, whole).narrow(self._oldest(), stop),)

    def reorder(self, rows: Tensor) -> None:
        """Keep these batch rows, `[N]` integers, in this order."""
        check_rows(rows, self._held)
        self._held = select_rows(self._held, rows)
        self._lengths = self._lengths.reordered(rows)

    def _check(self, new: tuple[Tensor, ...]) -> int:
        """The number of new tokens. Raises if they cannot be appended."""
        return check_streams(new, self._held)


class KVCache(Contiguous):
    """A cache without a limit. Buffers grow by doubling; with gradients, tensors are concatenated.

    Examples:
        >>> import torch
        >>> from regard import KVCache
        >>> cache = KVCache()
        >>> k = torch.zeros(1, 2, 5, 8)
        >>> (part,) = cache.update(k, k)
        >>> part.kv_stop, cache.length, cache.nbytes  # 2 streams x 2 heads x 5 tokens x 8 x 4 bytes
        (5, 5, 640)
        >>> cache.truncate(3)
        >>> cache.length
        3
    """

    def update(self, *new: Tensor) -> tuple[Part, ...]:
        """Append `[B, G, L, W]` streams; return all tokens, as one part.

        Raises:
            ValueError: if the streams do not fit each other or those held.
        """
        held, lengths = self._held, self._lengths
        grown = lengths.grown(check_streams(new, held))
        if needs_derivatives(new, held):
            self._held = concatenated(held, new, lengths)
        else:
            if not held or held[0].shape[2] < grown.longest or requires_grad(held):
                self._held = self._with_room(new, grown.longest)
            write_tokens(self._held, new, lengths)
        self._lengths = grown
        stop = grown.longest
        return (Part(0, stop, tuple([each.narrow(2, 0, stop) for each in self._held])),)

    def _with_room(self, new: tuple[Tensor, ...], total: int) -> tuple[Tensor, ...]:
        """Buffers with the tokens held and room for `total`."""
        present = self._held[0].shape[2] if self._held else 0
        capacity = max(FIRST_CAPACITY, total, 2 * present if total > present else 0)
        return with_room(self._held or new, self.length, capacity)

    def __repr__(self) -> str:
        return "KVCache()"
