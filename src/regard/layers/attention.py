"""Self-attention, MHA, MQA, GQA and cross-attention: one layer.

    x -> project -> rotate -> cache -> mask -> attend -> output

They differ in `num_kv_heads`: `num_heads` for MHA, 1 for MQA, a divisor in between for GQA.
"""

from typing import Any, Literal

from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.cache import NO_CACHE, Cache
from regard.heads import merge_heads, split_heads
from regard.layers.attending import Keys, attended, explain, weights
from regard.layers.cache_use import requiring_grad, restored_on_error
from regard.layers.construct import (
    Norm,
    Settings,
    biased_projections,
    build_gate,
    build_norm,
    build_sinks,
    check_sizes,
    constructor_code,
    gated,
    kind_of_heads,
    normed_heads,
    records_arguments,
    reset_sinks,
    set_heads,
    set_rules,
)
from regard.layers.inputs import Arrival, arrive, check_width, options_of
from regard.layers.memory import Context, Memory, check_own, recorded_for
from regard.layers.query_scale import UNSCALED, QueryScale
from regard.masks import EVERYTHING, Mask
from regard.ops.attend import Precision
from regard.ops.bias import ScoreBias
from regard.rope import NO_ROPE, Rope

_PROJECTIONS = frozenset({"q_proj", "k_proj", "v_proj", "o_proj"})


