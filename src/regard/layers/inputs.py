"""The arguments of a layer's call, checked before anything is computed or cached."""

from operator import attrgetter
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from regard.cache import NO_CACHE, Cache, NoCache
from regard.cache.stored import Stored
from regard.layers.cache_use import check_use
from regard.layers.memory import Context, Memory
from regard.layers.query_scale import QueryScale
from regard.masks import EVERYTHING, Mask, Span
from regard.matrices import product_objection
from regard.ops.attend import Precision
from regard.ops.bias import ScoreBias
from regard.ops.check import check_decodable, check_mask, refuse_jit_trace, refuse_layout
from regard.rope import Rope
from regard.tracing import is_autocast, is_concrete, is_transformed

_NARROW = (torch.int8, torch.int16, torch.int32, torch.uint8, torch.uint16)


class Arrival(NamedTuple):
    """The arguments of a call, checked.

    Attributes:
        mask: the layer's and the call's together.
        span: which queries meet which keys once the cache is filled.
        positions: rotary positions of the queries, `[L]` or `[B, L]`.
        cache: that of the call; `NO_CACHE` if it has none.
    """

    mask: Mask
    span: Span
    positions: Tensor
    cache: Cache = NO_CACHE


@runtime_checkable
class Layer(Protocol):
    """The attributes of a layer that its calls read.

    Attributes:
        pieces: the widths of the pieces of a joined stream; none of separate streams.
        caches_positions: whether the cache holds rotary positions, as int32.
        input_projection: the name of a linear layer that reads `x`.
    """

    hidden_size: int
    mask: Mask
    scale: float
    score_bias: Tensor | ScoreBias | None
    query_scale: QueryScale
    softcap: float | None
    sinks: Tensor | None
    dropout: float
    training: bool
    backend: str
    precision: Precision
    pieces: tuple[int, ...]
    caches_positions: bool
    input_projection: str

    def check_context(self, x: Tensor, context: Tensor | Memory, cache: Cache) -> None:
        """Refuse another sequence that does not fit this layer or this call."""

    def options(self, at: Arrival) -> dict[str, Any]:
        """The settings of the layer for a call, as `prepare` takes them."""


def options_of(layer: Layer, at: Arrival) -> dict[str, Any]:
    """The settings of a layer, as its method `options`: a subclass may have other ones."""
    return {
        "mask": at.mask,
        "scale": layer.scale,
        "score_bias": layer.score_bias,
        "softcap": layer.softcap,
        "sinks": layer.sinks,
        "dropout": layer.dropout if layer.training else 0.0,
        "backend": layer.backend,
        "precision": layer.precision,
    }


def arrive(
    layer: Layer,
    x: Tensor,
    context: Context,
    mask: Mask | None,
    cache: Cache | None,
    positions: Tensor | None,
) -> Arrival:
    """Check the arguments of `layer.forward`, and complete them: None is no mask, and no cache.

    Raises:
        TypeError, ValueError: as `Attention.forward`.
    """
    cache = NO_CACHE if cache is None else cache
    if mask is None or mask is EVERYTHING:
        mask = layer.mask
    else:
        check_mask(mask)
        mask = layer.mask & mask
    check_width("x", x, layer.hidden_size, getattr(layer, layer.input_projection))
    if not isinstance(cache, (Stored, NoCache)):
        check_cache(cache)
    if positions is not None:
        check_positions(positions, x)
        if layer.caches_positions:
            check_int32(positions)
    if context is None:
        span = cache.span(x.shape[1])
    else:
        layer.check_context(x, context, cache)
        keys = context.k.shape[2] if isinstance(context, Memory) else context.shape[1]
        span = Span(0, x.shape[1], 0, keys)
    if cache is not NO_CACHE:
        check_decodable(mask, span)
        check_use(layer, cache, mask, span)
        if layer.pieces and isinstance(cache, Stored):
            cache.pieces = layer.pieces  # of few bits, the first piece is rotated alone
    places = span.positions(x.device) if positions is None else positions
    return Arrival(mask, span, places, cache)


