"""GQA whose cache holds one joint latent: keys are rebuilt, normed and rotated when they are read.

What GQA becomes when only memory matters. Rotation is exact, because it is applied to the rebuilt
keys; rebuilding costs time at every step. The idea is Palu's (arXiv:2407.21118).
"""

import inspect

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.cache import NO_CACHE, Cache, Part
from regard.heads import merge_heads, split_heads
from regard.layers.cache_use import check_use, tracked, trains, used_by
from regard.layers.construct import Norm, build_norm, constructor_code, normed_heads
from regard.layers.inputs import check_cache, check_positions, check_width, refuse_context
from regard.masks import EVERYTHING, Mask
from regard.ops.attend import prepare
from regard.ops.bias import ScoreBias
from regard.ops.call import Call
from regard.ops.check import check_mask, check_options, divisors
from regard.ops.explain import explain, weights_of
from regard.rope import NO_ROPE, NoRotary, Rotary
from regard.tracing import holds_numbers, is_transformed


class LatentKVAttention(nn.Module):
    """GQA over a joint latent of keys and values, with exact rotary embedding.

    `kv_b_proj(kv_a_proj(x))` are the keys of all `num_kv_heads`, then their values; keys are then
    normed (`qk_norm`) and rotated. The cache holds two streams: the latent, `kv_lora_rank` numbers
    a token, and its position, one int32. With `kv_lora_rank >= 2 * num_kv_heads * head_dim` any GQA
    layer can be written so, exactly.

    Args:
        hidden_size: width of the input and the output.
        num_heads: query heads.
        num_kv_heads: key/value heads, a divisor of `num_heads`.
        head_dim: size of a head.
        kv_lora_rank: width of the latent.
        rope: applied to queries, and to keys on reading.
        bias: whether `q_proj` and `kv_b_proj` have biases.
        out_bias: whether `o_proj` has one.
        dropout: probability of dropping a weight, in training only.
        qk_norm, norm_eps: norms of queries and of rebuilt keys, before rotation; as `Attention`'s.
        mask, scale, score_bias, softcap, backend: as for `Attention`.

    Raises:
        ValueError: if sizes do not divide or are not positive.

    >>> import torch
    >>> from regard import Causal, KVCache, LatentKVAttention, Rotary
    >>> layer = LatentKVAttention(64, 8, num_kv_heads=2, head_dim=8, kv_lora_rank=16,
    ...     rope=Rotary(8), mask=Causal())
    >>> cache = KVCache()
    >>> layer(torch.randn(1, 5, 64), cache=cache).shape
    torch.Size([1, 5, 64])
    >>> cache.nbytes == 5 * (16 * 4 + 4)
    True
    """

    kind = "LatentKV"

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        num_kv_heads: int,
        head_dim: int,
        kv_lora_rank: int,
        rope: Rotary | NoRotary = NO_ROPE,
        bias: bool = False,
        out_bias: bool = False,
        dropout: float = 0.0,
        qk_norm: Norm = None,
        norm_eps: float = 1e-6,
        mask: Mask = EVERYTHING,
        scale: float | None = None,
        score_bias: Tensor | ScoreBias | None = None,
        softcap: float | None = None,
        backend: str = "auto",
    ) -> None:
        given = {name: value for name, value in locals().items() if name in _OPTIONS}
        super().__init__()
        self._given = given
        _check_sizes(given)
        check_mask(mask)
        check_options(dropout=dropout, softcap=softcap, precision="strict", scale=scale)
        if rope.dim > head_dim:
            raise ValueError(f"rope={rope} turns {rope.dim} channels, head_dim={head_dim}")
        self.hidden_size, self.num_heads, self.num_kv_heads = hidden_size, num_heads, num_kv_heads
        self.head_dim, self.kv_lora_rank = head_dim, kv_lora_rank
        self.q_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=bias)
        self.kv_a_proj = nn.Linear(hidden_size, kv_lora_rank, bias=False)
        self.kv_b_proj = nn.Linear(kv_lora_rank, 2 * num_kv_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=out_bias)
        self.norm_width = qk_norm == "width"
        self.q_norm = build_norm(qk_norm, head_dim, num_heads * head_dim, norm_eps)
        self.k_norm = build_norm(qk_norm, head_dim, num_kv_heads * head_dim, norm_eps)
        self.rope, self.mask, self.dropout, self.softcap = rope, mask, dropout, softcap
        self.scale = head_dim**-0.5 * rope.softmax_factor if scale is None else scale
        self.score_bias, self.backend = score_bias, backend

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
        `context` is refused, and so are positions that are not integers (`TypeError`) or do not fit
        int32 (`ValueError`)."""
        call, q, latent, where = self._prepare(x, context, mask, cache, positions)
        with used_by(self, cache, mask):
            parts = cache.update(*tracked(call.needs_grad, latent, where))
            out = call.run(q, self.rebuild(parts))
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
        call, q, latent, where = self._prepare(x, context, mask, cache, positions)
        return weights_of(call, q, self.rebuild(cache.peek(latent, where)))

    def explain(
        self,
        x: Float[Tensor, "B L E"],
        *,
        context: None = None,
        mask: Mask = EVERYTHING,
        cache: Cache = NO_CACHE,
        positions: Int[Tensor, "*B L"] | None = None,
    ) -> str:
        """Which backend the same call would get, and why."""
        return explain(self._prepare(x, context, mask, cache, positions)[0])

    def rebuild(self, parts: tuple[Part, ...]) -> tuple[Part, ...]:
        """Keys, normed and rotated, and values from the latents and positions of each part."""
        rebuilt = []
        for start, stop, (latent, stream) in parts:
            k, v = self.kv_b_proj(latent.squeeze(1)).chunk(2, dim=-1)
            k = self.rope.rotate(self._heads(k, self.k_norm), stream[:, 0, :, 0])
            rebuilt.append(Part(start, stop, (k, split_heads(v, self.head_dim))))
        return tuple(rebuilt)

    def queries(self, x: Float[Tensor, "B L E"]) -> Float[Tensor, "B H L D"]:
        """Queries of every head, normed, before rotation."""
        return self._heads(self.q_proj(x), self.q_norm)

    def _heads(self, flat: Tensor, norm: nn.Module | None) -> Tensor:
        return normed_heads(norm, flat, self.head_dim, width=self.norm_width)

    def _prepare(
        self, x: Tensor, context: None, mask: Mask, cache: Cache, positions: Tensor | None
    ) -> tuple[Call, Tensor, Tensor, Tensor]:
        check_mask(mask)
        refuse_context(context)
        check_width("x", x, self.hidden_size, self.q_proj)
        check_cache(cache)
        check_positions(positions, x)
        check_counted(positions)
        span = cache.span(x.shape[1])
        check_use(self, cache, mask, span)
        batch, length = x.shape[:2]
        where = span.positions(x.device) if positions is None else positions
        where = where.to(torch.int32)
        q = self.rope.rotate(self.queries(x), where)
        trained = trains(self.kv_b_proj) or (self.k_norm is not None and trains(self.k_norm))
        (latent,) = tracked(trained, self.kv_a_proj(x).unsqueeze(1))
        outline = latent[..., :1].expand(batch, self.num_kv_heads, length, self.head_dim)
        call = prepare(
            q,
            outline,
            outline,
            mask=self.mask & mask,
            span=span,
            scale=self.scale,
            score_bias=self.score_bias,
            softcap=self.softcap,
            dropout=self.dropout if self.training else 0.0,
            backend=self.backend,
        )
        return call, q, latent, where.expand(batch, length)[:, None, :, None]

    def __repr__(self) -> str:
        of = LatentKVAttention.__init__
        positional = ("hidden_size", "num_heads")
        return constructor_code(type(self).__name__, self._given, of=of, positional=positional)


_OPTIONS = tuple(inspect.signature(LatentKVAttention.__init__).parameters)[1:]


_MOST = 1 << 31  # positions in int32, which is what the cache holds for each token, end before it


def check_counted(positions: Tensor | None) -> None:
    """Refuse positions that int32 does not hold: queries are rotated at the numbers that come, keys
    at those that the cache holds. On a GPU the numbers are checked when the device comes to them.

    Raises:
        TypeError: unless they are integers.
        ValueError: if one does not fit.
    """
    if positions is None or positions.dtype in _FITTING:
        return
    if positions.dtype not in (torch.int64, torch.uint32):
        raise TypeError(
            "positions of a layer that caches them must be integers: keys are rotated at positions "
            f"read from the cache, which holds them in int32, got {positions.dtype}; use "
            "torch.arange(length), or Attention, which rotates keys before they are cached"
        )
    wide = positions.to(torch.int64)
    fit = ((wide >= -_MOST) & (wide < _MOST)).all()
    if not holds_numbers(positions) or positions.device.type != "cpu":
        if not (positions.is_meta or is_transformed()):
            torch._assert_async(fit, "positions of a layer that caches them fit int32")
        return
    if not bool(fit):
        raise ValueError(
            "positions of a layer that caches them fit int32, which the cache holds, got "
            f"{int(wide.min())} to {int(wide.max())}; scores depend on distances alone: subtract "
            "the same number from all"
        )


_FITTING = (torch.int8, torch.int16, torch.int32, torch.uint8, torch.uint16)


def _check_sizes(given: dict[str, object]) -> None:
    sizes = ("hidden_size", "num_heads", "num_kv_heads", "head_dim", "kv_lora_rank")
    for name in sizes:
        size = given[name]
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} is a whole number, at least 1, got {size!r}")
    num_heads, num_kv_heads = given["num_heads"], given["num_kv_heads"]
    assert isinstance(num_heads, int) and isinstance(num_kv_heads, int)
    if num_heads % num_kv_heads:
        raise ValueError(
            f"num_heads={num_heads} is not a multiple of num_kv_heads={num_kv_heads}; "
            f"choose num_kv_heads from {divisors(num_heads)}"
        )