class Attention(nn.Module, Settings):
    """Softmax attention over heads that may share keys and values.

    MHA: Vaswani et al. 2017, arXiv:1706.03762. MQA: Shazeer 2019, arXiv:1911.02150. GQA: Ainslie et
    al. 2023, arXiv:2305.13245. Parameters are named as Hugging Face names them: `q_proj k_proj
    v_proj o_proj q_norm k_norm sinks gate_proj`.

    Args:
        hidden_size: width of the input and the output.
        num_heads: query heads.
        num_kv_heads: key/value heads, a divisor of `num_heads`; all of them if None. For a group
            size, give `num_heads // group_size`.
        head_dim: size of a head; `hidden_size // num_heads` if None.
        bias: whether the projections have biases: True, False, or the set of those that do, out of
            `{"q_proj", "k_proj", "v_proj", "o_proj"}`.
        out_bias: whether `o_proj` has a bias; decided by `bias` if None.
        dropout: probability of dropping a weight, in training only.
        qk_norm: `"head"` (RMSNorm of each head), `"width"` (of all heads at once) or a function
            from a size to a module, used for each head. Comes before rotation, as in Qwen3.
        norm_eps: epsilon of those norms.
        rope: a `Rotary`, `NO_ROPE`, or an object with the methods of `regard.rope.Rope`.
        mask: the layer's pattern, such as `Causal()`; intersected with the mask of each call.
        scale: of the scores; `head_dim ** -0.5` times the rope's softmax factor if None.
        score_bias: a tensor or a rule (`Alibi`, `RelativeBias`) added to the scores.
        query_scale: a factor of the queries by their positions, such as `PositionScale`.
        softcap: `softcap * tanh(score / softcap)`, as in Gemma 2.
        sinks: one learned score for each head, with a value of 0 (gpt-oss).
        gate: `"head"` or `"channel"`: `sigmoid(gate_proj(x))` times the output, before `o_proj`.
        context_size: width of `context`; `hidden_size` if None.
        backend: `"auto"`, or the name of one.
        precision: `"strict"`, or `"fast"` for bfloat16 scores and weights; as for `attend`.

    Raises:
        ValueError: if sizes do not divide, or an option is not one of those above.

    Examples:
        >>> import torch
        >>> from regard import Attention, Causal, KVCache, Rotary
        >>> layer = Attention(64, 8, num_kv_heads=2, rope=Rotary(8), mask=Causal())
        >>> cache = KVCache()
        >>> layer(torch.randn(1, 5, 64), cache=cache).shape, cache.length
        (torch.Size([1, 5, 64]), 5)
    """

    arguments: dict[str, Any]  # `type(layer)(**layer.arguments)` builds the same layer anew
    pieces: tuple[int, ...] = ()  # keys and values are separate streams
    caches_positions, input_projection = False, "q_proj"
    options, weights, explain = options_of, weights, explain
    gated, reset_parameters, __repr__ = gated, reset_sinks, constructor_code

    @property
    def kind(self) -> str:
        """`"MHA"`, `"GQA"` or `"MQA"`."""
        return kind_of_heads(self)

    @records_arguments
    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool | set[str] | frozenset[str] = False,
        out_bias: bool | None = None,
        dropout: float = 0.0,
        qk_norm: Norm = None,
        norm_eps: float = 1e-6,
        rope: Rope = NO_ROPE,
        mask: Mask | None = EVERYTHING,
        scale: float | None = None,
        score_bias: Tensor | ScoreBias | None = None,
        query_scale: QueryScale = UNSCALED,
        softcap: float | None = None,
        sinks: bool = False,
        gate: Literal["head", "channel"] | None = None,
        context_size: int | None = None,
        backend: str = "auto",
        precision: Precision = "strict",
    ) -> None:
        super().__init__()
        set_heads(self, hidden_size, num_heads, num_kv_heads, head_dim)
        check_sizes(context_size=context_size)
        self.context_size = hidden_size if context_size is None else context_size
        set_rules(
            self, rope, mask, scale, dropout=dropout, softcap=softcap, score_bias=score_bias,
            query_scale=query_scale, backend=backend, precision=precision,
        )  # fmt: skip
        biased = biased_projections(bias, _PROJECTIONS, usual=_PROJECTIONS)
        out_bias = "o_proj" in biased if out_bias is None else out_bias
        width, kv_width = num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(hidden_size, width, bias="q_proj" in biased)
        self.k_proj = nn.Linear(self.context_size, kv_width, bias="k_proj" in biased)
        self.v_proj = nn.Linear(self.context_size, kv_width, bias="v_proj" in biased)
        self.o_proj: nn.Module = nn.Linear(width, hidden_size, bias=out_bias)
        self.norm_width = qk_norm == "width"
        self.q_norm = build_norm(qk_norm, self.head_dim, width, norm_eps)
        self.k_norm = build_norm(qk_norm, self.head_dim, kv_width, norm_eps)
        self.sinks: Tensor | None = build_sinks(sinks, num_heads)
        self.gate_proj = build_gate(gate, hidden_size, num_heads, width)

    def forward(
        self,
        x: Float[Tensor, "B L E"],
        *,
        context: "Float[Tensor, 'B S C'] | Memory | None" = None,
        mask: Mask | None = EVERYTHING,
        cache: Cache | None = NO_CACHE,
        positions: Int[Tensor, "*B L"] | None = None,
    ) -> Float[Tensor, "B L O"]:
        """Attention of `x` to itself, to what the cache holds, or to `context`.

        Args:
            x: `[B, L, hidden_size]`.
            context: another sequence to read, `[B, S, context_size]`, or what `remember` made.
            mask: about this batch (padding, documents); intersected with the layer's own. With
                `context`, it is about the keys of the context.
            cache: keys and values of earlier tokens; L tokens are appended. One for each layer.
            positions: rotary positions, `[L]` or `[B, L]`; the next ones after the cache if None.

        Raises:
            TypeError: if `mask` is a tensor or `cache` is not a cache.
            ValueError: if shapes do not fit, if the mask shows keys that the cache does not hold,
                or if `context` is given with a cache or a rope. The cache is then unchanged.
        """
        at = arrive(self, x, context, mask, cache, positions)
        q, k, v = self.project(x, context)  # [B, H, L, D], [B, G, S, D], [B, G, S, D]
        q, k = self.rope(q, k, at.positions)
        with restored_on_error(self, at.cache, at.mask):
            parts = at.cache.update(k, v)
            out = attended(self, q, parts, at)
            return self.o_proj(merge_heads(self.gated(x, out)))

    def queries_and_keys(self, x: Tensor, context: Context, at: Arrival) -> tuple[Tensor, Keys]:
        """Queries and keys of a call, for which the cache does not change."""
        q, k, v = self.project(x, context)
        q, k = self.rope(q, k, at.positions)
        return q, Keys.of(at.cache.peek(k, v))

    def remember(self, context: Float[Tensor, "B S C"]) -> Memory:
        """Project another sequence's keys and values once, to be read as `context=` at every step.

        Args:
            context: `[B, S, context_size]`, such as the output of an encoder.

        Raises:
            ValueError: if the layer has a rope, whose positions a context does not share.
        """
        self._refuse_rope()
        check_width("context", context, self.context_size, self.k_proj)
        k = normed_heads(self.k_norm, self.k_proj(context), self.head_dim, width=self.norm_width)
        return recorded_for(self, Memory(k, split_heads(self.v_proj(context), self.head_dim)))

    def project(
        self, x: Float[Tensor, "B L E"], context: "Float[Tensor, 'B S C'] | Memory | None" = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries `[B, H, L, D]`, keys and values `[B, G, S, D]`, normed, before rotation."""
        q = normed_heads(self.q_norm, self.q_proj(x), self.head_dim, width=self.norm_width)
        if isinstance(context, Memory):
            return q, context.k, context.v
        if context is None and self.context_size != self.hidden_size:
            raise ValueError(f"context is missing; give context=[B, S, {self.context_size}]")
        source = x if context is None else context
        k = normed_heads(self.k_norm, self.k_proj(source), self.head_dim, width=self.norm_width)
        v = split_heads(self.v_proj(source), self.head_dim)
        k, v = requiring_grad((q, self.sinks, self.score_bias), k, v)
        return q, k, v

    @property
    def memory_heads(self) -> int:
        """Key heads of the memory that `remember` makes."""
        return self.num_kv_heads

    def check_context(self, x: Tensor, context: Tensor | Memory, cache: Cache) -> None:
        """Refuse another sequence that does not fit this layer or this call."""
        self._refuse_rope()
        if cache is not NO_CACHE:
            raise ValueError(
                "context= and cache= do not go together: a context is whole from the start; "
                "project it once with memory = layer.remember(context)"
            )
        if isinstance(context, Memory):
            check_own(self, context, (self.memory_heads, self.head_dim))
        else:
            check_width("context", context, self.context_size, self.k_proj)
        rows = context.k.shape[0] if isinstance(context, Memory) else context.shape[0]
        if rows != x.shape[0]:
            raise ValueError(
                f"context has a batch of {rows}, x of {x.shape[0]}; expand one of them, or "
                "memory.reorder(rows)"
            )

    def _refuse_rope(self) -> None:
        if self.rope is not NO_ROPE and self.rope.dim:
            raise ValueError(
                f"context does not share the positions of x, so rope={self.rope} has no meaning "
                "for it; build the layer with rope=NO_ROPE"
            )


class SelfAttention(Attention):
    """Self-attention with one head and no output projection, as textbooks introduce it.

    `softmax(q k^T / sqrt(head_dim)) v` for q, k, v = three projections of x (Vaswani et al. 2017,
    arXiv:1706.03762, section 3.2.1). The output is `[B, L, head_dim]`.

    Args:
        hidden_size: width of the input.
        **options: keyword arguments of `Attention`; `head_dim` is `hidden_size` by default.

    Examples:
        >>> import torch
        >>> from regard import Causal, SelfAttention
        >>> SelfAttention(16, mask=Causal())(torch.randn(2, 5, 16)).shape
        torch.Size([2, 5, 16])
    """

    @records_arguments
    def __init__(self, hidden_size: int, **options: Any) -> None:
        super().__init__(hidden_size, 1, num_kv_heads=1, **options)
        self.o_proj = nn.Identity()


class MultiHeadAttention(Attention):
    """Multi-head attention: every query head has a key head and a value head of its own.

    Vaswani et al. 2017, arXiv:1706.03762.

    Args:
        hidden_size: width of the input and the output.
        num_heads: heads.
        **options: keyword arguments of `Attention`.

    Examples:
        >>> import torch
        >>> from regard import MultiHeadAttention
        >>> layer = MultiHeadAttention(64, 8)
        >>> layer(torch.randn(2, 5, 64)).shape, layer.kind
        (torch.Size([2, 5, 64]), 'MHA')
    """

    @records_arguments
    def __init__(self, hidden_size: int, num_heads: int, **options: Any) -> None:
        super().__init__(hidden_size, num_heads, num_kv_heads=num_heads, **options)


class MultiQueryAttention(Attention):
    """Multi-query attention: all query heads share one key head and one value head.

    Shazeer 2019, arXiv:1911.02150. The cache is `1 / num_heads` of that of multi-head attention.

    Args:
        hidden_size: width of the input and the output.
        num_heads: query heads.
        **options: keyword arguments of `Attention`.

    Examples:
        >>> from regard import MultiQueryAttention
        >>> layer = MultiQueryAttention(64, 8)
        >>> layer.kind, layer.k_proj.out_features
        ('MQA', 8)
    """

    @records_arguments
    def __init__(self, hidden_size: int, num_heads: int, **options: Any) -> None:
        super().__init__(hidden_size, num_heads, num_kv_heads=1, **options)


class GroupedQueryAttention(Attention):
    """Grouped-query attention: each group of query heads shares a key head and a value head.

    Ainslie et al. 2023, arXiv:2305.13245. A group has `num_heads // num_kv_heads` query heads.

    Args:
        hidden_size: width of the input and the output.
        num_heads: query heads.
        num_kv_heads: key/value heads, a divisor of `num_heads`.
        **options: keyword arguments of `Attention`.

    Examples:
        >>> from regard import GroupedQueryAttention
        >>> layer = GroupedQueryAttention(64, 8, 2)
        >>> layer.kind, layer.k_proj.out_features
        ('GQA', 16)
    """

    @records_arguments
    def __init__(self, hidden_size: int, num_heads: int, num_kv_heads: int, **options: Any) -> None:
        super().__init__(hidden_size, num_heads, num_kv_heads=num_kv_heads, **options)
