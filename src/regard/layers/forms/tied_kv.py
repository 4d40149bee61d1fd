"""Grouped-query attention whose keys are its values, scaled and rotated: the cache holds values.

Gemma 4 (`attention_k_eq_v`) projects once: `v` is the normed projection and `k = rope(v * weight)`.
A channel that is not rotated has `k = v * weight`, so its part of a score is `(q * weight) . v`.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.cache import NO_CACHE, Cache, Part
from regard.heads import merge_heads, split_heads
from regard.layers.attending import Keys, attended, explain, rebuild, weights
from regard.layers.cache_use import requiring_grad, restored_on_error
from regard.layers.construct import (
    Settings,
    constructor_code,
    kind_of_heads,
    normed,
    normed_heads,
    records_arguments,
    set_heads,
    set_rules,
)
from regard.layers.inputs import Arrival, arrive, options_of, refuse_context
from regard.layers.latent_kv import as_stream
from regard.layers.memory import Context
from regard.masks import EVERYTHING, Mask
from regard.ops.attend import Precision
from regard.rope import NO_ROPE, Rope, Rotary

Runs = tuple[tuple[int, int], ...]  # first and last, exclusive, of channels that lie side by side
_COPYING = 8  # products that take as long as writing one number of a rebuilt key


class TiedKeys(NamedTuple):
    """Keys that are values times a weight, but for the channels that are rotated.

    The cached stream has the values first, then the rotated channels of the keys: it is a wide key
    whose first channels are its value.

    Attributes:
        weight: the factor of each channel, `[D]`.
        runs: the channels that are rotated.
    """

    weight: Float[Tensor, " D"]
    runs: Runs

    @property
    def pieces(self) -> tuple[int, int]:
        """The widths of the values and of the rotated channels."""
        return len(self.weight), sum(stop - start for start, stop in self.runs)

    def rotated(self, x: Float[Tensor, "B H L D"]) -> Float[Tensor, "B H L R"]:
        """The channels that are rotated."""
        return torch.cat([x[..., :0], *(x[..., start:stop] for start, stop in self.runs)], dim=-1)

    def join(
        self, v: Float[Tensor, "B G L D"], k: Float[Tensor, "B G L D"]
    ) -> Float[Tensor, "B G L DR"]:
        """The stream that is cached, of values and of keys after rotation."""
        return torch.cat([v, self.rotated(k)], dim=-1)

    def replaced(
        self, x: Float[Tensor, "B H L D"], rotated: Float[Tensor, "B H L R"]
    ) -> Float[Tensor, "B H L D"]:
        """`x` with other values in the channels that are rotated."""
        pieces, at, used = [], 0, 0
        for start, stop in self.runs:
            pieces += [x[..., at:start], rotated[..., used : used + stop - start]]
            at, used = stop, used + stop - start
        return torch.cat([*pieces, x[..., at:]], dim=-1)

    def queries(self, q: Float[Tensor, "B H L D"]) -> Float[Tensor, "B H L DR"]:
        """Queries whose products with the cached stream are scores."""
        rotated = self.rotated(q)
        scaled = q * self.weight.to(q.dtype)
        return torch.cat([self.replaced(scaled, torch.zeros_like(rotated)), rotated], dim=-1)

    def rebuild(self, parts: tuple[Part, ...]) -> tuple[Part, ...]:
        """Keys and values from the cached stream of each part."""
        found = []
        for start, stop, (joined,) in parts:
            v, rotated = joined.split(self.pieces, dim=-1)
            k = self.replaced(v * self.weight.to(v.dtype), rotated)
            found.append(Part(start, stop, (k, v)))
        return tuple(found)

    def read(
        self,
        q: Float[Tensor, "B H L D"],
        parts: tuple[Part, ...],
        rebuilding: Callable[[tuple[Part, ...]], Keys],
    ) -> tuple[Tensor, Keys]:
        """Queries and keys: the stream as it lies for few queries, rebuilt keys for many, whose
        products with the added channels are more work than writing the keys."""
        values, rotated = self.pieces
        group = q.shape[1] // parts[0].outlines[0].shape[1]
        if q.shape[2] * group * rotated <= _COPYING * values:
            note = "form     absorbed: values are read as keys, and no key is rebuilt\n"
            return self.queries(q), Keys.of(parts, values)._replace(note=note)
        note = "form     expanded: for so many queries, rebuilding the keys is less work\n"
        return q, rebuilding(parts)._replace(note=note)


def rotated_runs(rope: Rope) -> Runs:
    """The channels that a rope changes: those of a frequency of 0 stay as they are."""
    if not isinstance(rope, Rotary) or rope.attention_factor != 1.0:
        return ((0, rope.dim),) if rope.dim else ()
    moved = rope.angles(torch.ones(1, device="cpu"))[0] != 0
    halves = rope.pairing == "halves"
    moved = torch.cat([moved, moved]) if halves else moved.repeat_interleave(2)
    edges = nn.functional.pad(moved.int(), (1, 1)).diff().nonzero()
    return tuple((int(start), int(stop)) for start, stop in edges.view(-1, 2).tolist())


class TiedKVAttention(nn.Module, Settings):
    """Grouped-query attention whose keys are `rope(v * weight)` of its values, as in Gemma 4.

    One projection makes both: `v = v_norm(k_proj(x))`, an RMSNorm without a weight, and
    `k = rope(v * k_norm.weight)`. So the cache holds one stream for each key head, in one of two
    forms. `"absorbed"` holds the values and the channels of the keys that are rotated (`head_dim +
    rotated` numbers; 640 instead of 1,024 in Gemma 4, whose layers rotate 128 of 512 channels),
    and decoding reads it as it lies: values are their own keys. `"expanded"` holds the values and
    an int32 position (half of keys and values), and rebuilds and rotates all keys at every step,
    which takes longer. Parameters are Hugging Face's: `q_proj q_norm k_proj k_norm o_proj`.

    Args:
        hidden_size: width of the input and the output.
        num_heads: query heads.
        num_kv_heads: key/value heads, a divisor of `num_heads`; all of them if None.
        head_dim: size of a head; `hidden_size // num_heads` if None.
        bias: whether `q_proj`, `k_proj` and `o_proj` have biases.
        dropout: probability of dropping a weight, in training only.
        norm_eps: epsilon of the norms of queries and values.
        rope: applied to queries and keys. `Rotary(head_dim, scaling=Frequencies(...))` with zeros
            is Gemma 4's "proportional" rotation: those channels count as not rotated.
        mask: the layer's pattern; intersected with the mask of each call.
        scale: of the scores; `head_dim ** -0.5` times the rope's softmax factor if None. Gemma 4
            has 1.
        form: `"absorbed"` or `"expanded"`.
        backend: `"auto"`, or the name of one.
        precision: `"strict"`, or `"fast"` for bfloat16 scores and weights; as for `attend`.

    Raises:
        ValueError: if sizes do not divide, or an option is not one of those above.

    Examples:
        >>> import torch
        >>> from regard import Causal, KVCache, Rotary, TiedKVAttention
        >>> layer = TiedKVAttention(64, 4, num_kv_heads=2, head_dim=16, rope=Rotary(4),
        ...     mask=Causal(), scale=1.0)
        >>> cache = KVCache()
        >>> layer(torch.randn(1, 5, 64), cache=cache).shape
        torch.Size([1, 5, 64])
        >>> cache.nbytes == 5 * 2 * (16 + 4) * 4  # keys and values: 5 * 2 * (16 + 16) * 4
        True
    """

    arguments: dict[str, Any]  # `type(layer)(**layer.arguments)` builds the same layer anew
    input_projection = "q_proj"
    options, weights, explain = options_of, weights, explain
    __repr__, check_context = constructor_code, staticmethod(refuse_context)
    kind = property(kind_of_heads)
    sinks: Tensor | None = None
    pieces: tuple[int, ...]

    @records_arguments
    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = False,
        dropout: float = 0.0,
        norm_eps: float = 1e-6,
        rope: Rope = NO_ROPE,
        mask: Mask | None = EVERYTHING,
        scale: float | None = None,
        form: Literal["absorbed", "expanded"] = "absorbed",
        backend: str = "auto",
        precision: Precision = "strict",
    ) -> None:
        super().__init__()
        set_heads(self, hidden_size, num_heads, num_kv_heads, head_dim)
        set_rules(
            self, rope, mask, scale, dropout=dropout, backend=backend, precision=precision
        )  # fmt: skip
        if form not in ("absorbed", "expanded"):
            raise ValueError(f"form is 'absorbed' or 'expanded', got {form!r}")
        self.form, self.runs, width = form, rotated_runs(rope), num_heads * self.head_dim
        self.q_proj = nn.Linear(hidden_size, width, bias=bias)
        self.k_proj = nn.Linear(hidden_size, self.num_kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(width, hidden_size, bias=bias)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=norm_eps)
        self.k_norm = nn.RMSNorm(self.head_dim, eps=norm_eps)  # its weight alone is read
        self.v_norm = nn.RMSNorm(self.head_dim, eps=norm_eps, elementwise_affine=False)
        self.pieces = self.tied.pieces if form == "absorbed" else ()
        self.caches_positions = form == "expanded"

    @property
    def tied(self) -> TiedKeys:
        """How keys follow from values."""
        return TiedKeys(self.k_norm.weight, self.runs)

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
        q, v = self.project(x)
        q = self.rope.rotate(q, at.positions)
        with restored_on_error(self, at.cache, at.mask):
            parts = at.cache.update(*self.streams(v, at.positions))
            out = attended(self, *self.read(q, parts, at), at)
            return self.o_proj(merge_heads(out))

    def queries_and_keys(self, x: Tensor, context: Context, at: Arrival) -> tuple[Tensor, Keys]:
        """Queries and keys of a call, for which the cache does not change."""
        q, v = self.project(x)
        q = self.rope.rotate(q, at.positions)
        return self.read(q, at.cache.peek(*self.streams(v, at.positions)), at)

    def project(
        self, x: Float[Tensor, "B L E"]
    ) -> tuple[Float[Tensor, "B H L D"], Float[Tensor, "B G L D"]]:
        """Queries, normed, before rotation; and values."""
        q = normed_heads(self.q_norm, self.q_proj(x), self.head_dim, width=False)
        v = normed(self.v_norm, split_heads(self.k_proj(x), self.head_dim))
        (v,) = requiring_grad((q, self.k_norm), v)
        return q, v

    def streams(self, v: Float[Tensor, "B G L D"], positions: Tensor) -> tuple[Tensor, ...]:
        """The streams that are cached: values and rotated channels, or values and positions."""
        if self.form == "expanded":
            return v, as_stream(positions.to(torch.int32), v.shape[0])
        return (self.tied.join(v, self.keys(v, positions)),)

    def keys(self, v: Float[Tensor, "B G L D"], positions: Tensor) -> Float[Tensor, "B G L D"]:
        """The keys of values at their positions."""
        return self.rope.rotate(v * self.k_norm.weight.to(v.dtype), positions)

    def read(self, q: Tensor, parts: tuple[Part, ...], at: Arrival) -> tuple[Tensor, Keys]:
        """The queries and keys of the attention, in the form that `form` names."""
        if self.form == "absorbed":
            return self.tied.read(q, parts, lambda parts: rebuild(parts, at, self.tied.rebuild))
        keys = rebuild(parts, at, self.rebuild)
        return q, keys._replace(note="form     expanded: asked for\n")

    def rebuild(self, parts: tuple[Part, ...]) -> tuple[Part, ...]:
        """Keys and values from the values and positions of each part."""
        return tuple(
            Part(start, stop, (self.keys(v, stream[:, 0, :, 0]), v))
            for start, stop, (v, stream) in parts
        )
