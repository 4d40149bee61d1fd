"""The attentions that a model could have, as layers of the same sizes with other keys."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

from regard.heads import shared_rotary_dim
from regard.plan.cache_bytes import POSITION
from regard.plan.shapes import DTYPE_BYTES, LayerShape, ModelShape

FEWER = 3  # smaller numbers of key heads that become rows, the largest first
SHARES = (50, 25)  # per cent of the shipped cache that rows with a latent keep

Change = Callable[[LayerShape], LayerShape]


@dataclass(frozen=True)
class Choice:
    """An attention that every layer of a model could have."""

    key: str  # as users write it
    name: str  # as readers know it
    # of the model with it, in order; windows, chunks and shared keys stay
    layers: tuple[LayerShape, ...]


def choices(model: ModelShape) -> tuple[tuple[Choice, ...], Mapping[str, str]]:
    """The attentions that a model could have, the shipped one first; and why others are missing.

    Layers that cache no keys, as linear attention, stay as they are.

    Examples:
        >>> from regard.plan.candidates import choices
        >>> from regard.plan.shapes import LayerShape, ModelShape
        >>> layer = LayerShape(
        ...     hidden_size=64, num_heads=8, num_kv_heads=4, head_dim=8, v_head_dim=8,
        ...     qk_rope_head_dim=8)
        >>> model = ModelShape(name="m", architecture="llama", layers=(layer,), hidden_size=64)
        >>> found, missing = choices(model)
        >>> [each.name for each in found][:4]
        ['GQA-4, as shipped', 'MHA', 'GQA-2', 'MQA']
        >>> [each.name for each in found][4:]
        ['MLA(24+8), 50 %', 'MLA(12+4), 25 %', 'latent(31), 50 %', 'latent(15), 25 %']
    """
    shipped = Choice("shipped", f"{_named(model.layers)}, as shipped", model.layers)
    found, missing = [shipped], {}
    for key, form, share, change in _changes(model.layers, DTYPE_BYTES[model.dtype]):
        kept = f", {share} %" if share else ""
        try:
            layers = tuple(each if each.state_elements else change(each) for each in model.layers)
        except ValueError as objection:
            missing[form + kept] = str(objection)
            continue
        if layers != model.layers:
            found.append(Choice(key, f"{_named(layers) if share else form}{kept}", layers))
    return tuple(found), missing


def _changes(
    layers: tuple[LayerShape, ...], itemsize: int
) -> Iterator[tuple[str, str, int, Change]]:
    """For each attention: its key, its name, the cache's size as a percentage of the shipped one
    (0 if none is aimed at), and the function that changes a layer, whose numbers have `itemsize`
    bytes."""
    positions = -(-POSITION // itemsize)  # as many numbers take its bytes
    yield "mha", "MHA", 0, lambda layer: _with_heads(layer, layer.num_heads)
    for heads in _fewer_heads(layers):
        yield f"gqa-{heads}", f"GQA-{heads}", 0, partial(_with_heads, heads=heads)
    yield "mqa", "MQA", 0, partial(_with_heads, heads=1)
    joint = partial(_latent, beside=positions)
    for key, form, change in (("deepseek", "MLA", _mla), ("latent", "latent", joint)):
        for share in SHARES:
            yield f"{key}-{share}", form, share, partial(change, share=share)


def _fewer_heads(layers: tuple[LayerShape, ...]) -> list[int]:
    """Divisors of the key heads, above 1 and below their largest number."""
    counts = {layer.num_kv_heads for layer in layers if not layer.state_elements}
    most = max(counts, default=1)
    fitting = [n for n in range(most - 1, 1, -1) if all(c % n == 0 or c <= n for c in counts)]
    return fitting[:FEWER]


def _with_heads(layer: LayerShape, heads: int) -> LayerShape:
    """The layer with another number of key heads; a layer that has fewer keeps its own."""
    if layer.kv_lora_rank is None and heads < layer.num_heads:
        heads = min(heads, layer.num_kv_heads)
    return replace(
        layer,
        num_kv_heads=heads,
        kv_lora_rank=None,
        q_lora_rank=None,
        keys_by_position=False,
        bias=_renamed(layer.bias, keys=("k_proj", "v_proj")),
    )


def _mla(layer: LayerShape, share: int) -> LayerShape:
    """The layer as DeepSeek's MLA: a latent, and beside it one rotary key that all heads share."""
    _refuse(layer, "DeepSeek's MLA", "qk_norm", "gate", "sinks", "softcap", "query_scale")
    own = layer.kind == "MLA"
    rotary = layer.qk_rope_head_dim
    content = layer.head_dim - rotary if own else layer.head_dim
    if rotary and not own:
        smaller = cached_elements(layer) * share / 100
        rotary = shared_rotary_dim(smaller, rotary, layer.num_kv_heads)
    return replace(
        layer,
        num_kv_heads=layer.num_heads,
        head_dim=content + rotary,
        qk_rope_head_dim=rotary,
        kv_lora_rank=_rank(layer, share, rotary),
        keys_by_position=False,
        latent_norm=own and layer.latent_norm,
        bias=layer.bias if own else _renamed(layer.bias, keys=("kv_a_proj_with_mqa", "kv_b_proj")),
    )