def check_width(name: str, x: object, width: int, projection: nn.Module) -> None:
    """Refuse inputs of another shape, or of another dtype or device than the weights."""
    if torch._C._get_tracing_state() is not None:  # sizes are then tensors
        refuse_jit_trace()
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is a tensor [B, L, {width}], got {type(x).__name__}")
    if x.is_nested or x.layout is not torch.strided:
        refuse_layout(name, x)
    if x.dim() != 3:
        raise ValueError(
            f"{name} is [B, L, {width}], got shape {tuple(x.shape)}; "
            "add or flatten axes so that there are three"
        )
    if x.shape[2] != width:
        raise ValueError(
            f"{name} is {width} wide, got {x.shape[2]} (shape {tuple(x.shape)}); "
            "is it the output of another layer, or transposed?"
        )
    weight = projection._parameters.get("weight")
    if weight is None or (weight.dtype == x.dtype and weight.device == x.device):
        return
    if product_objection(projection) is not None:
        return  # such a module may cast or move its inputs itself
    if weight.dtype != x.dtype and not is_autocast(x.device.type):
        raise ValueError(
            f"{name} is {x.dtype}, the layer's weights are {weight.dtype}; cast one with "
            ".to(dtype), or use torch.autocast"
        )
    if weight.device != x.device:
        raise ValueError(f"{name} is on {x.device}, the layer on {weight.device}; move one of them")


def check_cache(cache: object) -> None:
    """Refuse objects that lack the methods of a cache that layers call."""
    name = (cache if isinstance(cache, type) else type(cache)).__name__
    if isinstance(cache, type):
        raise TypeError(f"cache= got the class {name}; make one for each layer: {name}()")
    try:
        attrgetter("span", "update", "peek")(cache)
    except AttributeError:
        raise TypeError(
            f"cache is a Cache, one for each layer, got {name}; give KVCache()"
        ) from None


def check_positions(positions: object, x: Tensor) -> None:
    """Refuse rotary positions of another shape than `[L]`, `[1, L]` or `[B, L]`."""
    if not isinstance(positions, Tensor):
        raise TypeError(f"positions is a tensor [L] or [B, L], got {type(positions).__name__}")
    batch, length = x.shape[:2]
    *rows, tokens = positions.shape if positions.dim() in (1, 2) else (0, -1)
    if tokens != length or any(count not in (1, batch) for count in rows):
        raise ValueError(
            f"positions is [L] = [{length}] or [B, L] = [{batch}, {length}], "
            f"got shape {tuple(positions.shape)}; give those of the new tokens only"
        )


def check_int32(positions: Tensor | None) -> None:
    """Refuse positions that int32 does not hold: keys are rotated at the positions in the cache,
    and must be rotated as the queries are. On a GPU this is checked asynchronously.

    Raises:
        TypeError: unless they are integers.
        ValueError: if one does not fit.
    """
    if positions is None or positions.dtype in _NARROW:
        return
    if positions.dtype not in (torch.int64, torch.uint32):
        raise TypeError(
            "positions of a layer that caches them must be integers: keys are rotated at positions "
            f"read from the cache, which holds them in int32, got {positions.dtype}; use "
            "torch.arange(length), or Attention, which rotates keys before they are cached"
        )
    wide = positions.to(torch.int64)
    fit = (wide == wide.to(torch.int32)).all()
    if not is_concrete(positions) or positions.device.type != "cpu":
        if not (positions.is_meta or is_transformed()):
            torch._assert_async(fit, "positions of a layer that caches them fit int32")
    elif not bool(fit):
        raise ValueError(
            "positions of a layer that caches them fit int32, which the cache holds, got "
            f"{int(wide.min())} to {int(wide.max())}; scores depend on distances alone: subtract "
            "the same number from all"
        )


def refuse_context(x: Tensor, context: object, cache: Cache) -> None:
    """`check_context` of layers that rotate cached keys by the positions of x."""
    raise ValueError(
        "context is another sequence, whose keys do not share the positions of x, and this layer "
        "rotates its keys; use Attention(..., context_size=...) without a rope"
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
