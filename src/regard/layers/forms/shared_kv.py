"""Keys and values shared across layers: one layer computes them, later layers read them.

A layer's cache stays one layer's cache. `SharedCache` around it records the parts that it returned,
and the caches of later layers, `shared.follow()`, return those parts again.
"""

from typing import Any, Literal, NamedTuple

from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.cache import NO_CACHE, Cache, Part
from regard.cache.stored import Stored
from regard.heads import merge_heads
from regard.layers.attending import Attending, Keys, attended, explain, weights
from regard.layers.cache_use import restored_on_error
from regard.layers.construct import (
    Norm,
    Settings,
    build_gate,
    build_norm,
    build_sinks,
    constructor_code,
    gated,
    kind_of_heads,
    normed_heads,
    records_arguments,
    reset_sinks,
    set_heads,
    set_rules,
)
from regard.layers.inputs import Arrival, arrive, check_cache, options_of, refuse_context
from regard.layers.memory import Context
from regard.layers.query_scale import UNSCALED, QueryScale
from regard.masks import EVERYTHING, Mask, Span
from regard.ops.attend import Precision
from regard.rope import NO_ROPE, Rope


class _Update(NamedTuple):
    """An update of the shared cache: the length before it, its span, and the parts returned."""

    before: int
    span: Span
    parts: tuple[Part, ...]

    def __deepcopy__(self, memo: object) -> "_Update":
        """The same: its tensors are those of one call, and may be part of a graph of gradients."""
        return self


class SharedCache:
    """The cache of a layer whose keys and values later layers read, too.

    Give it to the layer that computes keys and values, and `follow()` of it to each later layer, a
    `SharedKVAttention`. The later layers read the parts that this call's update returned, so that a
    window cache shows them every key that their queries see.

    Args:
        cache: of the first layer; None for none, as in training.

    Raises:
        ValueError: if `cache` attends by itself, as an `EvictingCache` does: it does not return all
            keys.

    Examples:
        >>> import torch
        >>> from regard import Attention, Causal, KVCache, Rotary, SharedCache, SharedKVAttention
        >>> sizes = {"num_kv_heads": 2, "rope": Rotary(8), "mask": Causal()}
        >>> first, second = Attention(64, 8, **sizes), SharedKVAttention(64, 8, **sizes)
        >>> cache = SharedCache(KVCache())
        >>> caches = [cache, cache.follow()]
        >>> for x in torch.randn(1, 6, 64).split([4, 1, 1], dim=1):
        ...     for layer, each in zip([first, second], caches):
        ...         x = x + layer(x, cache=each)
        >>> [each.length for each in caches], [each.nbytes for each in caches]
        ([6, 6], [768, 0])
    """

    def __init__(self, cache: Cache | None = None) -> None:
        if cache is not None:
            check_cache(cache)
        if isinstance(cache, Attending):
            raise ValueError(
                f"later layers read the keys that a cache returns, and {type(cache).__name__} does "
                "not return all; use SharedCache(KVCache())"
            )
        self.cache: Cache = NO_CACHE if cache is None else cache
        self.last: _Update | None = None

    def follow(self) -> "FollowingCache":
        """The cache of a later layer, which stores nothing of its own; one for each layer."""
        return FollowingCache(self)

    @property
    def length(self) -> int:
        """The number of tokens so far."""
        return self.cache.length

    @property
    def nbytes(self) -> int:
        """Bytes stored for the tokens held."""
        return self.cache.nbytes

    def span(self, new: int) -> Span:
        """The slots of the queries and keys of a call with `new` more tokens."""
        return self.cache.span(new)

    def update(self, *new: Tensor) -> tuple[Part, ...]:
        """Append along dim 2; record the parts for the layers that follow, and return them."""
        before, span = self.cache.length, self.cache.span(new[0].shape[2])
        parts = self.cache.update(*new)
        self.last = _Update(before, span, parts)
        return parts

    def peek(self, *new: Tensor) -> tuple[Part, ...]:
        """The result of `update` with the same streams, without changing the cache."""
        return self.cache.peek(*new)

    def truncate(self, length: int | Tensor) -> None:
        """Keep the first `length` tokens; the layers that follow need no truncation."""
        self.cache.truncate(length)
        self.last = None

    def reorder(self, rows: Tensor) -> None:
        """Keep these batch rows, `[N]` integers, in this order."""
        self.cache.reorder(rows)
        self.last = None

    def snapshot(self) -> object:
        """The present state."""
        held = self.cache
        return self.last, held.snapshot() if isinstance(held, Stored) else held.length

    def restore(self, snapshot: object) -> None:
        """Undo the updates since `snapshot` was called; nothing else may have happened."""
        assert isinstance(snapshot, tuple)
        self.last, before = snapshot
        if isinstance(self.cache, Stored):
            self.cache.restore(before)
        else:
            self.cache.truncate(before)

    def __repr__(self) -> str:
        return f"SharedCache({self.cache!r})"


