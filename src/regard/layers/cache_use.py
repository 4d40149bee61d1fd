"""What layers check and record of the caches that they fill, and how a failed call is undone."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn

from regard.cache import NO_CACHE, Cache
from regard.cache.stored import Stored
from regard.masks import AllOf, AnyOf, Mask, Padding, Span
from regard.ops.check import check_window
from regard.tracing import in_backward, is_concrete, is_transformed


class _Use(NamedTuple):
    """What is recorded of a cache: the layer that fills it, and the padding of its first call."""

    cache: "ref[Cache]"
    layer: "ref[object]"
    padding: tuple[Padding, ...]


_NOTHING_TO_RESTORE = nullcontext()
_USES: dict[int, _Use] = {}  # by identity: user-defined caches may not be hashable


def _record(cache: Cache, layer: object, mask: Mask) -> None:
    number = id(cache)
    try:
        alive = ref(cache, lambda _: _USES.pop(number, None))
    except TypeError:  # a class with slots has no weak references; sharing is not detected
        return
    _USES[number] = _Use(alive, ref(layer), tuple(_paddings(mask)))


def check_use(layer: object, cache: Cache, mask: Mask, span: Span) -> None:
    """Refuse calls whose result would silently differ from that of one full forward.

    Raises:
        ValueError: if another layer fills the cache, if this is a recomputation in a backward
            pass, if the padding cannot be about the tokens that the cache holds, or if the mask
            shows more tokens than the window of the cache.
    """
    if torch.compiler.is_compiling():
        return
    if in_backward():
        raise ValueError(
            f"a layer with cache={type(cache).__name__} runs in a backward pass, as activation "
            "checkpointing recomputes it: its tokens would be appended twice; leave the cache out "
            "where activations are checkpointed"
        )
    if not cache.length:
        _USES.pop(id(cache), None)
        if isinstance(cache, Stored) and cache.window is not None:
            check_window(mask, cache.window)
        return
    use = _USES.get(id(cache))
    if use is None:
        return
    if use.layer() not in (layer, None):
        raise ValueError(
            f"cache={type(cache).__name__} holds {cache.length} tokens of another layer; one "
            "cache a layer: caches = [KVCache() for _ in layers] (a copy.deepcopy(cache) may go on "
            "in a layer with the same weights)"
        )
    if not mask.relative:  # a rule of distances has no padding
        for padding in _paddings(mask):
            _check_padding(padding, use.padding, span)


def restored_on_error(layer: object, cache: Cache, mask: Mask) -> AbstractContextManager[object]:
    """A block in which a layer updates its cache and attends: an error leaves the cache as before.

    A cache without `snapshot` and `restore` is truncated; if it refuses, a note on the error says
    that it may hold the new tokens.
    """
    if cache is NO_CACHE or torch.compiler.is_compiling():
        return _NOTHING_TO_RESTORE
    use = _USES.get(id(cache))
    known = use is not None and use.layer() is layer
    record = None if known else partial(_record, cache, layer, mask)
    try:
        snapshot, restore = attrgetter("snapshot", "restore")(cache)
    except AttributeError:
        return _RestoredOnError(cache, partial(cache.truncate, cache.length), record)
    return _RestoredOnError(cache, partial(restore, snapshot()), record)


@dataclass
class _RestoredOnError(AbstractContextManager[object]):
    """A block after which a cache is its layer's or, if an error leaves it, is restored."""

    cache: Cache
    restore: Callable[[], object]
    record: Callable[[], None] | None

    def __exit__(self, kind: object, error: BaseException | None, at: object) -> None:
        if error is None:
            return None if self.record is None else self.record()
        try:
            self.restore()
        except Exception as refusal:
            error.add_note(
                f"cache={type(self.cache).__name__} may hold the tokens of this call already "
                f"({type(refusal).__name__}: {refusal}); use a new one"
            )


def requiring_grad(others: Iterable[object], *streams: Tensor) -> tuple[Tensor, ...]:
    """The streams for the cache, one of which requires gradients if attention needs any.

    Backward reads what a cache returns, also if of all that attention reads only `others` have
    gradients: queries, sinks, a score bias (key and value projections may be frozen). A cache
    recognises that by its streams: it then does not write in place.
    """
    if not torch.is_grad_enabled() or any(each.requires_grad for each in streams):
        return streams
    if torch.compiler.is_compiling() or is_transformed():
        return streams  # requires_grad_ is not available there; caches append, or autograd raises
    if not any(map(_has_gradient, others)):
        return streams
    first, *rest = streams
    return first.view_as(first).requires_grad_(), *rest  # detach() would drop a forward tangent


def _has_gradient(value: object) -> bool:
    """Whether a tensor, or a parameter of a module, requires gradients."""
    if isinstance(value, nn.Module):
        return any(each.requires_grad for each in value.parameters())
    return isinstance(value, Tensor) and value.requires_grad


def _paddings(mask: Mask) -> Iterator[Padding]:
    if isinstance(mask, Padding):
        yield mask
    elif isinstance(mask, AllOf | AnyOf):
        for part in mask.parts:
            yield from _paddings(part)


def _check_padding(padding: Padding, first: tuple[Padding, ...], span: Span) -> None:
    """Refuse padding for the new tokens only, and padding of a prompt whose rows were truncated."""
    width, hides = padding.valid.shape[1], padding.hidden_stop
    if isinstance(span.q_start, Tensor):
        for each in first:
            _refuse(
                _begins_with(padding, each) & _hides_new_tokens(padding, span.q_start),
                f"{padding!r} hides slots that truncate([B]) has given to new tokens: rows were "
                "cut to their own lengths, so that no padding is left on the right; leave this "
                "mask out, or give one about the slots as they are now",
            )
    elif (
        hides
        and width == span.num_queries < span.kv_stop
        and not any(_begins_with(padding, each) for each in first)
    ):
        raise ValueError(
            f"{padding!r} is as wide as the {width} new tokens, but slots count from the first "
            f"token of the cache, which holds {span.first_query}; give [B, {span.kv_stop}] (of "
            "the first tokens alone: followed by ones)"
        )


def _begins_with(padding: Padding, other: Padding) -> bool | Tensor:
    """Whether the first slots of `padding` are those of `other`."""
    mine, its = padding.valid, other.valid
    if mine is its:
        return True
    if not (is_concrete(mine) and mine.device == its.device) or mine.shape[0] != its.shape[0]:
        return False
    if mine.shape[1] < its.shape[1]:
        return False
    return (mine[:, : its.shape[1]] == its).all()


def _hides_new_tokens(padding: Padding, lengths: Tensor) -> bool | Tensor:
    """Whether some row's next slot is hidden."""
    if not is_concrete(lengths):
        return False
    rows = torch.arange(len(lengths), device=lengths.device)
    return ~padding(rows, rows, lengths, lengths).all()


def _refuse(refused: bool | Tensor, message: str) -> None:
    """Raise if a condition holds. On a GPU it is checked asynchronously: no step waits for it."""
    if isinstance(refused, Tensor) and refused.device.type != "cpu":
        if not refused.is_meta:
            torch._assert_async(~refused, message)
    elif refused:
        raise ValueError(message)
