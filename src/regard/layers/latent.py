"""Multi-head latent attention (MLA), computed in one of two forms from the same cache."""

from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.cache import NO_CACHE, Cache
from regard.heads import merge_heads
from regard.layers.attending import Keys, attended, explain, weights
from regard.layers.cache_use import requiring_grad, restored_on_error
from regard.layers.construct import (
    biased_projections,
    build_gate,
    build_sinks,
    check_sizes,
    constructor_code,
    gated,
    records_arguments,
    reset_sinks,
)
from regard.layers.inputs import Arrival, arrive, check_rope, options_of, refuse_context
from regard.layers.latent_forms import FORMS, Form, choose_form, project_latent
from regard.layers.latent_kv import LatentKVAttention
from regard.layers.memory import Context
from regard.layers.query_scale import UNSCALED, QueryScale, check_query_scale
from regard.masks import EVERYTHING, Mask, Span
from regard.ops.attend import Precision
from regard.ops.bias import ScoreBias
from regard.ops.check import check_mask, check_options
from regard.rope import Rope

__all__ = ["LatentKVAttention", "MultiHeadLatentAttention"]

_USUAL = frozenset({"q_a_proj", "kv_a_proj_with_mqa", "o_proj"})  # have a bias with bias=True
_AFTER_QUERIES = frozenset({"kv_a_proj_with_mqa", "kv_b_proj", "o_proj"})


