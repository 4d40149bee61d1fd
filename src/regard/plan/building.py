"""How the entries of an architecture become layers: its differences from Llama, as data."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from regard.plan.reading import Keys
from regard.plan.ropes import rotary
from regard.plan.shapes import LayerShape
from regard.rope import Pairing

FULL, SLIDING, CHUNKED, LINEAR = (
    f"{kind}_attention" for kind in ("full", "sliding", "chunked", "linear")
)
OLD_KINDS = {"attention": FULL, "mamba": LINEAR}  # names before transformers 5
QKV = ("q_proj", "k_proj", "v_proj")
QKVO = (*QKV, "o_proj")

Kinds = Callable[[Keys, int], list[str]]
Builder = Callable[["Architecture", Keys, "Place"], LayerShape]


@dataclass(frozen=True)
class Place:
    """What a layer has because of its index.

    Args:
        kind: of the attention, as in `layer_types`.
        rotated: whether it has RoPE.
        keys_of: the layer whose keys and values it uses.
        number: its index plus one where the scale depends on it, else 1.
    """

    kind: str
    rotated: bool = True
    keys_of: int | None = None
    number: int = 1


def plain_layer(row: "Architecture", keys: Keys, place: Place) -> LayerShape:
    """A layer of MHA, GQA or MQA."""
    heads = keys.heads("num_attention_heads")
    head_dim = keys.optional_size("head_dim") or keys.divided("hidden_size", "num_attention_heads")
    kv_heads = row.kv_heads(keys)
    if heads % kv_heads:
        rule = f"a divisor of the {heads} query heads"
        raise keys.refused("num_key_value_heads", rule, kv_heads)
    rope = row.rope(row, keys, place.kind, head_dim) if place.rotated else None
    scale = row.scale(keys, head_dim, place)
    if scale is None and rope is not None and rope.softmax_factor != 1.0:
        scale = head_dim**-0.5  # transformers applies that factor to MLA only
    bias = row.bias(keys)
    return LayerShape(
        hidden_size=keys.size("hidden_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=head_dim,
        qk_rope_head_dim=rope.dim if rope is not None else 0,
        window=_window(row, keys, place.kind),
        chunk=keys.size("attention_chunk_size") if place.kind == CHUNKED else None,
        causal=row.causal(keys),
        keys_of=place.keys_of,
        bias=bias if place.keys_of is None else tuple(set(bias) & {"q_proj", "o_proj"}),
        qk_norm=row.qk_norm(keys),
        sinks=row.sinks,
        gate=row.gate,
        softcap=keys.optional_number(row.softcap) if row.softcap else None,
        scale=scale,
        rope="" if rope is None else repr(rope),
        unsupported=row.unsupported(keys, place),
    )


def _window(row: "Architecture", keys: Keys, kind: str) -> int | None:
    if kind != SLIDING:
        return None
    size = row.window(keys)
    if size is None:
        rule = f"a number of tokens, since there are layers of {SLIDING!r}"
        raise keys.refused("sliding_window", rule, None)
    return size


def latent_layer(row: "Architecture", keys: Keys, place: Place) -> LayerShape:
    """A layer of MLA, as DeepSeek-V2 has it (arXiv:2405.04434, section 2.1)."""
    heads, turned = keys.heads("num_attention_heads"), keys.size("qk_rope_head_dim")
    if keys.get("num_key_value_heads") not in (None, heads):
        rule = f"the {heads} query heads, since keys are expanded for each"
        raise keys.refused("num_key_value_heads", rule, keys.get("num_key_value_heads"))
    q_rank = keys.optional_size("q_lora_rank")
    bias = ("q_a_proj", "kv_a_proj_with_mqa", "o_proj") if keys.flag("attention_bias") else ()
    values = keys.optional_size("v_head_dim") or keys.divided("hidden_size", "num_attention_heads")
    return LayerShape(
        hidden_size=keys.size("hidden_size"),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=keys.size("qk_nope_head_dim") + turned,
        v_head_dim=values,
        kv_lora_rank=keys.size("kv_lora_rank"),
        q_lora_rank=q_rank,
        qk_rope_head_dim=turned,
        bias=bias if q_rank else tuple(name for name in bias if name != "q_a_proj"),
        rope=repr(row.rope(row, keys, place.kind, turned)),
        unsupported=row.unsupported(keys, place),
    )


def delta_layer(row: "Architecture", keys: Keys, place: Place) -> LayerShape:
    """A gated delta net (Qwen3-Next): its state is a matrix for each value head, and the inputs
    that a convolution needs again."""
    keyed, valued = keys.heads("linear_num_key_heads"), keys.heads("linear_num_value_heads")
    key_dim, value_dim = keys.size("linear_key_head_dim"), keys.size("linear_value_head_dim")
    if valued % keyed:
        raise keys.refused("linear_num_key_heads", f"a divisor of the {valued} value heads", keyed)
    convolved = 2 * keyed * key_dim + valued * value_dim
    state = valued * key_dim * value_dim + convolved * keys.size("linear_conv_kernel_dim")
    return LayerShape(
        hidden_size=keys.size("hidden_size"),
        num_heads=valued,
        num_kv_heads=keyed,
        head_dim=key_dim,
        v_head_dim=value_dim,
        state_elements=state,
        unsupported="regard has no linear attention (gated delta net)",
    )


def mamba_layer(row: "Architecture", keys: Keys, place: Place) -> LayerShape:
    """A Mamba block (arXiv:2312.00752): a state for each channel, and the inputs that a
    convolution needs again."""
    hidden, size = keys.size("hidden_size"), keys.size("mamba_d_state")
    inner = hidden * keys.size("mamba_expand")
    return LayerShape(
        hidden_size=hidden,
        num_heads=1,
        num_kv_heads=1,
        head_dim=size,
        v_head_dim=inner,
        state_elements=inner * (size + keys.size("mamba_d_conv")),
        unsupported="regard has no state space layers (Mamba)",
    )


def one_rope(row: "Architecture", keys: Keys, kind: str, head_dim: int) -> Any:
    """The same rotary embedding in all layers."""
    return rotary(keys, head_dim, pairing=row.pairing(keys), renamed=row.renamed_ropes)


def rope_by_kind(local: str) -> Callable[["Architecture", Keys, str, int], Any]:
    """One for layers with a window, whose base is the entry `local`, unscaled; one for others."""

    def rope(row: "Architecture", keys: Keys, kind: str, head_dim: int) -> Any:
        sliding = kind == SLIDING
        theta = local if sliding else "rope_theta"
        return rotary(keys, head_dim, kind=kind, theta=theta, scaled=not sliding)

    return rope


def uniform(keys: Keys, count: int) -> list[str]:
    """Every layer has the window, if there is one."""
    return [FULL if keys.get("sliding_window") is None else SLIDING] * count


def full(keys: Keys, count: int) -> list[str]:
    """No layer has a window."""
    return [FULL] * count


def every(period: str, kind: str, otherwise: str = FULL) -> Kinds:
    """`otherwise` after each run of `kind`: layers `period - 1`, `2 * period - 1` and so on."""

    def kinds(keys: Keys, count: int) -> list[str]:
        length = keys.size(period)
        return [kind if (at + 1) % length else otherwise for at in range(count)]

    return kinds


def _few_heads(keys: Keys) -> int:
    value = keys.get("num_key_value_heads")
    return keys.heads("num_attention_heads" if value is None else "num_key_value_heads")


def always(value: Any) -> Callable[..., Any]:
    """A function of anything that returns the value."""
    return lambda *given: value


NONE, HALVES, EMPTY, NOTHING = always(None), always("halves"), always(""), always(())
TRUE, FALSE = always(True), always(False)


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """What one `model_type` has, where that differs from Llama.

    Args:
        attention: the class in transformers.
        names: the file's names of entries, by the usual ones.
        defaults: what transformers takes for entries that are left out.
        sizes: the same for sizes, which only the description inside a larger one may leave out.
        builders: what builds each kind of layer; other kinds are refused.
        kinds: the kinds of the layers of a file without `layer_types`.
        typed: whether `layer_types` is read.
        window: reads the size of the window.
        kv_heads: reads the number of key heads.
        bias: reads the projections that have a bias.
        qk_norm: reads the norm of queries and keys.
        rope: reads the rotary embedding of a kind of layer.
        rotates: which layers have RoPE, from the kinds.
        pairing: reads how channels are paired.
        renamed_ropes: types of RoPE that this architecture reads as another.
        causal: whether later keys are hidden.
        keys_of: the layers whose keys and values others use, from the kinds.
        numbered: whether the scale depends on the index.
        scale: the factor of the scores of a layer, from the size of a head.
        softcap: the entry for the bound of the scores.
        sinks: whether heads have sinks.
        gate: whether outputs are gated.
        unsupported: why no layer of regard computes one.
        ignored: entries that transformers does not use, or only outside of attention.
        remarks: sentences about such a file.
    """

    attention: str
    names: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    builders: Mapping[str, Builder] = field(default_factory=lambda: {FULL: plain_layer})
    kinds: Kinds = full
    typed: bool = False
    window: Callable[[Keys], int | None] = lambda keys: keys.optional_size("sliding_window")
    kv_heads: Callable[[Keys], int] = _few_heads
    bias: Callable[[Keys], tuple[str, ...]] = lambda keys: (
        QKVO if keys.flag("attention_bias") else ()
    )
    qk_norm: Callable[[Keys], Literal["head", "width"] | None] = NONE
    rope: Callable[["Architecture", Keys, str, int], Any] = one_rope
    rotates: Callable[[Keys, list[str]], list[bool]] = lambda keys, kinds: [True] * len(kinds)
    pairing: Callable[[Keys], Pairing] = HALVES
    renamed_ropes: Mapping[str, str] = field(default_factory=dict)
    causal: Callable[[Keys], bool] = TRUE
    keys_of: Callable[[Keys, list[str]], list[int | None]] = lambda keys, kinds: [None] * len(kinds)
    numbered: Callable[[Keys], bool] = FALSE
    scale: Callable[[Keys, int, Place], float | None] = NONE
    softcap: str = ""
    sinks: bool = False
    gate: Literal["head", "channel"] | None = None
    unsupported: Callable[[Keys, Place], str] = EMPTY
    ignored: frozenset[str] = frozenset()
    remarks: Callable[[Keys], tuple[str, ...]] = NOTHING

    def kinds_of_layers(self, keys: Keys) -> list[str]:
        """The kind of each layer.

        Raises:
            CheckpointError: for a kind that this architecture does not have.
        """
        count = keys.layers()
        known = tuple(self.builders)
        names = (*known, *(old for old, new in OLD_KINDS.items() if new in known))
        given = keys.words("layer_types", names, count) if self.typed else None
        if given is None:
            return self.kinds(keys, count)
        return [OLD_KINDS.get(kind, kind) for kind in given]

    def layers(self, keys: Keys) -> tuple[LayerShape, ...]:
        """The layers that the entries describe.

        Raises:
            CheckpointError: naming the entry that is missing, wrong or unknown.
        """
        kinds = self.kinds_of_layers(keys)
        numbered = self.numbered(keys)
        places = [
            Place(kind, rotated, shared, at + 1 if numbered else 1)
            for at, (kind, rotated, shared) in enumerate(
                zip(kinds, self.rotates(keys, kinds), self.keys_of(keys, kinds), strict=True)
            )
        ]
        made = {
            place: self.builders[place.kind](self, keys, place) for place in dict.fromkeys(places)
        }
        return tuple(made[place] for place in places)


def inverse_root(entry: str) -> Callable[[Keys, int, Place], float | None]:
    """The scale `entry ** -0.5`; None where that is the usual one."""

    def scale(keys: Keys, head_dim: int, place: Place) -> float | None:
        value = keys.number(entry)
        if value <= 0:
            raise keys.refused(entry, "above 0", value)
        return None if value == head_dim else math.pow(value, -0.5)

    return scale