def _latent(layer: LayerShape, share: int, beside: int) -> LayerShape:
    """The layer as `LatentKVAttention`: keys and values from one latent, rotated when they are
    read. The position cached beside the latent takes the bytes of `beside` numbers."""
    _refuse(layer, "a joint latent", "gate", "sinks", "query_scale")
    if layer.kind == "MLA" or layer.head_dim != layer.v_head_dim:
        raise ValueError("a joint latent has keys and values of one width, all rotated alike")
    return replace(
        layer,
        kv_lora_rank=_rank(layer, share, beside),
        keys_by_position=True,
        bias=_renamed(layer.bias, keys=("kv_b_proj",)),
    )


def _refuse(layer: LayerShape, target: str, *features: str) -> None:
    """Raise a ValueError if the layer has a feature that the target has not."""
    if found := [name for name in features if getattr(layer, name)]:
        raise ValueError(f"{target} has no place for {', '.join(found)}")


def _renamed(bias: tuple[str, ...], keys: tuple[str, ...]) -> tuple[str, ...]:
    """The projections with a bias after a change: those of keys and values have other names."""
    renamed: list[str] = []
    for name in bias:
        of_keys = name.startswith(("k_", "v_", "kv_"))
        query = "q_proj" if name.startswith("q_") else name
        renamed += keys if of_keys else (query,)
    return tuple(dict.fromkeys(renamed))


def _rank(layer: LayerShape, share: int, beside: int) -> int:
    """The rank whose cache, with all that is beside the latent, is that share of the layer's."""
    elements = cached_elements(layer)
    rank = elements * share // 100 - beside
    if rank < 1:
        raise ValueError(
            f"{share} % of {elements} elements a token is no more than the {beside} beside a latent"
        )
    return min(rank, layer.hidden_size)


def cached_elements(layer: LayerShape) -> int:
    """The number of elements that a layer caches for each token."""
    if layer.kv_lora_rank is not None:
        return layer.kv_lora_rank + (0 if layer.keys_by_position else layer.qk_rope_head_dim)
    beside = layer.head_dim if layer.tied_channels is None else layer.tied_channels
    return layer.num_kv_heads * (layer.v_head_dim + beside)


def _named(layers: tuple[LayerShape, ...]) -> str:
    """The attention of all layers, as `GQA-4`, or of each kind there is."""
    names = dict.fromkeys(map(_name, layers))
    if len(names) > 2:
        names = dict.fromkeys(layer.kind for layer in layers)
    return " and ".join(names)


def _name(layer: LayerShape) -> str:
    if layer.kind == "GQA":
        return f"GQA-{layer.num_kv_heads}"
    if layer.kind == "MLA":
        return f"MLA({layer.kv_lora_rank}+{layer.qk_rope_head_dim})"
    return f"latent({layer.kv_lora_rank})" if layer.kind == "LatentKV" else layer.kind