class MultiHeadLatentAttention(nn.Module):
    """Multi-head latent attention (MLA): low-rank keys and values, decoupled RoPE.

    DeepSeek-V2 (DeepSeek-AI 2024, arXiv:2405.04434) and V3. One latent and one rotary key serve all
    heads, and are all that is cached: `kv_lora_rank + qk_rope_head_dim` elements per token. They
    are read in one of two forms with the same result: *expanded* computes the keys and values of
    every head (less work for many queries), *absorbed* applies `kv_b_proj` to the queries and the
    outputs (less work for few). Parameters are named as Hugging Face names them: `q_a_proj
    q_a_layernorm q_b_proj` (or `q_proj`), `kv_a_proj_with_mqa kv_a_layernorm kv_b_proj o_proj`.

    Args:
        hidden_size: width of the input and the output.
        num_heads: query heads.
        kv_lora_rank: width of the latent.
        q_lora_rank: width of the queries' latent; None for plain `q_proj`.
        qk_nope_head_dim: channels of a head that are not rotated.
        qk_rope_head_dim: channels of a head that are rotated; their key is shared by all heads.
        v_head_dim: size of a value head.
        bias: which projections have biases: True for `q_a_proj`, `kv_a_proj_with_mqa` and `o_proj`
            (as DeepSeek has it), False for none, or their names. With one on `kv_b_proj` the layer
            is always expanded.
        latent_norm: whether the latents are RMS-normed.
        norm_eps: epsilon of those norms.
        rope: a `Rotary(qk_rope_head_dim)`, with `pairing="pairs"` for DeepSeek's checkpoints;
            `NO_ROPE` leaves those channels as they are (Kimi Linear).
        mask: the layer's pattern; intersected with the mask of each call.
        scale: of the scores; `(qk_nope_head_dim + qk_rope_head_dim) ** -0.5` times the rope's
            softmax factor if None.
        score_bias: a tensor or a rule added to the scores.
        query_scale: a factor of the queries by their positions, such as `PositionScale` (Mistral
            4).
        sinks: one learned score for each head, with a value of 0 (gpt-oss).
        gate: `"head"` or `"channel"`: `sigmoid(gate_proj(x))` times the output, before `o_proj`.
        dropout: probability of dropping a weight, in training only.
        form: `"expanded"`, `"absorbed"`, or `"auto"` for the one with less work.
        backend: `"auto"`, or the name of one.
        precision: `"strict"`, or `"fast"` for bfloat16 scores and weights; as for `attend`.

    Raises:
        ValueError: if a size is not positive, an option is not one of those above, or `rope`
            does not rotate `qk_rope_head_dim` channels.

    Examples:
        >>> import torch
        >>> from regard import Causal, KVCache, MultiHeadLatentAttention, Rotary
        >>> layer = MultiHeadLatentAttention(64, 4, kv_lora_rank=24, qk_nope_head_dim=16,
        ...     qk_rope_head_dim=8, v_head_dim=12, rope=Rotary(8, pairing="pairs"), mask=Causal())
        >>> cache = KVCache()
        >>> layer(torch.randn(1, 5, 64), cache=cache).shape
        torch.Size([1, 5, 64])
        >>> cache.nbytes == 5 * (24 + 8) * 4
        True
    """

    kind = "MLA"
    arguments: dict[str, Any]  # `type(layer)(**layer.arguments)` builds the same layer anew
    caches_positions, input_projection = False, "kv_a_proj_with_mqa"
    options, weights, explain = options_of, weights, explain
    gated, reset_parameters, __repr__ = gated, reset_sinks, constructor_code
    check_context = staticmethod(refuse_context)
    softcap: float | None = None  # MLA has none
    pieces: tuple[int, ...]

    @records_arguments
    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        kv_lora_rank: int,
        q_lora_rank: int | None = None,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        bias: bool | set[str] | frozenset[str] = False,
        latent_norm: bool = True,
        norm_eps: float = 1e-6,
        rope: Rope,
        mask: Mask | None = EVERYTHING,
        scale: float | None = None,
        score_bias: Tensor | ScoreBias | None = None,
        query_scale: QueryScale = UNSCALED,
        sinks: bool = False,
        gate: Literal["head", "channel"] | None = None,
        dropout: float = 0.0,
        form: Literal["auto", "expanded", "absorbed"] = "auto",
        backend: str = "auto",
        precision: Precision = "strict",
    ) -> None:
        super().__init__()
        check_sizes(hidden_size=hidden_size, num_heads=num_heads, v_head_dim=v_head_dim)
        check_sizes(kv_lora_rank=kv_lora_rank, q_lora_rank=q_lora_rank)
        check_sizes(qk_rope_head_dim=qk_rope_head_dim)
        check_sizes(0, qk_nope_head_dim=qk_nope_head_dim)
        check_rope(rope, (0, qk_rope_head_dim), f"qk_rope_head_dim={qk_rope_head_dim}")
        if form not in ("auto", *FORMS):
            raise ValueError(f"form is 'auto', 'expanded' or 'absorbed', got {form!r}")
        mask = EVERYTHING if mask is None else mask
        check_mask(mask)
        check_query_scale(query_scale)
        check_options(dropout=dropout, softcap=None, precision=precision, scale=scale)
        self.hidden_size, self.num_heads = hidden_size, num_heads
        self.kv_lora_rank, self.q_lora_rank = kv_lora_rank, q_lora_rank
        self.qk_nope_head_dim, self.qk_rope_head_dim = qk_nope_head_dim, qk_rope_head_dim
        self.qk_head_dim = qk_nope_head_dim + qk_rope_head_dim
        self.pieces, self.v_head_dim = (kv_lora_rank, qk_rope_head_dim), v_head_dim
        width = num_heads * self.qk_head_dim
        queries = {"q_proj"} if q_lora_rank is None else {"q_a_proj", "q_b_proj"}
        projections = _AFTER_QUERIES | queries
        biased = biased_projections(bias, projections, _USUAL, f"with q_lora_rank={q_lora_rank} ")

        def norm(size: int) -> nn.Module:
            return nn.RMSNorm(size, eps=norm_eps) if latent_norm else nn.Identity()

        def linear(name: str, size: int, out_size: int) -> nn.Module:
            return nn.Linear(size, out_size, bias=name in biased)

        if q_lora_rank is None:
            self.q_proj = linear("q_proj", hidden_size, width)
        else:
            self.q_a_proj = linear("q_a_proj", hidden_size, q_lora_rank)
            self.q_a_layernorm = norm(q_lora_rank)
            self.q_b_proj = linear("q_b_proj", q_lora_rank, width)
        self.kv_a_proj_with_mqa = linear("kv_a_proj_with_mqa", hidden_size, sum(self.pieces))
        self.kv_a_layernorm = norm(kv_lora_rank)
        rebuilt = num_heads * (qk_nope_head_dim + v_head_dim)
        self.kv_b_proj = linear("kv_b_proj", kv_lora_rank, rebuilt)
        self.o_proj = linear("o_proj", num_heads * v_head_dim, hidden_size)
        self.sinks: Tensor | None = build_sinks(sinks, num_heads)
        self.gate_proj = build_gate(gate, hidden_size, num_heads, num_heads * v_head_dim)
        self.rope, self.mask, self.dropout, self.query_scale = rope, mask, dropout, query_scale
        self.scale = self.qk_head_dim**-0.5 * rope.softmax_factor if scale is None else scale
        self.score_bias, self.form = score_bias, form
        self.backend, self.precision = backend, precision

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

        As `Attention.forward`; `context` is refused, since rotary keys have the positions of `x`.
        """
        at = arrive(self, x, context, mask, cache, positions)
        q_nope, q_rope, latent, k_rope = self.project(x)
        q_rope, k_rope = self.rope(q_rope, k_rope, at.positions)
        form = self.choose(at.span, at.cache)
        with restored_on_error(self, at.cache, at.mask):
            parts = at.cache.update(self.join(latent, k_rope))
            out = attended(self, form.queries(q_nope, q_rope), form.keys(parts, at), at)
            return self.o_proj(merge_heads(self.gated(x, form.output(out))))

    def queries_and_keys(self, x: Tensor, context: Context, at: Arrival) -> tuple[Tensor, Keys]:
        """Queries and keys of a call, for which the cache does not change."""
        q_nope, q_rope, latent, k_rope = self.project(x)
        q_rope, k_rope = self.rope(q_rope, k_rope, at.positions)
        form = self.choose(at.span, at.cache)
        keys = form.keys(at.cache.peek(self.join(latent, k_rope)), at)
        note = f"form     {form.name}: {form.why}\n"
        return form.queries(q_nope, q_rope), keys._replace(note=note)

    def project(self, x: Float[Tensor, "B L E"]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries in two pieces, latents and rotary keys, before rotation.

        Of every head, queries `[B, H, L, qk_nope_head_dim]` and `[B, H, L, qk_rope_head_dim]`; of
        all heads together, latents `[B, 1, L, kv_lora_rank]` and rotary keys `[B, 1, L,
        qk_rope_head_dim]`.
        """
        q_nope, q_rope, latent, k_rope = project_latent(self, x)
        others = q_nope, q_rope, self.kv_b_proj, self.sinks, self.score_bias
        latent, k_rope = requiring_grad(others, latent, k_rope)
        return q_nope, q_rope, latent, k_rope

    def join(self, latent: Tensor, k_rope: Tensor) -> Float[Tensor, "B 1 L RDr"]:
        """The stream that is cached: latents and rotary keys, concatenated."""
        return torch.cat([latent, k_rope], dim=-1)

    def choose(self, span: Span, cache: Cache = NO_CACHE) -> Form:
        """The form for these numbers of queries and keys, which says why.

        A subclass may choose by the cache, too.

        Raises:
            ValueError: if the form is `"absorbed"` and `kv_b_proj` is not a plain linear map.
        """
        return choose_form(self, span, self.form)
