"""Sizes of a layer of attention, of a cache's storage and of a model: what costs follow from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal

from regard.cache.paging.formats import PageFormat
from regard.names import PAGES, UNCHANGED
from regard.words import one_of

Kind = Literal["MHA", "GQA", "MQA", "MLA", "LatentKV", "linear"]
DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
MOST = {  # the largest numbers that are accepted: sums of bytes stay below 2**63 for real models
    "context": 10**12,
    "batch": 10**9,
    "tp": 10**6,
    "cp": 10**4,
    "page_size": 10**6,
    "block": 10**6,
}


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """The sizes of one layer of attention.

    Args:
        hidden_size: channels of the hidden states.
        num_heads: query heads.
        num_kv_heads: key heads; of MLA as many as query heads, since keys are expanded for each.
        head_dim: channels of a query or key, of MLA those without RoPE and those with it together.
        v_head_dim: channels of a value.
        kv_lora_rank: channels of the latent that keys and values are computed from; None without.
        q_lora_rank: channels of the latent that queries are computed from; None without.
        qk_rope_head_dim: of MLA, channels of the key that carries RoPE and is cached beside the
            latent; of other layers the channels of a head that are rotated.
        keys_by_position: of a latent layer whose keys are rotated when they are read: its cache
            holds the latent and an integer position (`LatentKVAttention`). Of tied keys, whether
            the cache holds positions.
        tied_channels: of a layer whose keys are its values, scaled and rotated (`TiedKVAttention`):
            channels of a key that are cached beside its value; None for keys of their own.
        window: keys a query can see at most, its own included; None without a window.
        chunk: size of the chunks outside which nothing is visible; None without.
        causal: whether later keys are hidden.
        keys_of: the index of the layer whose keys and values this one uses; it caches none itself.
            -1 for a layer by itself, whose model is not known.
        state_elements: of linear attention and other recurrent layers: numbers of a row's state,
            which does not grow with the context.
        bias: names of the projections that have a bias.
        qk_norm: `"head"` or `"width"` if queries and keys are normalised; None if not.
        latent_norm: of MLA, whether the latents are normalised.
        sinks: whether each head has a learned sink.
        gate: `"head"` or `"channel"` if outputs are gated; None if not.
        softcap: the bound of the scores; None without.
        scale: the factor of the scores; None for `head_dim ** -0.5`.
        query_scale: the code of the factor of queries by their positions, as `PositionScale(0.1,
            8192)`; `""` without.
        rope: the code of the rotary embedding, as `Rotary(64, theta=500000.0)`; `""` without RoPE.
        extra_parameters: those of a module of transformers that do not follow from these sizes.
        unsupported: why no layer of regard computes this one; `""` if one does.

    Examples:
        >>> from regard.plan import LayerShape
        >>> sizes = {"hidden_size": 64, "num_heads": 8, "head_dim": 8, "v_head_dim": 8}
        >>> LayerShape(**sizes, num_kv_heads=2).kind, LayerShape(**sizes, num_kv_heads=1).kind
        ('GQA', 'MQA')
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    kv_lora_rank: int | None = None
    q_lora_rank: int | None = None
    qk_rope_head_dim: int = 0
    keys_by_position: bool = False
    tied_channels: int | None = None
    window: int | None = None
    chunk: int | None = None
    causal: bool = True
    keys_of: int | None = None
    state_elements: int = 0
    bias: tuple[str, ...] = ()
    qk_norm: Literal["head", "width"] | None = None
    latent_norm: bool = True
    sinks: bool = False
    gate: Literal["head", "channel"] | None = None
    softcap: float | None = None
    scale: float | None = None
    query_scale: str = ""
    rope: str = ""
    extra_parameters: int = 0
    unsupported: str = ""

    @property
    def kind(self) -> Kind:
        """The usual name of the attention."""
        if self.state_elements:
            return "linear"
        if self.kv_lora_rank is not None:
            return "LatentKV" if self.keys_by_position else "MLA"
        if self.num_kv_heads == self.num_heads:
            return "MHA"
        return "MQA" if self.num_kv_heads == 1 else "GQA"

    @property
    def latent(self) -> int:
        """Channels of the latent; 0 without one."""
        return self.kv_lora_rank or 0

    def within_window(self, tokens: int) -> int:
        """The tokens, or those of the window if they are fewer."""
        return tokens if self.window is None else min(tokens, self.window)


@dataclass(frozen=True)
class Storage:
    """The storage of keys and values in a cache.

    Args:
        name: as users write it: `"plain"`, `"int8"`, `"K8V4"`...
        key_bits: bits of a number of a key or latent; None for the dtype's own.
        value_bits: the same for values.
        group: channels that share a scale and a zero; 0 without.
        page_size: tokens of a page; 0 for a cache that is not in pages. A row's first page and its
            last one, while it is not full, are in the dtype's own bits.

    Examples:
        >>> from regard.plan import STORAGES, Storage
        >>> STORAGES["int8"] == Storage("int8", key_bits=8, value_bits=8, group=64)
        True
        >>> list(STORAGES)
        ['plain', 'int8', 'int4', 'K8V8', 'K8V4', 'K6V4', 'K4V4']
    """

    name: str
    key_bits: int | None = None
    value_bits: int | None = None
    group: int = 0
    page_size: int = 0

    @property
    def bits(self) -> tuple[int, ...]:
        """The bits of keys and of values; none where both have the dtype's own."""
        return tuple(each for each in (self.key_bits, self.value_bits) if each is not None)

    @property
    def shares_scales(self) -> bool:
        """Whether the tokens of a page share the scales of their keys, or of their latents."""
        form = PageFormat(self.name, self.key_bits, self.value_bits)
        return self.page_size > 0 and form.shares(0, self.page_size)[0] > 1


