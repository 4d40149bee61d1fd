"""The arguments of a layer's call, checked before anything is computed or cached."""

from operator import attrgetter
from typing import NamedTuple, NoReturn, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from regard.cache import NO_CACHE, Cache, NoCache
from regard.cache.stored import Stored
from regard.layers.cache_use import announce_pieces, check_use
from regard.layers.memory import Context, Memory
from regard.masks import EVERYTHING, Mask, Span
from regard.matrices import product_objection
from regard.ops.attend import Precision
from regard.ops.bias import ScoreBias
from regard.ops.check import check_decodable, check_mask, refuse_jit_trace
from regard.rope import Rope


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


class Options(NamedTuple):
    """The last arguments of a call of attention: settings of a layer, with the mask of the call."""

    mask: Mask
    scale: float
    score_bias: Tensor | ScoreBias | None
    softcap: float | None
    sinks: Tensor | None
    dropout: float
    backend: str
    precision: Precision


@runtime_checkable
class Layer(Protocol):
    """The attributes of a layer that its calls read.

    Attributes:
        pieces: the widths of the pieces of a joined stream; none of separate streams.
    """

    hidden_size: int
    mask: Mask
    scale: float
    score_bias: Tensor | ScoreBias | None
    softcap: float | None
    sinks: Tensor | None
    dropout: float
    training: bool
    backend: str
    precision: Precision
    pieces: tuple[int, ...]

    @property
    def first_projection(self) -> nn.Module:
        """The linear layer that reads `x`."""

    def check_context(self, x: Tensor, context: Context, cache: Cache) -> None:
        """Refuse another sequence that does not fit this layer or this call."""

    def check_positions(self, positions: Tensor | None, x: Tensor) -> None:
        """Refuse positions that do not fit this layer or this call."""

    def options(self, at: Arrival) -> Options:
        """The settings of the layer for a call."""


def options_of(layer: Layer, at: Arrival) -> Options:
    """The settings of a layer, as its method `options`: a subclass may have other ones."""
    return Options(
        at.mask,
        layer.scale,
        layer.score_bias,
        layer.softcap,
        layer.sinks,
        layer.dropout if layer.training else 0.0,
        layer.backend,
        layer.precision,
    )


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
    check_width("x", x, layer.hidden_size, layer.first_projection)
    check_cache(cache)
    if positions is not None:
        layer.check_positions(positions, x)
    layer.check_context(x, context, cache)
    length = x.shape[1]
    span = cache.span(length) if context is None else Span(0, length, 0, _length_of(context))
    if cache is not NO_CACHE:
        check_decodable(mask, span)
        check_use(layer, cache, mask, span)
        if layer.pieces:
            announce_pieces(cache, layer.pieces)
    places = span.positions(x.device) if positions is None else positions
    return Arrival(mask, span, places, cache)


def _length_of(context: "Tensor | Memory") -> int:
    return context.k.shape[2] if isinstance(context, Memory) else context.shape[1]


def check_width(name: str, x: object, width: int, projection: nn.Module) -> None:
    """Refuse inputs of another shape, or of another dtype or device than the weights."""
    if torch._C._get_tracing_state() is not None:  # sizes are then tensors
        refuse_jit_trace()
    if not isinstance(x, Tensor) or x.dim() != 3 or x.shape[2] != width:
        _refuse_width(name, x, width)
    if x.layout is not torch.strided:
        raise ValueError(f"{name} is a dense tensor, got {x.layout}; give {name}.to_dense()")
    if product_objection(projection) is not None:
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


def _refuse_width(name: str, x: object, width: int) -> NoReturn:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is a tensor [B, L, {width}], got {type(x).__name__}")
    if x.dim() != 3:
        raise ValueError(
            f"{name} is [B, L, {width}], got shape {tuple(x.shape)}; "
            "add or flatten axes so that there are three"
        )
    raise ValueError(
        f"{name} is {width} wide, got {x.shape[-1]} (shape {tuple(x.shape)}); "
        "is it the output of another layer, or transposed?"
    )


def _casts(device: str) -> bool:
    """Whether autocast is on, which casts inputs and weights to one dtype."""
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def check_cache(cache: object) -> None:
    """Refuse objects that lack the methods of a cache that layers call."""
    if isinstance(cache, (Stored, NoCache)):  # regard's own, in every call of a layer
        return
    if isinstance(cache, type):
        raise TypeError(
            f"cache is an object, got the class {cache.__name__}; make one for each layer: "
            f"cache={cache.__name__}(...)"
        )
    try:
        attrgetter("span", "update", "peek")(cache)
    except AttributeError:
        raise TypeError(
            f"cache is a Cache such as KVCache() or NO_CACHE, one for each layer, "
            f"got {type(cache).__name__}"
        ) from None


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
