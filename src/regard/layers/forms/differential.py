"""Differential attention: the difference of two softmaxes over two sets of keys, one of values."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.cache import NO_CACHE, Cache, Part
from regard.cache.parts import streams_of
from regard.cache.streams import check_whole
from regard.heads import merge_heads, split_heads
from regard.layers.attending import Keys, attended, describe, explain
from regard.layers.cache_use import requiring_grad, restored_on_error
from regard.layers.construct import (
    Settings,
    constructor_code,
    records_arguments,
    set_heads,
    set_rules,
)
from regard.layers.inputs import Arrival, arrive, options_of, refuse_context
from regard.layers.memory import Context
from regard.masks import EVERYTHING, Mask
from regard.ops import explain as ops
from regard.ops.attend import Precision
from regard.rope import NO_ROPE, Rope


class DifferentialAttention(nn.Module, Settings):
    """Differential attention: `(softmax(q1 k1) - lambda * softmax(q2 k2)) v`, head by head.

    Ye et al. 2024, arXiv:2410.05258. The first half of the query and key heads makes the first
    softmax, the second half the second; their values are those of two heads side by side, of
    `2 * head_dim` channels. It is two calls of attention and a subtraction: with fewer key heads
    than query heads, each half is grouped on its own. `lambda = exp(lambda_q1 . lambda_k1) -
    exp(lambda_q2 . lambda_k2) + lambda_init`; the difference is RMS-normed without a weight and
    multiplied by `1 - lambda_init`. Heads are paired as transformers' DiffLlama pairs them: `j`
    with `j + num_heads / 2`, values `j` with `j + num_kv_heads / 2`. Parameters are named alike:
    `q_proj k_proj v_proj o_proj lambda_q1 lambda_k1 lambda_q2 lambda_k2`.

    With `num_noise_heads` it is grouped differential attention (Lim et al. 2025, arXiv:2510.06949;
    Motif 2): query heads lie in as many groups, each of several of the first softmax and then one
    of the second, which is subtracted from all of them. Key heads lie in pairs of both softmaxes,
    value heads in pairs that are side by side, and the norm has a weight.

    The cache holds three streams, the keys of both halves and the values: as many bytes as those of
    grouped-query attention with the same numbers of heads.

    Args:
        hidden_size: width of the input and the output.
        num_heads: query heads of both softmaxes, an even number.
        num_kv_heads: key heads of both, an even divisor of `num_heads`; as many if None. With
            `num_noise_heads`, twice a divisor of these; twice as many if None.
        head_dim: size of a query or key head; `hidden_size // num_heads` if None.
        num_noise_heads: query heads of the second softmax in groups as above, a divisor of
            `num_heads`; half of the heads, in halves and not in groups, if None.
        lambda_init: the constant of lambda; the paper has `0.8 - 0.6 * exp(-0.3 * layer)`, for
            layers that count from 0.
        bias: whether the projections have biases.
        norm_eps: epsilon of the norm of the difference.
        rope: applied to queries and keys.
        mask: the layer's pattern; intersected with the mask of each call.
        scale: of the scores; `head_dim ** -0.5` times the rope's softmax factor if None.
        backend: `"auto"`, or the name of one.
        precision: `"strict"`, or `"fast"` for bfloat16 scores and weights; as for `attend`.

    Raises:
        ValueError: if sizes do not divide, or halves of heads are no whole numbers.

    Examples:
        >>> import torch
        >>> from regard import Causal, DifferentialAttention, KVCache, Rotary
        >>> layer = DifferentialAttention(64, 8, num_kv_heads=4, rope=Rotary(8), mask=Causal())
        >>> cache = KVCache()
        >>> layer(torch.randn(1, 5, 64), cache=cache).shape
        torch.Size([1, 5, 64])
        >>> cache.nbytes == 5 * 2 * 4 * 8 * 4  # tokens, keys and values, heads, channels, bytes
        True
    """

    arguments: dict[str, Any]  # `type(layer)(**layer.arguments)` builds the same layer anew
    pieces: tuple[int, ...] = ()
    caches_positions, input_projection = False, "q_proj"
    options, explain = options_of, explain
    __repr__, check_context = constructor_code, staticmethod(refuse_context)
    kind = "Differential"
    sinks: Tensor | None = None

    @records_arguments
    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        num_noise_heads: int | None = None,
        lambda_init: float = 0.2,
        bias: bool = False,
        norm_eps: float = 1e-5,
        rope: Rope = NO_ROPE,
        mask: Mask | None = EVERYTHING,
        scale: float | None = None,
        backend: str = "auto",
        precision: Precision = "strict",
    ) -> None:
        super().__init__()
        if num_noise_heads is None:
            set_heads(self, hidden_size, num_heads, num_kv_heads, head_dim)
            _check_halves(num_heads, self.num_kv_heads)
            self.signals = num_heads // 2
        else:
            set_heads(self, hidden_size, num_heads, None, head_dim)
            self.num_kv_heads = 2 * num_noise_heads if num_kv_heads is None else num_kv_heads
            _check_groups(num_heads, self.num_kv_heads, num_noise_heads)
            self.signals = num_heads - num_noise_heads
        self.num_noise_heads = num_noise_heads
        set_rules(self, rope, mask, scale, backend=backend, precision=precision)
        self.lambda_init, width = lambda_init, num_heads * self.head_dim
        kv_width = self.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(hidden_size, width, bias=bias)
        self.k_proj = nn.Linear(hidden_size, kv_width, bias=bias)
        self.v_proj = nn.Linear(hidden_size, kv_width, bias=bias)
        self.o_proj = nn.Linear(2 * self.signals * self.head_dim, hidden_size, bias=bias)
        self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2 = (
            nn.Parameter(torch.empty(self.head_dim)) for _ in range(4)
        )
        self.groupnorm = nn.RMSNorm(
            2 * self.head_dim, eps=norm_eps, elementwise_affine=num_noise_heads is not None
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the parameters that belong to no submodule, as the paper does."""
        for each in (self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2):
            nn.init.normal_(each, std=0.1)

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

        As `Attention.forward`; `context` is refused, since keys have the positions of `x`.
        """
        at = arrive(self, x, context, mask, cache, positions)
        q, k, v = self.project(x)  # [B, H, L, D], [B, G, L, D], [B, G / 2, L, 2 D]
        q, k = self.rope(q, k, at.positions)
        with restored_on_error(self, at.cache, at.mask):
            parts = at.cache.update(*k.chunk(2, dim=1), v)
            both = halves(q, parts, self.signals)
            first, second = (attended(self, *half, at) for half in both)
            return self.o_proj(merge_heads(self.difference(first, second)))

    def queries_and_keys(self, x: Tensor, context: Context, at: Arrival) -> tuple[Tensor, Keys]:
        """Queries and keys of the first softmax of a call, for which the cache does not change."""
        return self._halves(x, at)[0]

    def weights(
        self,
        x: Float[Tensor, "B L E"],
        *,
        context: None = None,
        mask: Mask | None = EVERYTHING,
        cache: Cache | None = NO_CACHE,
        positions: Int[Tensor, "*B L"] | None = None,
    ) -> Float[Tensor, "B h L S"]:
        """The differences of the two softmaxes, `[B, h, L, S]` for h heads of the first.

        The cache does not change. A row sums to `1 - lambda`, and weights may be negative.

        Raises:
            TypeError, ValueError: as `Attention.weights`.
        """
        at = arrive(self, x, context, mask, cache, positions)
        first, second = (
            ops.weights_of(describe(self, q, keys, at), q, keys.parts)
            for q, keys in self._halves(x, at)
        )
        return self._minus(first, second)

    def project(self, x: Float[Tensor, "B L E"]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries `[B, H, L, D]`, keys `[B, G, L, D]`, before rotation, and values.

        The heads of the first softmax come before those of the second. Values are
        `[B, G / 2, L, 2 D]`, those of two heads side by side.
        """
        q, k, v = (
            split_heads(projection(x), self.head_dim)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.num_noise_heads is not None:
            groups = (self.num_noise_heads, *[self.num_kv_heads // 2] * 2)
            q, k, v = (_apart(x, count) for x, count in zip((q, k, v), groups, strict=True))
        v = torch.cat(v.chunk(2, dim=1), dim=-1)
        k, v = requiring_grad((q,), k, v)
        return q, k, v

    def factor(self) -> Float[Tensor, ""]:
        """Lambda, the factor of the second softmax."""
        first, second = self.lambda_q1 * self.lambda_k1, self.lambda_q2 * self.lambda_k2
        return first.sum().exp() - second.sum().exp() + self.lambda_init

    def difference(
        self, first: Float[Tensor, "B h L D2"], second: Float[Tensor, "B n L D2"]
    ) -> Float[Tensor, "B h L D2"]:
        """The outputs of both softmaxes, subtracted and normed."""
        return (1 - self.lambda_init) * self.groupnorm(self._minus(first, second))

    def _minus(self, first: Tensor, second: Tensor) -> Tensor:
        second = second.repeat_interleave(first.shape[1] // second.shape[1], dim=1)
        return first - self.factor().to(first.dtype) * second

    def _halves(self, x: Tensor, at: Arrival) -> tuple[tuple[Tensor, Keys], tuple[Tensor, Keys]]:
        q, k, v = self.project(x)
        q, k = self.rope(q, k, at.positions)
        return halves(q, at.cache.peek(*k.chunk(2, dim=1), v), self.signals)


def _check_halves(heads: int, kv_heads: int) -> None:
    if heads % 2 or kv_heads % 2:
        raise ValueError(
            "each of the two softmaxes has half of the heads: num_heads and num_kv_heads are "
            f"even, got {heads} and {kv_heads}"
        )


def _check_groups(heads: int, kv_heads: int, noise: int) -> None:
    for name, value in (("num_noise_heads", noise), ("num_kv_heads", kv_heads)):
        check_whole(name, value, least=1)
    if noise == heads or heads % noise or kv_heads % 2 or 2 * noise % kv_heads:
        raise ValueError(
            "num_noise_heads is a smaller divisor of num_heads, and num_kv_heads twice a divisor "
            f"of it, got num_heads={heads}, num_noise_heads={noise}, num_kv_heads={kv_heads}"
        )


def _apart(x: Float[Tensor, "B H L D"], groups: int) -> Float[Tensor, "B H L D"]:
    """The heads but the last of each group, then the last ones."""
    grouped = x.unflatten(1, (groups, -1))
    return torch.cat([grouped[:, :, :-1].flatten(1, 2), grouped[:, :, -1]], dim=1)


def halves(
    q: Float[Tensor, "B H L D"], parts: tuple[Part, ...], signals: int
) -> tuple[tuple[Tensor, Keys], tuple[Tensor, Keys]]:
    """The queries, keys and values of each softmax, from a cache's keys of both and values; the
    first softmax has the first `signals` query heads."""
    one, two = q.tensor_split([signals], dim=1)
    return (one, _keys(parts, 0)), (two, _keys(parts, 1))


def _keys(parts: tuple[Part, ...], half: int) -> Keys:
    pairs = (
        each._replace(streams=streams_of((each.stored[half], each.stored[2]))) for each in parts
    )
    return Keys.of(tuple(pairs))
