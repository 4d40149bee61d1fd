"""The arguments of a layer's call, checked before anything is computed or cached."""

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from regard.cache import NO_CACHE, Cache, NoCache
from regard.cache.stored import Stored
from regard.layers.cache_use import attends_itself, check_use, sinks_of
from regard.layers.construct import local_objection
from regard.layers.memory import Memory
from regard.layers.steps import is_step
from regard.masks import Mask, Span
from regard.ops.attend import prepare
from regard.ops.check import check_decodable, check_mask, refuse_jit_trace
from regard.ops.prepared import Prepared
from regard.rope import Rope


class Arrival(NamedTuple):
    """The arguments of a call, checked.

    `mask` is the layer's and the call's together, `span` says which queries meet which keys once
    the cache is filled, and `positions` are the rotary positions of the queries: `[L]` or `[B, L]`.
    `step` says whether the next call may repeat this one. `sharded` is the cache if it attends
    itself: its tokens are spread over ranks.
    """

    mask: Mask
    span: Span
    positions: Tensor
    step: bool
    sharded: Any = None


def arrive(
    layer: Any,
    x: Tensor,
    context: "Tensor | Memory | None",
    mask: Mask,
    cache: Cache,
    positions: Tensor | None,
) -> Arrival:
    """Check the arguments of `layer.forward`, and complete them.

    `layer` has `hidden_size`, `mask`, `first_projection` (the linear layer that reads `x`) and
    `check_context`.

    Raises:
        TypeError, ValueError: as `Attention.forward`.
    """
    check_mask(mask)
    check_width("x", x, layer.hidden_size, layer.first_projection)
    check_cache(cache)
    check_positions(positions, x)
    layer.check_context(x, context, cache)
    both, length = layer.mask & mask, x.shape[1]
    span = cache.span(length) if context is None else Span(0, length, 0, _length_of(context))
    if cache is not NO_CACHE:
        check_decodable(both, span)
        check_use(layer, cache, mask, span)
    step = is_step(layer, x, cache, positions)
    places = span.positions(x.device) if positions is None else positions
    sharded = cache if attends_itself(cache) else None
    return Arrival(both, span, places, step, sharded)


def describe(layer: Any, q: Tensor, k: Tensor, v: Tensor, at: Arrival) -> Prepared:
    """The call of a layer and the backend chosen for it; raises for all that `arrive` cannot check.

    Of keys and values only the shapes are read: they are those of the new tokens.
    """
    mask, score_bias, sharded = at.mask, layer.score_bias, at.sharded
    split: HeadSplit | None = layer.head_split
    if sharded is not None:
        q, k, v = sharded.outlines(layer, q, k, v)
    if split is not None and (sharded is None or not sharded.all_heads):
        mask, score_bias = split.mask(mask), split.score_bias(score_bias)
    return prepare(
        q,
        k,
        v,
        mask=mask,
        span=at.span,
        scale=layer.scale,
        score_bias=score_bias,
        softcap=layer.softcap,
        sinks=None if sharded is not None else sinks_of(layer),
        dropout=layer.dropout if layer.training else 0.0,
        backend=layer.backend,
        precision=layer.precision,
        partial=sharded is not None,
        step=at.step,
    )


class HeadSplit(Protocol):
    """The heads of a layer that this rank computes, where they are split over several: of
    `regard.distributed.tensor_parallel`. The layer's sizes stay those of one device."""

    @property
    def local_heads(self) -> int:
        """Query heads of each rank."""

    @property
    def local_kv_heads(self) -> int:
        """Key/value heads of each rank."""

    def mask(self, mask: Mask) -> Mask:
        """The mask of this rank's heads."""

    def score_bias(self, bias: Any) -> Any:
        """The score bias of this rank's heads."""

    def sinks(self, layer: Any) -> Tensor | None:
        """The sinks of this rank's heads."""

    def shared(self, x: Tensor) -> Tensor:
        """A tensor that all ranks have, and read for their heads."""


def shared(layer: Any, x: Tensor) -> Tensor:
    """What the heads of a layer read: its gradient is the sum over the ranks that have them."""
    split: HeadSplit | None = layer.head_split
    return x if split is None else split.shared(x)


