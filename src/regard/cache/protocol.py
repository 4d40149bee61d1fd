"""The protocol of caches, and the neutral cache `NO_CACHE`.

A cache holds streams: keys and values, one joined latent, or integer positions, which grow along
dim 2. Each layer has its own cache, and the caller holds it. An operation that cannot be done
raises before it changes anything.
"""

from typing import Protocol, runtime_checkable

from torch import Tensor

from regard.cache.parts import Part
from regard.cache.streams import Lengths
from regard.span import Span


@runtime_checkable
class Cache(Protocol):
    """The protocol of caches: a class with these methods can be given as `cache=`.

    Tensors that `update` returns must not be written; they are valid until the next call. If a
    cache also has `snapshot()` and `restore(snapshot)`, a layer whose call fails after its update
    leaves the cache as it was; one without them is truncated to its former length.

    regard's caches have more: `fork()`, `can_truncate(length)`, `describe()`, `save(path, ...)` and
    `load(path, ...)`. Layers call none of these, and a cache of your own may lack them.

    Examples:
        >>> import torch
        >>> from regard import KVCache, Span
        >>> cache, k = KVCache(), torch.zeros(2, 1, 5, 4)  # two rows, one head, five tokens
        >>> cache.span(5) == Span(0, 5, 0, 5)
        True
        >>> parts = cache.update(k, k)
        >>> cache.truncate(3)
        >>> cache.reorder(torch.tensor([1, 1, 0]))
        >>> cache.length, cache.nbytes == 3 * 2 * 3 * 4 * 4  # rows, streams, tokens, width, bytes
        (3, True)
    """

    @property
    def length(self) -> int:
        """The number of tokens so far."""

    @property
    def nbytes(self) -> int:
        """Bytes stored for the tokens held."""

    def span(self, new: int) -> Span:
        """The slots of the queries and keys of a call with `new` more tokens."""

    def update(self, *new: Tensor) -> tuple[Part, ...]:
        """Append along dim 2; return the keys and values to attend to, in parts.

        Args:
            *new: streams `[B, G, L, W]`, such as keys and values of L new tokens.
        """

    def peek(self, *new: Tensor) -> tuple[Part, ...]:
        """The result of `update` with the same streams, without changing the cache."""

    def truncate(self, length: int | Tensor) -> None:
        """Keep the first `length` tokens, or `[B]` lengths, one for each batch row.

        Args:
            length: the number of tokens that remain, not of those dropped.
        """

    def reorder(self, rows: Tensor) -> None:
        """Keep these batch rows, `[N]` integers, in this order: for beams or selection."""


class NoCache:
    """The neutral cache, `NO_CACHE`: it holds no tokens.

    Examples:
        >>> from regard import NO_CACHE
        >>> from regard.cache import NoCache
        >>> NoCache().length, NO_CACHE
        (0, NO_CACHE)
    """

    length = 0
    nbytes = 0

    def span(self, new: int) -> Span:
        """The slots of a call without earlier tokens: queries and keys from 0 to `new`."""
        return Span(0, new, 0, new)

    def update(self, *new: Tensor) -> tuple[Part, ...]:
        """Return the new streams as one part; nothing is held."""
        return (Part(0, new[0].shape[2], new),)

    peek = update

    def truncate(self, length: int | Tensor) -> None:
        """Do nothing.

        Raises:
            ValueError: if `length` is not 0, the number of tokens held.
        """
        Lengths().truncated(length)

    def reorder(self, rows: Tensor) -> None:
        """Refuse: there are no tokens to reorder.

        Raises:
            ValueError: always.
        """
        raise ValueError("NO_CACHE holds nothing to reorder; give the layer cache=KVCache()")

    def __repr__(self) -> str:
        return "NO_CACHE"

    def __reduce__(self) -> str:
        return "NO_CACHE"  # copies and unpickled ones are the same object


NO_CACHE = NoCache()
