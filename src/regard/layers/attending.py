"""Attention of a layer to the parts that its cache returned: described as they are, then run."""

from collections.abc import Iterable
from itertools import chain, islice
from typing import NamedTuple, Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from regard.cache import NO_CACHE, Cache, Part
from regard.layers.inputs import Arrival, Layer, arrive
from regard.layers.memory import Context, Memory
from regard.masks import EVERYTHING, Mask, Span
from regard.ops import explain as ops
from regard.ops.call import narrowed
from regard.ops.memo import Arguments, prepare_call
from regard.ops.parts import Make, rebuilt
from regard.ops.prepared import Prepared


class Keys(NamedTuple):
    """Keys and values as attention reads them.

    Attributes:
        first: the first part; the others have the same widths and heads.
        parts: all of them. They may be made while they are read, and then only once.
        v_head_dim: the width of values that are the first columns of a single stream.
        note: for `explain`: the form of the keys, and why the layer chose it.
    """

    first: Part
    parts: Iterable[Part]
    v_head_dim: int | None = None
    note: str = ""

    @classmethod
    def of(cls, parts: tuple[Part, ...], v_head_dim: int | None = None) -> "Keys":
        """The streams of a cache as they are stored."""
        return cls(parts[0], parts, v_head_dim)

    @classmethod
    def made(cls, parts: tuple[Part, ...], make: Make, mask: Mask, span: Span) -> "Keys":
        """Keys and values that `make` rebuilds from the parts that a cache returned; of pages, in
        pieces. Keys before the first or after the last visible one are not rebuilt."""
        if len(parts) == 1 and not parts[0].is_scattered and not parts[0].is_shared:
            return cls.of(make(parts))
        pieces = iter(rebuilt(narrowed(span, mask.within(span)), parts, make))
        first = next(pieces)
        return cls(first, chain((first,), pieces))

    @property
    def outlines(self) -> tuple[Tensor, Tensor]:
        """Tensors with the dtypes and the shapes of keys and values, of any number of tokens."""
        streams = self.first.streams
        k, *rest = streams if type(streams) is tuple else self.first.outlines
        if rest:
            return k, rest[0]
        k = k[:, :, :1]
        k = k if k.stride(-1) == 1 else k.contiguous()  # of codes: values lie among keys
        return k, k[..., : self.v_head_dim]


class Attending:
    """Base class of caches that compute the attention to their keys: to those on other ranks, or on
    selected pages."""

    def check_layer(self, layer: object) -> None:
        """Refuse a layer that the cache was not made for."""

    def prepare(self, layer: Layer, q: Tensor, keys: Keys, at: Arrival) -> Prepared:
        """The call over all keys of the cache, without sinks; `keys` are those of this process."""
        raise NotImplementedError

    def attend(
        self, prepared: Prepared, q: Tensor, parts: Iterable[Part], sinks: Tensor | None
    ) -> Tensor:
        """Attention to all keys, `[B, H, L, Dv]`."""
        raise NotImplementedError


def rebuild(parts: tuple[Part, ...], at: Arrival, make: Make) -> Keys:
    """Keys and values that are rebuilt from what a cache returned, as far as the call sees them."""
    if isinstance(at.cache, Attending):
        return Keys.of(make(parts))
    return Keys.made(parts, make, at.mask, at.span)


def describe(layer: Layer, q: Tensor, keys: Keys, at: Arrival) -> Prepared:
    """The call of a layer for queries `[B, H, L, D]`, and the backend chosen for it if the keys are
    tensors in one part. Raises a ValueError for all that `arrive` cannot check."""
    if isinstance(at.cache, Attending):
        return at.cache.prepare(layer, q, keys, at)
    streams = keys.first.streams
    k, v = streams if type(streams) is tuple and len(streams) == 2 else keys.outlines
    return prepare_call(Arguments(q, k, v, at.span, **layer.options(at)))


def attended(layer: Layer, q: Tensor, keys: Keys | tuple[Part, ...], at: Arrival) -> Tensor:
    """Attention of `q`, scaled by their positions, to the keys, `[B, H, L, Dv]`; arguments and
    errors of `describe`."""
    keys = keys if isinstance(keys, Keys) else Keys(keys[0], keys)
    q = layer.query_scale(q, at.positions)
    call = describe(layer, q, keys, at)
    if isinstance(at.cache, Attending):
        return at.cache.attend(call, q, keys.parts, layer.options(at)["sinks"])
    return call.run(q, keys.parts)


@runtime_checkable
class Readable(Layer, Protocol):
    """A layer whose queries and keys can be read without a change of the cache."""

    def queries_and_keys(self, x: Tensor, context: Context, at: Arrival) -> tuple[Tensor, Keys]:
        """Queries and keys of a call, for which the cache does not change."""


def weights(
    self: Readable,
    x: Float[Tensor, "B L E"],
    *,
    context: Float[Tensor, "B S C"] | Memory | None = None,
    mask: Mask | None = EVERYTHING,
    cache: Cache | None = NO_CACHE,
    positions: Int[Tensor, "*B L"] | None = None,
) -> Float[Tensor, "B H L S"]:
    """The attention weights of the same call; the cache does not change.

    Returns:
        `[B, H, L, S]` in the dtype of `x`, over the cached and the new keys; hidden ones are 0.

    Raises:
        TypeError, ValueError: as `forward`, and if the cache has not all keys.

    Examples:
        >>> import torch
        >>> from regard import Attention, Causal
        >>> layer = Attention(8, 2, mask=Causal())
        >>> layer.weights(torch.randn(1, 3, 8))[0, :, 0].tolist()
        [[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]
    """
    at = arrive(self, x, context, mask, cache, positions)
    if isinstance(at.cache, Attending):
        raise ValueError(
            f"weights() reads all keys, and {type(at.cache).__name__} does not have them all here; "
            "use KVCache() for it"
        )
    q, keys = self.queries_and_keys(x, context, at)
    q = self.query_scale(q, at.positions)
    return ops.weights_of(describe(self, q, keys, at), q, keys.parts)


def explain(
    self: Readable,
    x: Float[Tensor, "B L E"],
    *,
    context: Float[Tensor, "B S C"] | Memory | None = None,
    mask: Mask | None = EVERYTHING,
    cache: Cache | None = NO_CACHE,
    positions: Int[Tensor, "*B L"] | None = None,
) -> str:
    """Which backend the same call would run on, and why; the cache does not change.

    Of `MultiHeadLatentAttention`, the first line says which form, and why.

    Examples:
        >>> import torch
        >>> from regard import Attention, MultiHeadLatentAttention, Rotary
        >>> print(Attention(8, 2).explain(torch.randn(1, 3, 8)).splitlines()[0])
        3 queries x 3 keys, 2 heads on 2, head dim 4, float32, cpu
        >>> layer = MultiHeadLatentAttention(16, 2, kv_lora_rank=8, qk_nope_head_dim=4,
        ...     qk_rope_head_dim=4, v_head_dim=4, rope=Rotary(4), form="absorbed")
        >>> layer.explain(torch.randn(1, 1, 16)).splitlines()[0]
        'form     absorbed: asked for'
    """
    at = arrive(self, x, context, mask, cache, positions)
    q, keys = self.queries_and_keys(x, context, at)
    call = describe(self, q, keys, at)
    if not isinstance(at.cache, Attending):  # two parts tell how all are stored
        call = call.over(tuple(islice(keys.parts, 2)))
    return f"{keys.note}{ops.explain(call)}"