def local_kv_heads(layer: Any) -> int:
    """Key heads that a layer computes here: all, or those of this rank."""
    split: HeadSplit | None = layer.head_split
    heads: int = layer.num_kv_heads if split is None else split.local_kv_heads
    return heads


def _length_of(context: "Tensor | Memory") -> int:
    return context.k.shape[2] if isinstance(context, Memory) else context.shape[1]


def check_width(name: str, x: object, width: int, projection: nn.Module) -> None:
    """Refuse inputs of another shape, or of another dtype or device than the weights."""
    refuse_jit_trace()
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is a tensor [B, L, {width}], got {type(x).__name__}")
    if x.dim() != 3:
        raise ValueError(
            f"{name} is [B, L, {width}], got shape {tuple(x.shape)}; "
            "add or flatten axes so that there are three"
        )
    if x.layout != torch.strided:
        raise ValueError(f"{name} is a dense tensor, got {x.layout}; give {name}.to_dense()")
    if x.shape[-1] != width:
        raise ValueError(
            f"{name} is {width} wide, got {x.shape[-1]} (shape {tuple(x.shape)}); "
            "is it the output of another layer, or transposed?"
        )
    if local_objection(projection) is not None:
        return  # such a module may cast or move its inputs itself
    weight = projection.weight
    assert isinstance(weight, Tensor)
    if weight.dtype != x.dtype and not _casts(x.device.type):
        raise ValueError(
            f"{name} is {x.dtype}, the layer's weights are {weight.dtype}; cast one with "
            ".to(dtype), or use torch.autocast"
        )
    if weight.device != x.device:
        raise ValueError(f"{name} is on {x.device}, the layer on {weight.device}; move one of them")


def _casts(device: str) -> bool:
    """Whether autocast is on, which casts inputs and weights to one dtype."""
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def check_cache(cache: object) -> None:
    if isinstance(cache, (Stored, NoCache)):  # regard's own, in every call of a layer
        return
    if isinstance(cache, type):
        raise TypeError(
            f"cache is an object, got the class {cache.__name__}; make one for each layer: "
            f"cache={cache.__name__}(...)"
        )
    if not all(callable(getattr(cache, verb, None)) for verb in ("span", "update", "peek")):
        raise TypeError(
            f"cache is a Cache such as KVCache() or NO_CACHE, one for each layer, "
            f"got {type(cache).__name__}"
        )


def check_positions(positions: object, x: Tensor) -> None:
    """Refuse rotary positions of another shape than `[L]`, `[1, L]` or `[B, L]`."""
    if positions is None:
        return
    if not isinstance(positions, Tensor):
        raise TypeError(f"positions is a tensor [L] or [B, L], got {type(positions).__name__}")
    batch, length = x.shape[:2]
    if positions.dim() == 1 and positions.shape[0] == length:
        return
    if positions.dim() == 2 and positions.shape[0] in (1, batch) and positions.shape[1] == length:
        return
    raise ValueError(
        f"positions is [L] = [{length}] or [B, L] = [{batch}, {length}], "
        f"got shape {tuple(positions.shape)}; give those of the new tokens only"
    )


def refuse_context(x: Tensor, context: object, cache: Cache) -> None:
    """`check_context` of layers that rotate cached keys by the positions of x."""
    if context is not None:
        raise ValueError(
            "context is another sequence, whose keys do not share the positions of x, and this "
            "layer rotates its keys; use Attention(..., context_size=...) without a rope"
        )


def check_rope(rope: object, widths: tuple[int, ...] | range, what: str) -> None:
    """Refuse what is not a rope, and ropes that rotate another number of channels than `widths`,
    which `what` describes."""
    if not isinstance(rope, Rope):
        raise TypeError(
            "rope is Rotary(dim), NO_ROPE or an object with the methods of regard.rope.Rope, "
            f"got {rope!r}"
        )
    if rope.dim not in widths:
        raise ValueError(
            f"rope={rope} rotates {rope.dim} channels, {what}; give Rotary({max(widths)}, ...)"
        )
