"""Multi-head latent attention. Absorbed, it is MQA with one wide key head whose values are a prefix
of its keys; expanded, it is MHA. What is cached is the same: one latent and one rotary key a token.
"""

import inspect
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.attend import prepare
from regard.bias import ScoreBias
from regard.cache import NO_CACHE, Cache, Part
from regard.call import Call
from regard.check import check_decodable, check_mask, check_options
from regard.construct import constructor_code, normed
from regard.explain import explain, weights_of
from regard.heads import merge_heads, split_heads
from regard.inputs import check_cache, check_positions, check_width, refuse_context
from regard.latent_kv import LatentKVAttention
from regard.masks import EVERYTHING, Mask, Span
from regard.rope import NoRotary, Rotary

__all__ = ["LatentKVAttention", "MultiHeadLatentAttention"]


class MultiHeadLatentAttention(nn.Module):
    """MLA of DeepSeek-V2 (arXiv:2405.04434) and V3: low-rank keys and values, decoupled RoPE.

    One latent and one rotary key serve all heads, and are all that is cached: `kv_lora_rank +
    qk_rope_head_dim` numbers a token. They are read in one of two forms with the same result:
    *expanded* rebuilds every head's keys and values (cheaper for many queries), *absorbed* moves
    `kv_b_proj` into the queries and the output (cheaper for few). Parameters are named as Hugging
    Face names them: `q_a_proj q_a_layernorm q_b_proj` (or `q_proj`), `kv_a_proj_with_mqa
    kv_a_layernorm kv_b_proj o_proj`.

    Args:
        hidden_size: width of the input and the output.
        num_heads: query heads.
        kv_lora_rank: width of the latent.
        q_lora_rank: width of the queries' latent; None for plain `q_proj`.
        qk_nope_head_dim: channels of a head that do not rotate.
        qk_rope_head_dim: channels of a head that rotate; their key is shared by all heads.
        v_head_dim: size of a value head.
        bias: whether `q_a_proj`, `kv_a_proj_with_mqa` and `o_proj` have biases.
        latent_norm: whether the latents are RMS-normed.
        norm_eps: epsilon of those norms.
        rope: a `Rotary(qk_rope_head_dim)`, with `pairing="pairs"` for DeepSeek's checkpoints.
        mask: the layer's pattern. A call's mask can only take away from it.
        scale: of the scores; `(qk_nope_head_dim + qk_rope_head_dim) ** -0.5` times the rope's
            softmax factor if None.
        score_bias: a tensor or a rule added to the scores.
        dropout: probability of dropping a weight, in training only.
        form: `"expanded"`, `"absorbed"`, or `"auto"` for the one with less work.
        backend: `"auto"`, or the name of one.

    Raises:
        ValueError: if a size is not positive, an option is not one of those above, or `rope` does
            not turn `qk_rope_head_dim` channels.

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
        bias: bool = False,
        latent_norm: bool = True,
        norm_eps: float = 1e-6,
        rope: Rotary | NoRotary,
        mask: Mask = EVERYTHING,
        scale: float | None = None,
        score_bias: Tensor | ScoreBias | None = None,
        dropout: float = 0.0,
        form: Literal["auto", "expanded", "absorbed"] = "auto",
        backend: str = "auto",
    ) -> None:
        given = {name: value for name, value in locals().items() if name in _OPTIONS}
        super().__init__()
        self._given = given
        _check_sizes(given)
        check_mask(mask)
        check_options(dropout=dropout, softcap=None, precision="strict", scale=scale)
        self.hidden_size, self.num_heads = hidden_size, num_heads
        self.kv_lora_rank, self.q_lora_rank = kv_lora_rank, q_lora_rank
        self.qk_nope_head_dim, self.qk_rope_head_dim = qk_nope_head_dim, qk_rope_head_dim
        self.qk_head_dim = qk_nope_head_dim + qk_rope_head_dim
        self.v_head_dim = v_head_dim
        width = num_heads * self.qk_head_dim

        def norm(size: int) -> nn.Module:
            return nn.RMSNorm(size, eps=norm_eps) if latent_norm else nn.Identity()

        if q_lora_rank is None:
            self.q_proj = nn.Linear(hidden_size, width, bias=False)
        else:
            self.q_a_proj = nn.Linear(hidden_size, q_lora_rank, bias=bias)
            self.q_a_layernorm = norm(q_lora_rank)
            self.q_b_proj = nn.Linear(q_lora_rank, width, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden_size, kv_lora_rank + qk_rope_head_dim, bias=bias)
        self.kv_a_layernorm = norm(kv_lora_rank)
        rebuilt = num_heads * (qk_nope_head_dim + v_head_dim)
        self.kv_b_proj: nn.Module = nn.Linear(kv_lora_rank, rebuilt, bias=False)
        self.o_proj = nn.Linear(num_heads * v_head_dim, hidden_size, bias=bias)
        self.rope, self.mask, self.score_bias, self.dropout = rope, mask, score_bias, dropout
        self.scale = self.qk_head_dim**-0.5 * rope.softmax_factor if scale is None else scale
        self.form, self.backend = form, backend

    def forward(
        self,
        x: Float[Tensor, "B L E"],
        *,
        context: None = None,
        mask: Mask = EVERYTHING,
        cache: Cache = NO_CACHE,
        positions: Int[Tensor, "*B L"] | None = None,
    ) -> Float[Tensor, "B L E"]:
        """Attend, and give one tensor back. Arguments and errors are those of `Attention.forward`;
        `context` is refused, because the rotary key ties keys to the positions of `x`."""
        plan = self._prepare(x, context, mask, cache, positions)
        parts = plan.form.parts(self, cache.update(plan.joined))
        out = plan.form.read(self, plan.call.run(plan.q, parts))
        result: Tensor = self.o_proj(merge_heads(out))
        return result

    def weights(
        self,
        x: Float[Tensor, "B L E"],
        *,
        context: None = None,
        mask: Mask = EVERYTHING,
        cache: Cache = NO_CACHE,
        positions: Int[Tensor, "*B L"] | None = None,
    ) -> Float[Tensor, "B H L S"]:
        """The attention weights of the same call; the cache is left as it was."""
        plan = self._prepare(x, context, mask, cache, positions)
        return weights_of(plan.call, plan.q, plan.form.parts(self, cache.peek(plan.joined)))

    def explain(
        self,
        x: Float[Tensor, "B L E"],
        *,
        context: None = None,
        mask: Mask = EVERYTHING,
        cache: Cache = NO_CACHE,
        positions: Int[Tensor, "*B L"] | None = None,
    ) -> str:
        """Which form and which backend the same call would get, and why."""
        plan = self._prepare(x, context, mask, cache, positions)
        return f"form     {plan.form.name}: {plan.why}\n{explain(plan.call)}"

    def project(self, x: Float[Tensor, "B L E"]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries for every head in two pieces, one latent `[B, 1, L, R]` and one rotary key
        `[B, 1, L, Dr]` for all of them; before rotation."""
        if self.q_lora_rank is None:
            q = self.q_proj(x)
        else:
            q = self.q_b_proj(normed(self.q_a_layernorm, self.q_a_proj(x)))
        q_nope, q_rope = split_heads(q, self.qk_head_dim).split(
            [self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1
        )
        latent, k_rope = (
            self.kv_a_proj_with_mqa(x)
            .unsqueeze(1)
            .split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        )
        return q_nope, q_rope, normed(self.kv_a_layernorm, latent), k_rope

    def _prepare(
        self, x: Tensor, context: None, mask: Mask, cache: Cache, positions: Tensor | None
    ) -> "_Plan":
        """All but the attending: what can be refused is refused here, before the cache moves."""
        check_mask(mask)
        refuse_context(context)
        first = self.kv_a_proj_with_mqa if self.q_lora_rank is None else self.q_a_proj
        check_width("x", x, self.hidden_size, first)
        check_cache(cache)
        check_positions(positions, x)
        span = cache.span(x.shape[1])
        if cache is not NO_CACHE:
            check_decodable(self.mask & mask, span)
        form, why = self.choose(span)
        q_nope, q_rope, latent, k_rope = self.project(x)
        where = span.positions(x.device) if positions is None else positions
        q_rope, k_rope = self.rope(q_rope, k_rope, where)
        joined = torch.cat([latent, k_rope], dim=-1)
        q = form.queries(self, q_nope, q_rope)
        call = prepare(
            q,
            *form.outline(self, joined),
            mask=self.mask & mask,
            span=span,
            scale=self.scale,
            score_bias=self.score_bias,
            dropout=self.dropout if self.training else 0.0,
            backend=self.backend,
        )
        return _Plan(call, q, joined, form, why)

    def choose(self, span: Span) -> "tuple[_Form, str]":
        """The form a span is read in, and why.

        Raises:
            ValueError: if `form="absorbed"` and `kv_b_proj` is not a plain linear map.
        """
        objection = self._absorption_objection()
        if self.form == "absorbed" and objection is not None:
            raise ValueError(
                f"form='absorbed' reads kv_b_proj.weight, but {objection}; use form='auto'"
            )
        if self.form != "auto":
            return _FORMS[self.form], "asked for"
        if objection is not None:
            return EXPANDED, objection
        if torch.compiler.is_exporting():
            return EXPANDED, "an exported program serves every length"
        queries, keys = span.num_queries, span.num_keys
        rank, nope, rotary = self.kv_lora_rank, self.qk_nope_head_dim, self.qk_rope_head_dim
        both = nope + self.v_head_dim
        expanded = keys * rank * both + queries * keys * (both + rotary)
        absorbed = queries * rank * both + queries * keys * (2 * rank + rotary)
        if absorbed < expanded:
            return ABSORBED, "so few queries take less work on the latents than rebuilding keys"
        return EXPANDED, "rebuilding the keys takes less work than so many wide queries"

    def _absorption_objection(self) -> str | None:
        """Why `kv_b_proj` cannot be read as a matrix; None if it can."""
        up = self.kv_b_proj
        if type(up) is not nn.Linear:
            return f"kv_b_proj is a {type(up).__name__}, not a plain nn.Linear"
        if up._forward_hooks or up._forward_pre_hooks:
            return "kv_b_proj has forward hooks"
        if type(up.weight) not in (nn.Parameter, Tensor) or up.bias is not None:
            return "kv_b_proj.weight is not a full tensor, or has a bias"
        return None

    def up_weights(self) -> tuple[Tensor, Tensor]:
        """`kv_b_proj` as matrices of each head: keys `[H, Dn, R]` and values `[H, Dv, R]`."""
        weight = self.kv_b_proj.weight  # not get_parameter: functional_call puts a tensor there
        assert isinstance(weight, Tensor)
        keys, values = weight.unflatten(0, (self.num_heads, -1)).split(
            [self.qk_nope_head_dim, self.v_head_dim], dim=1
        )
        return keys, values

    def __repr__(self) -> str:
        of = MultiHeadLatentAttention.__init__
        positional = ("hidden_size", "num_heads")
        return constructor_code(type(self).__name__, self._given, of=of, positional=positional)


class _Form(NamedTuple):
    """One way to read the latents: what the queries, the parts and the outputs become."""

    name: str
    queries: Callable[[MultiHeadLatentAttention, Tensor, Tensor], Tensor]
    outline: Callable[[MultiHeadLatentAttention, Tensor], tuple[Tensor, Tensor]]
    parts: Callable[[MultiHeadLatentAttention, tuple[Part, ...]], tuple[Part, ...]]
    read: Callable[[MultiHeadLatentAttention, Tensor], Tensor]


class _Plan(NamedTuple):
    call: Call
    q: Tensor
    joined: Tensor
    form: _Form
    why: str


def _expand_queries(layer: MultiHeadLatentAttention, q_nope: Tensor, q_rope: Tensor) -> Tensor:
    return torch.cat([q_nope, q_rope], dim=-1)


def _expand_outline(layer: MultiHeadLatentAttention, joined: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values as wide as they will be, and nothing in them: only their shapes are read."""
    batch, _, length, _ = joined.shape
    like = joined[:, :, :, :1].expand(batch, layer.num_heads, length, 1)
    return like.expand(-1, -1, -1, layer.qk_head_dim), like.expand(-1, -1, -1, layer.v_head_dim)


def _expand_parts(layer: MultiHeadLatentAttention, parts: tuple[Part, ...]) -> tuple[Part, ...]:
    """Rebuild every head's keys and values: MHA."""
    rebuilt = []
    for start, stop, (joined,) in parts:
        latent, k_rope = joined.split([layer.kv_lora_rank, layer.qk_rope_head_dim], dim=-1)
        heads = split_heads(
            layer.kv_b_proj(latent.squeeze(1)), layer.qk_nope_head_dim + layer.v_head_dim
        )
        k_nope, v = heads.split([layer.qk_nope_head_dim, layer.v_head_dim], dim=-1)
        k_rope = k_rope.expand(-1, layer.num_heads, -1, -1).to(k_nope.dtype)
        rebuilt.append(Part(start, stop, (torch.cat([k_nope, k_rope], dim=-1), v)))
    return tuple(rebuilt)


def _absorb_queries(layer: MultiHeadLatentAttention, q_nope: Tensor, q_rope: Tensor) -> Tensor:
    """Move the up-projection of the keys into the queries, which then score latents:
    `[B, H, L, Dn] -> [B, H, L, R + Dr]`."""
    rows = q_nope.transpose(0, 1)  # heads first, the batch as rows: no matrix is copied
    wide = rows.flatten(1, 2) @ layer.up_weights()[0]
    return torch.cat([wide.unflatten(1, rows.shape[1:3]).transpose(0, 1), q_rope], dim=-1)


def _absorb_outline(layer: MultiHeadLatentAttention, joined: Tensor) -> tuple[Tensor, Tensor]:
    return joined, joined[..., : layer.kv_lora_rank]


def _absorb_read(layer: MultiHeadLatentAttention, out: Tensor) -> Tensor:
    """The up-projection of the values, after the attending: `[B, H, L, R] -> [B, H, L, Dv]`."""
    rows = out.transpose(0, 1)
    heads = (layer.up_weights()[1] @ rows.flatten(1, 2).mT).mT
    return heads.unflatten(1, rows.shape[1:3]).transpose(0, 1)


EXPANDED = _Form(
    "expanded", _expand_queries, _expand_outline, _expand_parts, lambda layer, out: out
)
ABSORBED = _Form(
    "absorbed", _absorb_queries, _absorb_outline, lambda layer, parts: parts, _absorb_read
)
_FORMS = {"expanded": EXPANDED, "absorbed": ABSORBED}
_OPTIONS = tuple(inspect.signature(MultiHeadLatentAttention.__init__).parameters)[1:]


def _check_sizes(given: dict[str, object]) -> None:
    for name, size in given.items():
        if name.endswith(("_size", "_heads", "_rank", "_dim")) and isinstance(size, int):
            least = 0 if name == "qk_nope_head_dim" else 1
            if size < least:
                raise ValueError(f"{name} is at least {least}, got {size}")
    rope, width = given["rope"], given["qk_rope_head_dim"]
    if isinstance(rope, Rotary) and rope.dim != width:
        raise ValueError(
            f"rope={rope} turns {rope.dim} channels, qk_rope_head_dim={width}; "
            f"give Rotary({width}, ...)"
        )
    if given["form"] not in ("auto", "expanded", "absorbed"):
        raise ValueError(f"form is 'auto', 'expanded' or 'absorbed', got {given['form']!r}")
