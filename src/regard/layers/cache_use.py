"""How a layer uses a cache: alone, outside of backward passes, and undone where a call fails."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn

from regard.cache import NO_CACHE, Cache
from regard.masks import AllOf, AnyOf, Mask, Padding, Span
from regard.tracing import holds_numbers, in_backward, is_transformed


class _Use(NamedTuple):
    """What is remembered of a cache: its layer, and the padding that its first call had."""

    cache: "ref[Cache]"
    layer: "ref[nn.Module]"
    padding: tuple[Padding, ...]


_USES: dict[int, _Use] = {}  # by identity: caches of other classes may have no hash


def _use_of(cache: Cache) -> _Use | None:
    use = _USES.get(id(cache))
    return use if use is not None and use.cache() is cache else None


def _remember(cache: Cache, layer: nn.Module, mask: Mask) -> None:
    number = id(cache)
    try:
        alive = ref(cache, lambda _: _USES.pop(number, None))
    except TypeError:  # a class with slots has no weak references: its caches are not told apart
        return
    _USES[number] = _Use(alive, ref(layer), tuple(_paddings(mask)))


def check_use(layer: nn.Module, cache: Cache, mask: Mask, span: Span) -> None:
    """Refuse calls whose result would silently differ from that of one full forward.

    Raises:
        ValueError: if another layer fills the cache, if this is a recomputation in a backward
            pass, if the mask shows what the cache does not hold, or if its padding cannot be about
            the tokens held.
    """
    if cache is NO_CACHE or torch.compiler.is_compiling():
        return
    if in_backward():
        raise ValueError(
            f"a layer with cache={type(cache).__name__} runs in a backward pass, as activation "
            "checkpointing recomputes it: its tokens would be appended twice; leave the cache out "
            "where activations are checkpointed"
        )
    use = _use_of(cache) if cache.length else None
    if use is None:
        return
    if use.layer() not in (layer, None):
        raise ValueError(
            f"cache={type(cache).__name__} holds {cache.length} tokens of another layer; one "
            "cache a layer: caches = [KVCache() for _ in layers] (a copy.deepcopy(cache) may go on "
            "in a layer with the same weights)"
        )
    for padding in _paddings(mask):
        _check_padding(padding, use.padding, span)


def used_by(layer: nn.Module, cache: Cache, mask: Mask) -> AbstractContextManager[object]:
    """The time in which `layer` updates `cache` and attends; an error leaves the cache as it was.

    Of a cache without `snapshot` and `restore`, the error says that it may have advanced.
    """
    if cache is NO_CACHE or torch.compiler.is_compiling():
        return nullcontext()
    use = _use_of(cache)
    if use is None or use.layer() is not layer or not cache.length:
        _remember(cache, layer, mask)
    return _Undone(cache)


class _Undone:
    """Restores a cache when an error leaves the block."""

    __slots__ = ("_before", "_cache")

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self._before = cache.snapshot() if hasattr(cache, "snapshot") else None

    def __enter__(self) -> None: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if error is None:
            return
        if self._before is not None:
            self._cache.restore(self._before)
        else:
            error.add_note(
                f"cache={type(self._cache).__name__} may hold the tokens of this call already: "
                "truncate it to its former length, or use a new one"
            )


def tracked(needs_grad: bool, *streams: Tensor) -> tuple[Tensor, ...]:
    """The streams as a cache must be given them.

    Where the call has gradients that its keys and values do not have themselves (frozen key and
    value projections, say), one of them is made to require gradients: the backward pass will read
    what the cache returns, so that a cache must not overwrite it in place.
    """
    if not needs_grad or any(each.requires_grad for each in streams):
        return streams
    if torch.compiler.is_compiling() or is_transformed():
        return streams  # these cannot hold it: caches append there, or autograd refuses
    first, *rest = streams
    return first.view_as(first).requires_grad_(), *rest  # detach() would drop a forward tangent


def trains(module: nn.Module) -> bool:
    """Whether a backward pass will want what this module reads now."""
    return torch.is_grad_enabled() and any(each.requires_grad for each in module.parameters())


def _paddings(mask: Mask) -> Iterator[Padding]:
    if isinstance(mask, Padding):
        yield mask
    elif isinstance(mask, AllOf | AnyOf):
        for part in mask.parts:
            yield from _paddings(part)


def _check_padding(padding: Padding, first: tuple[Padding, ...], span: Span) -> None:
    """Refuse padding of the new tokens alone, and a prompt's padding after its rows were cut."""
    width, hides = padding.valid.shape[1], padding.hidden_stop
    again = any(_begins_with(padding, each) for each in first)
    if isinstance(span.q_start, Tensor):
        if again and _hides_new_tokens(padding, span.q_start):
            raise ValueError(
                f"{padding!r} hides slots that truncate([B]) has given to new tokens: rows were "
                "cut to their own lengths, so that no padding is left on the right; leave this "
                "mask out, or give one about the slots as they are now"
            )
    elif hides and not again and width == span.num_queries < span.kv_stop:
        raise ValueError(
            f"{padding!r} is as wide as the {width} new tokens, but slots count from the first "
            f"token of the cache, which holds {span.first_query}; give [B, {span.kv_stop}] (of "
            "the first tokens alone: followed by ones)"
        )


def _begins_with(padding: Padding, other: Padding) -> bool:
    mine, its = padding.valid, other.valid
    if mine is its:
        return True
    if not (holds_numbers(mine) and mine.device == its.device) or mine.shape[0] != its.shape[0]:
        return False
    return mine.shape[1] >= its.shape[1] and torch.equal(mine[:, : its.shape[1]], its)


def _hides_new_tokens(padding: Padding, lengths: Tensor) -> bool:
    """Whether some row's next slot is hidden."""
    valid = padding.valid.to(lengths.device)
    if not holds_numbers(lengths) or valid.shape[1] == 0:
        return False
    inside = lengths < valid.shape[1]
    at = lengths.clamp(max=valid.shape[1] - 1)[:, None]
    next_valid = valid.expand(len(lengths), -1).gather(1, at).squeeze(1)
    return bool((inside & ~next_valid).any())