STORAGES = {
    each.name: each
    for each in (
        Storage("plain"),
        Storage("int8", 8, 8, 64),
        Storage("int4", 4, 4, 32),
        Storage("K8V8", 8, 8, 64),
        Storage("K8V4", 8, 4, 64),
        Storage("K6V4", 6, 4, 64),
        Storage("K4V4", 4, 4, 64),
    )
}
USUAL = ("plain", "int8", "K8V4", "K6V4", "int4")  # K8V8 has the bytes of int8


def storages_of(names: Sequence[str] = (), page_size: int = 0) -> tuple[Storage, ...]:
    """The storages of these names of `STORAGES`, in upper or lower case, those of `UNCHANGED` being
    plain; the usual ones if there are none. Raises a ValueError if a name is not known, or pages
    have no such format.

    Examples:
        >>> from regard.plan.shapes import storages_of
        >>> [each.name for each in storages_of()], storages_of(["K4V4"], page_size=64)[0].page_size
        (['plain', 'int8', 'K8V4', 'K6V4', 'int4'], 64)
    """
    known = PAGES if page_size else tuple(STORAGES)
    kind = "format of pages" if page_size else "storage"
    named = [one_of(kind, name, (*known, *UNCHANGED)) for name in names]
    chosen = ["plain" if name in UNCHANGED else name for name in named]
    chosen = [*dict.fromkeys(chosen or (PAGES if page_size else USUAL))]
    return tuple(replace(STORAGES[name], page_size=page_size) for name in chosen)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A prefill of `context` tokens, or one step after them: rows, dtype, and ranks that share it.

    With `tp` ranks of tensor parallelism a rank has its share of the key heads, rounded up, and the
    query heads that these serve; ranks that have the same key head share its query heads, rounded
    up (`regard.distributed.tensor_parallel`). A latent is on every rank. With `cp` ranks of context
    parallelism a rank has its share of the tokens, rounded up.

    Raises:
        ValueError: if a number is not a whole one in its range, or the dtype is not known.

    Examples:
        >>> from regard.plan.shapes import Workload
        >>> work = Workload(context=100, dtype="bfloat16", cp=8)
        >>> work.tokens, work.itemsize  # of a rank; bytes of a number
        (13, 2)
    """

    context: int  # tokens in the cache, or of the prefill
    batch: int = 1  # rows
    # of the cache, the weights and the hidden states; a key of `DTYPE_BYTES`
    dtype: str = "float32"
    tp: int = 1  # ranks of tensor parallelism
    cp: int = 1  # ranks of context parallelism

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype={self.dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
        for name, least in (("context", 0), ("batch", 1), ("tp", 1), ("cp", 1)):
            check_whole(name, getattr(self, name), least, MOST[name])

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""
        return DTYPE_BYTES[self.dtype]

    @property
    def tokens(self) -> int:
        """Tokens of a rank."""
        return ceil_div(self.context, self.cp)

    def key_heads(self, layer: LayerShape) -> int:
        """Key heads of a rank."""
        return ceil_div(layer.num_kv_heads, self.tp)

    def query_heads(self, layer: LayerShape) -> int:
        """Query heads of a rank."""
        group = ceil_div(layer.num_heads, layer.num_kv_heads)  # that a key head serves
        return self.key_heads(layer) * ceil_div(group, replicas(layer.num_kv_heads, self.tp))


def check_whole(name: str, value: int, least: int, most: int = 10**18) -> None:
    """Raise a ValueError unless the value is a whole number in its range; larger ones than `most`
    are taken for errors."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"{name} is a whole number from {least} to {most:,}, got {value!r}")


def ceil_div(value: int, divisor: int) -> int:
    """The quotient, rounded up to a whole number."""
    return -(-value // divisor)


@cache
def replicas(num_kv_heads: int, tp: int) -> int:
    """Ranks that have the same key heads: as many as let every key head have ranks of its own.

    The ranks that the heads are divided among are in sets of equal size.

    Examples:
        >>> from regard.plan.shapes import replicas
        >>> [replicas(2, tp) for tp in (1, 2, 4, 6, 7)]
        [1, 1, 2, 3, 1]
    """
    most = max(1, tp // num_kv_heads)
    return next(n for n in range(most, 0, -1) if tp % n == 0)


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The layers of a model's attention, and what else a plan needs of it.

    Args:
        name: of the folder or file.
        architecture: `model_type` of a configuration, `general.architecture` of a GGUF.
        layers: in order.
        hidden_size: channels of the hidden states.
        dtype: of the cache if nothing else is asked for, as `"bfloat16"`.
        max_positions: the context the model was made for; None if it does not say.
        weight_bytes: of the files of weights; None if there are none.
        remarks: sentences that a reader of the description needs, in order.

    Examples:
        >>> from regard.plan import LayerShape, ModelShape
        >>> layer = LayerShape(
        ...     hidden_size=64, num_heads=8, num_kv_heads=2, head_dim=8, v_head_dim=8)
        >>> model = ModelShape(
        ...     name="mine", architecture="llama", layers=3 * (layer,), hidden_size=64)
        >>> model.distinct() == {layer: (0, 1, 2)}
        True
    """

    name: str
    architecture: str
    layers: tuple[LayerShape, ...]
    hidden_size: int
    dtype: str = "float32"
    max_positions: int | None = None
    weight_bytes: int | None = None
    remarks: tuple[str, ...] = field(default=())

    def distinct(self) -> Mapping[LayerShape, tuple[int, ...]]:
        """The different layers, each with the indices of those that are alike, in order."""
        indices: dict[LayerShape, list[int]] = {}
        for index, layer in enumerate(self.layers):
            indices.setdefault(layer, []).append(index)
        return {layer: tuple(alike) for layer, alike in indices.items()}
