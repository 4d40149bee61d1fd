"""The tensors of a cache, called streams, `[B, G, tokens, W]`; how they are checked and extended.

Keys are one stream and values another; a latent cache has one joined stream. New tokens are
appended along dim 2. In a ragged batch the rows have different lengths.
"""

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from regard.span import Span
from regard.tracing import may_differentiate


class Lengths(NamedTuple):
    """The number of tokens in each batch row: `longest` in all, or the tensor `rows`, `[B]`."""

    longest: int = 0
    shortest: int = 0
    rows: Tensor | None = None

    def span(self, new: int, kv_start: int = 0) -> Span:
        stop = self.longest + new
        if self.rows is None:
            return Span(self.longest, stop, kv_start, stop)
        bounds, starts = (self.shortest, self.longest), self.rows.clone()
        return Span.ragged(starts, queries=new, kv_start=kv_start, kv_stop=stop, bounds=bounds)

    def grown(self, new: int) -> "Lengths":
        rows = None if self.rows is None else self.rows + new
        return Lengths(self.longest + new, self.shortest + new, rows)

    def truncated(self, length: int | Tensor, held: Sequence[Tensor] = ()) -> "Lengths":
        """These lengths, of the rows of `held`, cut to `length`.

        Raises:
            ValueError: if it is negative, more than is held, or not one number for each row.
        """
        if not isinstance(length, Tensor):
            check_whole("length", length)
            self._check_range(length, not 0 <= length <= self.longest)
            if self.rows is None or length <= self.shortest:
                return Lengths(length, length)
            return lengths_of(self.rows.clamp(max=length))
        if length.dim() != 1 or length.is_floating_point() or length.dtype == torch.bool:
            raise ValueError(
                f"length is a whole number or [B] whole numbers, got {length.dtype} of shape "
                f"{tuple(length.shape)}"
            )
        if held and len(length) != held[0].shape[0]:
            raise ValueError(
                f"length has one number for each of the {held[0].shape[0]} rows held, got "
                f"{length.tolist()}; truncate to a whole number to cut all rows alike"
            )
        most = self.longest if self.rows is None else self.rows.to(length.device)
        self._check_range(length.tolist(), bool(((length < 0) | (length > most)).any()))
        return lengths_of(length.to(torch.int64, copy=True))

    def _check_range(self, length: object, outside: bool) -> None:
        if outside:
            raise ValueError(
                f"length={length} is not in 0..{self.longest}, the tokens held; give truncate the "
                "number of tokens that remain"
            )

    def reordered(self, rows: Tensor) -> "Lengths":
        return self if self.rows is None else lengths_of(self.rows[rows.to(self.rows.device)])


def lengths_of(rows: Tensor) -> Lengths:
    """The lengths of rows, `[B]`; one number where they are equal."""
    low, high = (int(rows.min()), int(rows.max())) if rows.numel() else (0, 0)
    return Lengths(high, low) if low == high else Lengths(high, low, rows)


def check_whole(name: str, value: object, least: int | None = None) -> None:
    """Raise unless `value` is a whole number, `least` or more."""
    if not isinstance(value, (int, torch.SymInt)) or isinstance(value, bool):
        raise ValueError(f"{name} is a whole number, got {value!r}; give an int")
    if least is not None and value < least:
        raise ValueError(f"{name} is at least {least}, got {value}")


def check_streams(new: Sequence[Tensor], held: Sequence[Tensor]) -> int:
    """The number of new tokens. Raises if the streams do not fit each other or those held."""
    if not new:
        raise ValueError("update() takes at least one stream [B, G, L, W], got none")
    for index, each in enumerate(new):
        if not isinstance(each, Tensor) or each.dim() != 4:
            shape = tuple(each.shape) if isinstance(each, Tensor) else type(each).__name__
            raise ValueError(f"stream {index} is a tensor [B, G, L, W], got {shape}")
    batch, _, added, _ = new[0].shape
    for each in new[1:]:
        if each.shape[2] != added or each.shape[0] != batch:
            raise ValueError(
                f"the streams of one update have one batch size and one length, got "
                f"{tuple(new[0].shape)} and {tuple(each.shape)}"
            )
    if held and len(held) != len(new):
        raise ValueError(
            f"the cache holds {len(held)} streams, got {len(new)}; each layer needs its own cache"
        )
    for index, (each, present) in enumerate(zip(new, held, strict=False)):
        theirs, ours = each.shape, present.shape
        same = theirs[0] == ours[0] and theirs[1] == ours[1] and theirs[3] == ours[3]
        if not (same and each.dtype == present.dtype and each.device == present.device):
            _explain_stream(index, each, present)
    return added


