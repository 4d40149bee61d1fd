"""The past of a layer: one verb, and no idea what it stores.

Keys and values, one joined latent, integer positions: anything that grows along dim 2. One cache a
layer, held by the caller. An operation that cannot be done raises before it changes anything.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from regard.span import Span

_FIRST_CAPACITY = 64


class Part(NamedTuple):
    """Keys `kv_start..kv_stop`, and whatever was stored for them, each `[B, G, kv_stop - kv_start, W]`."""

    kv_start: int
    kv_stop: int
    streams: tuple[Tensor, ...]


@runtime_checkable
class Cache(Protocol):
    """What a layer asks of a cache. What `update` returns is read-only, and valid until the next call."""

    @property
    def length(self) -> int:
        """Tokens seen."""

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
        Lengths().truncated(length)

    def reorder(self, rows: Tensor) -> None:
        """There is nothing to reorder."""

    def __repr__(self) -> str:
        return "NO_CACHE"

    def __reduce__(self) -> str:
        return "NO_CACHE"

    def __copy__(self) -> "NoCache":
        return self

    def __deepcopy__(self, memo: object) -> "NoCache":
        return self


NO_CACHE = NoCache()


class Lengths(NamedTuple):
    """How many tokens each row holds: `longest` everywhere, unless `rows` says otherwise."""

    longest: int = 0
    shortest: int = 0
    rows: Tensor | None = None

    def span(self, new: int, kv_start: int = 0) -> Span:
        stop = self.longest + new
        if self.rows is None:
            return Span(self.longest, stop, kv_start, stop)
        bounds = (self.shortest, self.longest)
        return Span.ragged(self.rows, queries=new, kv_start=kv_start, kv_stop=stop, bounds=bounds)

    def grown(self, new: int) -> "Lengths":
        rows = None if self.rows is None else self.rows + new
        return Lengths(self.longest + new, self.shortest + new, rows)

    def truncated(self, length: int | Tensor) -> "Lengths":
        """These lengths cut to `length`.

        Raises:
            ValueError: if it is negative or more than is held.
        """
        if not isinstance(length, Tensor):
            if not 0 <= length <= self.longest:
                raise ValueError(
                    f"length={length} is not among 0..{self.longest}, the tokens held; truncate "
                    "states what remains, not what goes"
                )
            if self.rows is None or length <= self.shortest:
                return Lengths(length, length)
            return _lengths_of(self.rows.clamp(max=length))
        if length.dim() != 1 or length.is_floating_point() or length.dtype == torch.bool:
            raise ValueError(
                f"length is a whole number or [B] whole numbers, got {length.dtype} of shape "
                f"{tuple(length.shape)}"
            )
        held = self.longest if self.rows is None else self.rows.to(length.device)
        if bool(((length < 0) | (length > held)).any()):
            raise ValueError(
                f"length={length.tolist()} is not among 0..{self.longest}, the tokens held; "
                "truncate states what remains, not what goes"
            )
        return _lengths_of(length.to(torch.int64, copy=True))

    def reordered(self, rows: Tensor) -> "Lengths":
        return self if self.rows is None else _lengths_of(self.rows[rows.to(self.rows.device)])


def _lengths_of(rows: Tensor) -> Lengths:
    low, high = (int(rows.min()), int(rows.max())) if rows.numel() else (0, 0)
    return Lengths(high, low) if low == high else Lengths(high, low, rows)


class KVCache:
    """Grows as needed, by doubling; by concatenation while gradients are wanted.

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
        return sum(_bytes_a_token(held) for held in self._held) * self.length

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
        if wants_grad(new, self._held):
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
        self._lengths = self._lengths.truncated(length)

    def reorder(self, rows: Tensor) -> None:
        check_rows(rows, self._held)
        self._held = tuple(held.index_select(0, rows.to(held.device)) for held in self._held)
        self._lengths = self._lengths.reordered(rows)

    def _part(self, held: tuple[Tensor, ...]) -> Part:
        return Part(0, self.length, tuple(each.narrow(2, 0, self.length) for each in held))

    def _reserve(self, new: tuple[Tensor, ...], total: int) -> tuple[Tensor, ...]:
        """Buffers for `total` tokens, holding what is held."""
        if self._held and self._held[0].shape[2] >= total and not wants_graph(self._held):
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