class FollowingCache:
    """The cache of a layer that reads another layer's keys and values: it stores none itself.

    Made by `SharedCache.follow`. `truncate` and `reorder` do nothing: they are operations on the
    shared cache.

    Args:
        shared: the cache of the layer that computes keys and values.
    """

    nbytes = 0

    def __init__(self, shared: SharedCache) -> None:
        self.shared = shared
        self._read: _Update | None = None  # the update that this layer has read

    @property
    def length(self) -> int:
        """The number of tokens that this layer has read; those of a call once it has read them."""
        last = self.shared.last
        return self.shared.length if last is None or last is self._read else last.before

    def span(self, new: int) -> Span:
        """The slots of the queries and keys of the call that the shared cache was updated in.

        Raises:
            ValueError: if the first layer was not called before, with as many tokens.
        """
        last = self._last()
        if last.span.num_queries != new:
            raise ValueError(
                f"this layer has {new} tokens and reads the keys of a layer that had "
                f"{last.span.num_queries} in its last call; give both the same tokens"
            )
        return last.span

    def update(self, *new: Tensor) -> tuple[Part, ...]:
        """Return the parts that the shared cache returned; there are no streams to append."""
        assert not new
        self._read = self._last()
        return self._read.parts

    def peek(self, *new: Tensor) -> tuple[Part, ...]:
        """The same, as if this layer had not been called."""
        return self._last().parts

    def truncate(self, length: int | Tensor) -> None:
        """Do nothing: the shared cache holds the tokens."""

    def reorder(self, rows: Tensor) -> None:
        """Do nothing: the shared cache holds the rows."""

    def snapshot(self) -> object:
        """The update that was read last."""
        return self._read

    def restore(self, snapshot: object) -> None:
        """Undo the reading since `snapshot` was called."""
        assert snapshot is None or isinstance(snapshot, _Update)
        self._read = snapshot

    def _last(self) -> _Update:
        last = self.shared.last
        if last is None or last is self._read:
            raise ValueError(
                "this layer reads the keys that another layer computes in the same call; call that "
                f"layer first, with cache={self.shared!r}"
            )
        return last

    def __repr__(self) -> str:
        return f"{self.shared!r}.follow()"


