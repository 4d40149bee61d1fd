"""GQA over one joint latent: its keys are rebuilt, normed and rotated when they are read.

Values are rebuilt, too, or, for few queries, absorbed: attention sums the latents, and the outputs
are multiplied by the weights of the values. The keys cannot be absorbed, as they are rotated.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.cache import NO_CACHE, Cache, Part
from regard.cache.parts import AnyStream, streams_of
from regard.heads import group_heads, merge_heads, split_heads, ungroup_heads
from regard.layers.attending import Attending, Keys, attended, explain, rebuild, weights
from regard.layers.cache_use import requiring_grad, restored_on_error
from regard.layers.construct import (
    Norm,
    Settings,
    build_norm,
    check_sizes,
    constructor_code,
    normed_heads,
    records_arguments,
    set_heads,
    set_rules,
)
from regard.layers.inputs import Arrival, arrive, options_of, refuse_context
from regard.layers.latent_forms import absorption_objection
from regard.layers.memory import Context
from regard.masks import EVERYTHING, Mask
from regard.matrices import matrix_of, multiply
from regard.ops.attend import Precision
from regard.ops.bias import ScoreBias
from regard.ops.rebuilt_keys import RebuiltKeys, Tables
from regard.rope import NO_ROPE, Rope, Rotary
from regard.tracing import is_autocast, is_immediate

_WIDE = 2  # times as long: a weighted sum of latents, to a product of as many numbers


class LatentKVAttention(nn.Module, Settings):
    """Grouped-query attention over a joint latent of keys and values, with exact rotary embedding.

    Its cache is smaller, its steps are slower: keys are rebuilt when they are read (as in Palu,
    Chang et al. 2024, arXiv:2407.21118). `kv_b_proj(kv_a_proj(x))` are the keys of all
    `num_kv_heads`, then their values; keys are then normed (`qk_norm`) and rotated. The cache holds
    two streams: the latent, `kv_lora_rank` elements per token, and its position, one int32. With
    `kv_lora_rank >= 2 * num_kv_heads * head_dim` any GQA layer can be converted to this one
    exactly.

    Args:
        hidden_size: width of the input and the output.
        num_heads: query heads.
        num_kv_heads: key/value heads, a divisor of `num_heads`.
        head_dim: size of a head.
        kv_lora_rank: width of the latent.
        rope: applied to queries, and to keys after they are rebuilt.
        bias: whether `q_proj` and `kv_b_proj` have biases.
        out_bias: whether `o_proj` has one.
        dropout: probability of dropping a weight, in training only.
        qk_norm: norms of queries and of rebuilt keys, before rotation; as for `Attention`.
        norm_eps: epsilon of those norms.
        mask: the layer's pattern; intersected with the mask of each call.
        scale: of the scores; `head_dim ** -0.5` times the rope's softmax factor if None.
        score_bias: a tensor or a rule added to the scores.
        softcap: `softcap * tanh(score / softcap)`, as in Gemma 2.
        backend: `"auto"`, or the name of one.
        precision: `"strict"`, or `"fast"` for bfloat16 scores and weights; as for `attend`.

    Raises:
        ValueError: if sizes do not divide or are not positive.

    Examples:
        >>> import torch
        >>> from regard import Causal, KVCache, LatentKVAttention, Rotary
        >>> layer = LatentKVAttention(64, 8, num_kv_heads=2, head_dim=8, kv_lora_rank=16,
        ...     rope=Rotary(8), mask=Causal())
        >>> cache = KVCache()
        >>> layer(torch.randn(1, 5, 64), cache=cache).shape
        torch.Size([1, 5, 64])
        >>> cache.nbytes == 5 * (16 * 4 + 4)  # float32 latents and int32 positions
        True
    """

    kind = "LatentKV"
    arguments: dict[str, Any]  # `type(layer)(**layer.arguments)` builds the same layer anew
    pieces: tuple[int, ...] = ()  # latents and positions are separate streams
    caches_positions, input_projection = True, "q_proj"
    options, weights, explain = options_of, weights, explain
    __repr__, check_context = constructor_code, staticmethod(refuse_context)
    sinks: Tensor | None = None

    @records_arguments
    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        num_kv_heads: int,
        head_dim: int,
        kv_lora_rank: int,
        rope: Rope = NO_ROPE,
        bias: bool = False,
        out_bias: bool = False,
        dropout: float = 0.0,
        qk_norm: Norm = None,
        norm_eps: float = 1e-6,
        mask: Mask | None = EVERYTHING,
        scale: float | None = None,
        score_bias: Tensor | ScoreBias | None = None,
        softcap: float | None = None,
        backend: str = "auto",
        precision: Precision = "strict",
    ) -> None:
        super().__init__()
        set_heads(self, hidden_size, num_heads, num_kv_heads, head_dim)
        check_sizes(kv_lora_rank=kv_lora_rank)
        self.kv_lora_rank = kv_lora_rank
        set_rules(
            self, rope, mask, scale, dropout=dropout, softcap=softcap, score_bias=score_bias,
            backend=backend, precision=precision,
        )  # fmt: skip
        self.q_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=bias)
        self.kv_a_proj = nn.Linear(hidden_size, kv_lora_rank, bias=False)
        self.kv_b_proj = nn.Linear(kv_lora_rank, 2 * num_kv_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=out_bias)
        self.norm_width = qk_norm == "width"
        self.q_norm = build_norm(qk_norm, head_dim, num_heads * head_dim, norm_eps)
        self.k_norm = build_norm(qk_norm, head_dim, num_kv_heads * head_dim, norm_eps)

    def forward(
        self,
        x: Float[Tensor, "B L E"],
        *,
        context: None = None,
        mask: Mask | None = EVERYTHING,
        cache: Cache | None = NO_CACHE,
        positions: Int[Tensor, "*B L"] | None = None,
    ) -> Float[Tensor, "B L E"]:
        """Attention of `x` to itself and to what the cache holds.

        As `Attention.forward`, but positions are integers, since the cache holds them.

        Raises:
            TypeError: as `Attention.forward`, and if positions are not integers.
            ValueError: as `Attention.forward`, if there is a `context`, or if positions do not fit
                int32.
        """
        at = arrive(self, x, context, mask, cache, positions)
        q, latent = self.project(x)
        where = at.positions.to(torch.int32)  # as the cache holds them
        q = self.rope.rotate(q, where)
        with restored_on_error(self, at.cache, at.mask):
            parts = at.cache.update(latent, as_stream(where, x.shape[0]))
            form = self.choose(x.shape[1], at.cache)
            out = attended(self, q, rebuild(parts, at, form.rebuild), at)
            return self.o_proj(merge_heads(form.output(out)))

    def queries_and_keys(self, x: Tensor, context: Context, at: Arrival) -> tuple[Tensor, Keys]:
        """Queries and keys of a call, for which the cache does not change."""
        q, latent = self.project(x)
        where = at.positions.to(torch.int32)
        q = self.rope.rotate(q, where)
        parts = at.cache.peek(latent, as_stream(where, x.shape[0]))
        return q, rebuild(parts, at, self.choose(x.shape[1], at.cache).rebuild)

    def choose(self, queries: int, cache: object) -> "Form":
        """The form of the values that is less work for so many queries."""
        if isinstance(cache, Attending) or absorption_objection(self.kv_b_proj) is not None:
            return RebuiltValues(self)
        # kernels of a GPU take values as wide as keys; an exported program serves every length
        if not matrix_of(self.kv_b_proj).is_cpu or torch.compiler.is_exporting():
            return RebuiltValues(self)
        if is_autocast("cpu"):  # it casts the input of a product, and no latents that are values
            return RebuiltValues(self)
        wider = queries * self.num_heads * (self.kv_lora_rank - self.head_dim)
        saved = self.num_kv_heads * self.head_dim * self.kv_lora_rank
        return AbsorbedValues(self) if _WIDE * wider <= saved else RebuiltValues(self)

    def queries(self, x: Float[Tensor, "B L E"]) -> Float[Tensor, "B H L D"]:
        """Queries of every head, normed, before rotation."""
        return normed_heads(self.q_norm, self.q_proj(x), self.head_dim, width=self.norm_width)

    def project(
        self, x: Float[Tensor, "B L E"]
    ) -> tuple[Float[Tensor, "B H L D"], Float[Tensor, "B 1 L R"]]:
        """Queries, normed, before rotation; and the latents of keys and values."""
        q, latent = self.queries(x), self.kv_a_proj(x).unsqueeze(1)
        (latent,) = requiring_grad((q, self.kv_b_proj, self.k_norm, self.score_bias), latent)
        return q, latent


def as_stream(positions: Int[Tensor, "*B L"], batch: int) -> Int[Tensor, "B 1 L 1"]:
    """Positions as a stream for the cache."""
    return positions.expand(batch, positions.shape[-1])[:, None, :, None]


class RebuiltValues(NamedTuple):
    """Keys and values of every head, from one product with the latents."""

    layer: LatentKVAttention

    def rebuild(self, parts: tuple[Part, ...]) -> tuple[Part, ...]:
        """Keys, normed and rotated, and values, from the latents and positions of each part."""
        found = []
        for part in parts:
            latent, positions = part.streams
            k, v = self.layer.kv_b_proj(latent.squeeze(1)).chunk(2, dim=-1)
            streams = _keys(self.layer, k, positions), split_heads(v, self.layer.head_dim)
            found.append(part._replace(streams=streams))
        return tuple(found)

    def output(self, out: Tensor) -> Float[Tensor, "B H L D"]:
        """The outputs of the heads: the result of attention itself."""
        return out


class AbsorbedValues(NamedTuple):
    """Keys of every head; the latents, which all heads share, in place of values."""

    layer: LatentKVAttention

    def rebuild(self, parts: tuple[Part, ...]) -> tuple[Part, ...]:
        """Keys, normed and rotated, from the latents and positions of each part; the latents."""
        found, layer = [], self.layer
        for part in parts:
            latent, positions = part.streams
            values = latent.expand(-1, _num_kv_heads(layer), -1, -1)
            streams = streams_of((_read_keys(layer, latent, positions), values))
            found.append(part._replace(streams=streams))
        return tuple(found)

    def output(self, out: Float[Tensor, "B H L R"]) -> Float[Tensor, "B H L D"]:
        """The outputs of the heads, from sums of latents: the weights of the values are applied."""
        weights = _weights(self.layer)[1].unflatten(0, (-1, self.layer.head_dim))  # [G, D, R]
        rows = group_heads(out, len(weights)).transpose(0, 1)  # no weight is copied
        heads = multiply(rows.flatten(1, 3), weights.mT).unflatten(1, rows.shape[1:4])
        return ungroup_heads(heads.transpose(0, 1))


Form = RebuiltValues | AbsorbedValues


def _weights(layer: LatentKVAttention) -> tuple[Tensor, Tensor]:
    """`kv_b_proj` as the matrices of all keys and of all values, `[G D, R]`."""
    keys, values = matrix_of(layer.kv_b_proj).chunk(2)
    return keys, values


def _num_kv_heads(layer: LatentKVAttention) -> int:
    """The key heads that the weights make: of split ones, those of this rank."""
    return _weights(layer)[0].shape[0] // layer.head_dim


def _keys(layer: LatentKVAttention, k: Tensor, positions: Tensor) -> Float[Tensor, "B G S D"]:
    """Keys of every head, normed and rotated, of their projection `[B, S, G D]`."""
    k = normed_heads(layer.k_norm, k, layer.head_dim, width=layer.norm_width)
    return layer.rope.rotate(k, positions[:, 0, :, 0])


def _read_keys(layer: LatentKVAttention, latent: Tensor, positions: Tensor) -> AnyStream:
    """Keys of every head, `[B, G, S, D]`, that are computed when they are read; now, if they are
    normed, a program is traced, or the weights want gradients, which no backend asks of a stream.
    """
    weights = _weights(layer)[0]
    trained = torch.is_grad_enabled() and weights.requires_grad
    if layer.k_norm is not None or trained or not is_immediate(latent):
        return _keys(layer, multiply(latent.squeeze(1), weights.mT), positions)
    tables = tables_of(layer.rope, positions)
    count = len(weights) // layer.head_dim
    return RebuiltKeys(latent, positions, weights, count, layer.rope, tables)


def tables_of(rope: Rope, positions: Tensor) -> Tables | None:
    """The tables by which a kernel rotates keys at these positions; None where it cannot."""
    if rope is NO_ROPE:
        return (empty := torch.empty(1, 0, dtype=torch.float32, device="cpu")), empty
    if type(rope) is not Rotary or rope.pairing != "halves":
        return None
    return rope._table(positions)