class StaticCache:
    """Fixed buffers for `max_length` tokens: nothing is allocated after the first update.

    For `torch.compile`. Takes no gradients.

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
        if max_length < 1:
            raise ValueError(f"max_length is at least 1, got {max_length}")
        self.max_length = max_length
        self._lengths = Lengths()
        self._held: tuple[Tensor, ...] = ()

    @property
    def length(self) -> int:
        return self._lengths.longest

    @property
    def nbytes(self) -> int:
        """Bytes stored for the tokens held."""
        return sum(_bytes_a_token(held) for held in self._held) * self.length

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
        self._lengths = self._lengths.truncated(length)

    def reorder(self, rows: Tensor) -> None:
        check_rows(rows, self._held)
        chosen = [held.index_select(0, rows.to(held.device)) for held in self._held]
        if self._held and len(rows) == self._held[0].shape[0]:
            for held, each in zip(self._held, chosen, strict=True):
                held.copy_(each)
        else:
            self._held = tuple(chosen)
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


def check_streams(new: Sequence[Tensor], held: Sequence[Tensor]) -> int:
    """How many tokens come, if the streams fit each other and those held."""
    if not new:
        raise ValueError("update() takes at least one stream [B, G, L, W], got none")
    for index, each in enumerate(new):
        if not isinstance(each, Tensor) or each.dim() != 4:
            shape = tuple(each.shape) if isinstance(each, Tensor) else type(each).__name__
            raise ValueError(f"stream {index} is a tensor [B, G, L, W], got {shape}")
        if each.shape[2] != new[0].shape[2] or each.shape[0] != new[0].shape[0]:
            raise ValueError(
                f"the streams of one update have one batch size and one length, got "
                f"{tuple(new[0].shape)} and {tuple(each.shape)}"
            )
    if held and len(held) != len(new):
        raise ValueError(
            f"the cache holds {len(held)} streams, got {len(new)}; one cache serves one layer"
        )
    for index, (each, past) in enumerate(zip(new, held, strict=False)):
        _check_stream(index, each, past)
    return new[0].shape[2]


def _check_stream(index: int, new: Tensor, held: Tensor) -> None:
    if new.shape[0] != held.shape[0]:
        raise ValueError(
            f"stream {index} has a batch of {new.shape[0]}, the cache one of {held.shape[0]}; "
            "use a new cache, or cache.reorder(rows)"
        )
    if (new.shape[1], new.shape[3]) != (held.shape[1], held.shape[3]):
        raise ValueError(
            f"stream {index} has (heads, width) = {(new.shape[1], new.shape[3])}, the cache "
            f"{(held.shape[1], held.shape[3])}; one cache serves one layer"
        )
    if new.dtype != held.dtype or new.device != held.device:
        raise ValueError(
            f"stream {index} is {new.dtype} on {new.device}, the cache {held.dtype} on "
            f"{held.device}; use a new cache after moving a layer"
        )


def check_rows(rows: object, held: Sequence[Tensor]) -> None:
    if (
        not isinstance(rows, Tensor)
        or rows.dim() != 1
        or rows.dtype not in (torch.int32, torch.int64)
    ):
        got = f"{rows.dtype} {tuple(rows.shape)}" if isinstance(rows, Tensor) else rows
        raise ValueError(f"rows is [N] batch rows in int64 or int32, got {got}")
    batch = held[0].shape[0] if held else None
    if batch is not None and rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < batch:
        raise ValueError(f"rows={rows.tolist()} are not all among the {batch} rows held")


def wants_grad(new: Sequence[Tensor], held: Sequence[Tensor]) -> bool:
    return torch.is_grad_enabled() and any(each.requires_grad for each in (*new, *held))


def wants_graph(held: Sequence[Tensor]) -> bool:
    """Whether these were made with gradients, so that nothing may be written into them."""
    return any(each.requires_grad for each in held)


def empty_like(stream: Tensor, capacity: int) -> Tensor:
    """A buffer of zeros: whatever is read before it is written is at least finite."""
    return stream.new_zeros((*stream.shape[:2], capacity, stream.shape[3]))


def write(buffers: Sequence[Tensor], new: Sequence[Tensor], lengths: Lengths) -> None:
    """Put the new tokens behind those that each row holds."""
    for buffer, each in zip(buffers, new, strict=True):
        if lengths.rows is None:
            buffer.narrow(2, lengths.longest, each.shape[2]).copy_(each.detach())
        else:
            rows, slots = _ragged_slots(lengths.rows, each)
            buffer[rows, :, slots] = each.detach().transpose(1, 2)


def appended(held: Sequence[Tensor], new: Sequence[Tensor], lengths: Lengths) -> tuple[Tensor, ...]:
    """Held and new tokens in new tensors, which gradients can follow."""
    if not held:
        return tuple(each.clone() for each in new)
    whole = []
    for past, each in zip(held, new, strict=True):
        past = past.narrow(2, 0, lengths.longest)
        if lengths.rows is None:
            whole.append(torch.cat([past, each], dim=2))
        else:
            rows, slots = _ragged_slots(lengths.rows, each)
            room = torch.cat([past, torch.zeros_like(each)], dim=2).transpose(1, 2)
            whole.append(room.index_put((rows, slots), each.transpose(1, 2)).transpose(1, 2))
    return tuple(whole)


def _ragged_slots(rows: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """Batch rows and slots, `[B, L]`, where the new tokens of a ragged batch go."""
    steps = torch.arange(new.shape[2], device=new.device)
    slots = rows.to(new.device)[:, None] + steps
    return torch.arange(new.shape[0], device=new.device)[:, None].expand_as(slots), slots


def _bytes_a_token(held: Tensor) -> int:
    return held.shape[0] * held.shape[1] * held.shape[3] * held.element_size()


from regard.quantized import QuantizedCache  # noqa: E402  (they are caches)
from regard.sliding import SlidingCache  # noqa: E402

__all__ = [
    "NO_CACHE",
    "Cache",
    "KVCache",
    "NoCache",
    "Part",
    "QuantizedCache",
    "SlidingCache",
    "StaticCache",
]