def _explain_stream(index: int, new: Tensor, held: Tensor) -> None:
    """Raise for the first thing that does not fit."""
    if new.shape[0] != held.shape[0]:
        raise ValueError(
            f"stream {index} has a batch of {new.shape[0]}, the cache one of {held.shape[0]}; "
            "use a new cache, or cache.reorder(rows)"
        )
    if (new.shape[1], new.shape[3]) != (held.shape[1], held.shape[3]):
        raise ValueError(
            f"stream {index} has (heads, width) = {(new.shape[1], new.shape[3])}, the cache "
            f"{(held.shape[1], held.shape[3])}; each layer needs its own cache"
        )
    raise ValueError(
        f"stream {index} is {new.dtype} on {new.device}, the cache {held.dtype} on "
        f"{held.device}; use a new cache after moving a layer, and one autocast for all"
    )


def check_rows(rows: object, held: Sequence[Tensor]) -> None:
    """Raise unless `rows` are batch rows of the streams held."""
    if (
        not isinstance(rows, Tensor)
        or rows.dim() != 1
        or rows.dtype not in (torch.int32, torch.int64)
    ):
        got = f"{rows.dtype} {tuple(rows.shape)}" if isinstance(rows, Tensor) else rows
        raise ValueError(f"rows is [N] batch rows in int64 or int32, got {got}")
    batch = held[0].shape[0] if held else None
    if batch is None or not rows.numel() or rows.device.type != "cpu":
        return  # on a GPU, index_select refuses rows that are not there, without waiting
    if not 0 <= int(rows.min()) <= int(rows.max()) < batch:
        raise ValueError(
            f"rows={rows.tolist()} are not all in 0..{batch - 1}: {batch} rows are held"
        )


def needs_derivatives(new: Sequence[Tensor], held: Sequence[Tensor]) -> bool:
    """Whether autograd, forward-mode derivatives or `torch.func` may differentiate the streams."""
    return may_differentiate() or (torch.is_grad_enabled() and needs_gradients(new, held))


def needs_gradients(new: Sequence[Tensor], held: Sequence[Tensor]) -> bool:
    """Whether autograd records what is done with the streams."""
    return torch.is_grad_enabled() and requires_grad((*new, *held))


def requires_grad(streams: Sequence[Tensor]) -> bool:
    """Whether any of the streams requires a gradient."""
    return any(map(attrgetter("requires_grad"), streams))


def writable(make: Callable[[], Tensor]) -> Tensor:
    """The tensor that `make` returns, made outside of inference mode so that it can be written."""
    if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return make()
    return make()


def empty_like(stream: Tensor, capacity: int) -> Tensor:
    """A buffer for `capacity` tokens, of zeros: slots that are not written yet are finite."""
    shape = (*stream.shape[:2], capacity, stream.shape[3])
    return writable(lambda: stream.new_zeros(shape))


def with_room(streams: Sequence[Tensor], tokens: int, capacity: int) -> tuple[Tensor, ...]:
    """Buffers for `capacity` tokens that begin with the first `tokens` of the streams."""
    buffers = tuple(empty_like(each, capacity) for each in streams)
    write_tokens(buffers, [each.narrow(2, 0, tokens) for each in streams], Lengths())
    return buffers


def select_rows(held: Sequence[Tensor], rows: Tensor) -> tuple[Tensor, ...]:
    """These batch rows of all streams."""
    return tuple(writable(partial(x.index_select, 0, rows.to(x.device))) for x in held)


def write_tokens(buffers: Sequence[Tensor], new: Sequence[Tensor], lengths: Lengths) -> None:
    """Write the new tokens to the buffers, after the tokens of each row, without a gradient."""
    for buffer, each in zip(buffers, new, strict=True):
        source = each.detach() if each.requires_grad else each
        if lengths.rows is None:
            buffer.narrow(2, lengths.longest, each.shape[2]).copy_(source)
        else:
            rows, slots = _ragged_slots(lengths.rows, each)
            buffer[rows, :, slots] = source.transpose(1, 2)


def concatenated(
    held: Sequence[Tensor], new: Sequence[Tensor], lengths: Lengths
) -> tuple[Tensor, ...]:
    """The tokens held and the new tokens in new tensors, which autograd can differentiate."""
    if not held:
        return tuple(each.clone() for each in new)
    whole = []
    for buffer, each in zip(held, new, strict=True):
        present = buffer.narrow(2, 0, lengths.longest)
        if lengths.rows is None:
            whole.append(torch.cat([present, each], dim=2))
        else:
            rows, slots = _ragged_slots(lengths.rows, each)
            room = torch.cat([present, torch.zeros_like(each)], dim=2).transpose(1, 2)
            whole.append(room.index_put((rows, slots), each.transpose(1, 2)).transpose(1, 2))
    return tuple(whole)


def _ragged_slots(rows: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """Batch rows and slots, `[B, L]`, of the new tokens of a ragged batch."""
    steps = torch.arange(new.shape[2], device=new.device)
    slots = rows.to(new.device)[:, None] + steps
    return torch.arange(new.shape[0], device=new.device)[:, None].expand_as(slots), slots
