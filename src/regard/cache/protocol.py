"""The past of a layer: one verb, and no idea what it stores.

Keys and values, one joined latent, integer positions: anything that grows along dim 2. One cache a
layer, held by the caller. An operation that cannot be done raises before it changes anything.
"""

from typing import Protocol, runtime_checkable

from torch import Tensor

from regard.cache.streams import Lengths, Part
from regard.span import Span


@runtime_checkable
class Cache(Protocol):
    """What a layer asks of a cache. What `update` returns is read-only until the next call.

    A cache may also have `snapshot()` and `restore(snapshot)`; then a layer whose call fails after
    its update leaves the cache as it was.
    """

    @property
    def length(self) -> int:
        """Tokens seen."""

    @property
    def nbytes(self) -> int:
        """Bytes stored for the tokens held."""

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
        """Nothing is held: only 0 tokens can remain.

        Raises:
            ValueError: if `length` is anything else.
        """
        Lengths().truncated(length)

    def reorder(self, rows: Tensor) -> None:
        """Nothing is held, and what is not kept cannot follow.

        Raises:
            ValueError: always.
        """
        raise ValueError("NO_CACHE holds nothing to reorder; give the layer cache=KVCache()")

    def __repr__(self) -> str:
        return "NO_CACHE"

    def __reduce__(self) -> str:
        return "NO_CACHE"

    def __copy__(self) -> "NoCache":
        return self

    def __deepcopy__(self, memo: object) -> "NoCache":
        return self


NO_CACHE = NoCache()
