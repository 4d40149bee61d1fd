"""What a cache holds, in words."""

from typing import Protocol, runtime_checkable

from torch import Tensor

from regard.cache.streams import Lengths
from regard.words import counted


@runtime_checkable
class Described(Protocol):
    """A cache that can be described: regard's own."""

    @property
    def length(self) -> int: ...

    @property
    def lengths(self) -> Lengths: ...

    @property
    def first(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def allocated_bytes(self) -> int: ...

    @property
    def empty_streams(self) -> tuple[Tensor, ...]: ...


def describe(cache: Described) -> str:
    """The kind of a cache, its rows and lengths, bytes, and the shapes and dtypes of its streams.

    Examples:
        >>> import torch
        >>> from regard import SlidingCache
        >>> from regard.cache.describing import describe
        >>> cache, k = SlidingCache(4), torch.zeros(2, 1, 10, 8)
        >>> _ = cache.update(k)
        >>> print(describe(cache))
        SlidingCache(4): 2 rows of 10 tokens, the last 3 held, 192 bytes held, 320 allocated
          streams [2, 1, 10, 8] float32
    """
    if not cache.empty_streams:
        return f"{cache!r}: no tokens"
    shortest = cache.lengths.shortest
    tokens = counted(cache.length, "token")
    if shortest != cache.length:
        tokens = f"{shortest:,} to {tokens}"
    held = cache.length - cache.first
    some = f", the last {held:,} held" if held != cache.length else ""
    streams = ", ".join(_described(each, cache.length) for each in cache.empty_streams)
    rows = counted(cache.empty_streams[0].shape[0], "row")
    return (
        f"{cache!r}: {rows} of {tokens}{some}, {cache.nbytes:,} bytes held, "
        f"{cache.allocated_bytes:,} allocated\n"
        f"  streams {streams}"
    )


def _described(outline: Tensor, length: int) -> str:
    batch, heads, _, width = outline.shape
    return f"{[batch, heads, length, width]} {str(outline.dtype).removeprefix('torch.')}"