class SharedKVAttention(nn.Module, Settings):
    """Attention to the keys and values of an earlier layer: it has queries and an output alone.

    Cross-layer attention (Brandon et al. 2024, arXiv:2405.12981), YOCO (Sun et al. 2024,
    arXiv:2405.05254), and the last layers of Gemma 3n and Gemma 4. The keys come with the norm and
    the rotation of the layer that computed them; queries are rotated here, at the same positions.
    Parameters are `q_proj q_norm sinks gate_proj o_proj`.

    Args:
        hidden_size: width of the input and the output.
        num_heads: query heads.
        num_kv_heads: key/value heads of the earlier layer; as many as query heads if None.
        head_dim: size of a head; `hidden_size // num_heads` if None.
        bias: whether `q_proj` has a bias.
        out_bias: whether `o_proj` has one; as `bias` if None.
        dropout: probability of dropping a weight, in training only.
        qk_norm: the norm of queries, as for `Attention`.
        norm_eps: epsilon of that norm.
        rope: applied to queries; that of the earlier layer.
        mask: the layer's pattern; intersected with the mask of each call.
        scale: of the scores; `head_dim ** -0.5` times the rope's softmax factor if None.
        query_scale: a factor of the queries by their positions, such as `PositionScale`.
        softcap: `softcap * tanh(score / softcap)`, as in Gemma 2.
        sinks: one learned score for each head, with a value of 0 (gpt-oss).
        gate: `"head"` or `"channel"`, as for `Attention`.
        backend: `"auto"`, or the name of one.
        precision: `"strict"`, or `"fast"` for bfloat16 scores and weights; as for `attend`.

    Raises:
        ValueError: if sizes do not divide, or an option is not one of those above.

    Examples:
        >>> import torch
        >>> from regard import Attention, Causal, SharedCache, SharedKVAttention
        >>> first, second = Attention(8, 2, mask=Causal()), SharedKVAttention(8, 2, mask=Causal())
        >>> x, shared = torch.randn(1, 5, 8), SharedCache()  # without a cache, as in training
        >>> second(first(x, cache=shared), cache=shared.follow()).shape
        torch.Size([1, 5, 8])
        >>> sorted(dict(second.named_parameters()))
        ['o_proj.weight', 'q_proj.weight']
    """

    arguments: dict[str, Any]  # `type(layer)(**layer.arguments)` builds the same layer anew
    pieces: tuple[int, ...] = ()
    caches_positions, input_projection = False, "q_proj"
    options, weights, explain = options_of, weights, explain
    gated, reset_parameters, __repr__ = gated, reset_sinks, constructor_code
    check_context, kind = staticmethod(refuse_context), property(kind_of_heads)

    @records_arguments
    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = False,
        out_bias: bool | None = None,
        dropout: float = 0.0,
        qk_norm: Norm = None,
        norm_eps: float = 1e-6,
        rope: Rope = NO_ROPE,
        mask: Mask | None = EVERYTHING,
        scale: float | None = None,
        query_scale: QueryScale = UNSCALED,
        softcap: float | None = None,
        sinks: bool = False,
        gate: Literal["head", "channel"] | None = None,
        backend: str = "auto",
        precision: Precision = "strict",
    ) -> None:
        super().__init__()
        set_heads(self, hidden_size, num_heads, num_kv_heads, head_dim)
        set_rules(
            self, rope, mask, scale, dropout=dropout, softcap=softcap,
            query_scale=query_scale, backend=backend, precision=precision,
        )  # fmt: skip
        width = num_heads * self.head_dim
        self.q_proj = nn.Linear(hidden_size, width, bias=bias)
        self.o_proj = nn.Linear(width, hidden_size, bias=bias if out_bias is None else out_bias)
        self.norm_width = qk_norm == "width"
        self.q_norm = build_norm(qk_norm, self.head_dim, width, norm_eps)
        self.sinks: Tensor | None = build_sinks(sinks, num_heads)
        self.gate_proj = build_gate(gate, hidden_size, num_heads, width)

    def forward(
        self,
        x: Float[Tensor, "B L E"],
        *,
        context: None = None,
        mask: Mask | None = EVERYTHING,
        cache: Cache | None = NO_CACHE,
        positions: Int[Tensor, "*B L"] | None = None,
    ) -> Float[Tensor, "B L E"]:
        """Attention of `x` to the keys and values of the earlier layer.

        As `Attention.forward`; `cache` is `shared.follow()` of that layer's `SharedCache`.

        Raises:
            TypeError, ValueError: as `Attention.forward`, if `cache` follows no other, or if the
                earlier layer was not called before with the same tokens.
        """
        check_follows(cache)
        at = arrive(self, x, context, mask, cache, positions)
        q = self.rope.rotate(self.project(x), at.positions)
        with restored_on_error(self, at.cache, at.mask):
            parts = at.cache.update()
            out = attended(self, q, parts, at)
            return self.o_proj(merge_heads(self.gated(x, out)))

    def queries_and_keys(self, x: Tensor, context: Context, at: Arrival) -> tuple[Tensor, Keys]:
        """Queries and keys of a call, for which the cache does not change."""
        q = self.rope.rotate(self.project(x), at.positions)
        return q, Keys.of(at.cache.peek())

    def project(self, x: Float[Tensor, "B L E"]) -> Float[Tensor, "B H L D"]:
        """Queries, normed, before rotation."""
        return normed_heads(self.q_norm, self.q_proj(x), self.head_dim, width=self.norm_width)


def check_follows(cache: object) -> None:
    """Refuse caches that return no keys of another layer."""
    if not isinstance(cache, FollowingCache):
        raise TypeError(
            "a layer without keys of its own reads those of another one: give that layer "
            "cache=shared, where shared = SharedCache(KVCache()), and this one "
            f"cache=shared.follow(), got {type(cache).__name__}"
        )
