"""Parameters of a layer of attention on one rank, as matrices and vectors by their names."""

from functools import reduce
from operator import add

from regard.plan.formula import Formula, number
from regard.plan.shapes import LayerShape
from regard.plan.sizes import (
    HEAD,
    HIDDEN,
    KEY_HEADS,
    LATENT,
    QUERY_HEADS,
    QUERY_LATENT,
    ROTARY,
    VALUE,
)


def parameters(layer: LayerShape) -> Formula:
    """The number of parameters: projections, biases, norms, sinks and gates, as regard's layers
    have them.

    A layer with `keys_of` has neither projections nor norms of keys and values. With `tp` ranks
    these are the parameters of one rank; projections to latents, and what is added to the hidden
    states, are on each of them.

    Args:
        layer: of any kind but linear attention.

    Raises:
        ValueError: for linear attention, or if `bias` names no projection of the layer.

    Examples:
        >>> from regard import GroupedQueryAttention
        >>> from regard.plan.cost import parameters, sizes
        >>> from regard.plan.shapes import STORAGES, LayerShape
        >>> gqa = LayerShape(hidden_size=64, num_heads=8, num_kv_heads=2, head_dim=8, v_head_dim=8)
        >>> count = parameters(gqa).evaluate(**sizes(gqa, STORAGES["plain"], context=0))
        >>> count == sum(each.numel() for each in GroupedQueryAttention(64, 8, 2).parameters())
        True
    """
    return total([*matrices(layer).values(), *vectors(layer).values()])


def total(terms: list[Formula]) -> Formula:
    """The sum of the terms; 0 if there are none."""
    return reduce(add, terms) if terms else number(0)


def matrices(layer: LayerShape) -> dict[str, Formula]:
    """The elements of the weight of each projection, inputs times outputs.

    Args:
        layer: of any kind but linear attention.

    Raises:
        ValueError: for linear attention.
    """
    inputs, outputs = _inputs(layer), _outputs(layer)
    return {name: inputs[name] * outputs[name] for name in outputs}


def vectors(layer: LayerShape) -> dict[str, Formula]:
    """The elements of biases, norms and sinks.

    Args:
        layer: of any kind but linear attention.

    Raises:
        ValueError: for linear attention, or if `bias` names no projection of the layer.
    """
    outputs = _outputs(layer)
    known = [name for name in _PROJECTIONS if name in outputs]
    unknown = sorted(set(layer.bias) - set(known))
    if unknown:
        raise ValueError(f"bias names {', '.join(unknown)}; this layer has {', '.join(known)}")
    biases = {f"{name}.bias": outputs[name] for name in layer.bias}
    return biases | _norms(layer) | ({"sinks": QUERY_HEADS} if layer.sinks else {})


def check_known(layer: LayerShape) -> None:
    """Raise for linear attention: its projections do not follow from the sizes of a layer."""
    if layer.kind == "linear":
        raise ValueError(
            "projections of linear attention do not follow from its sizes; only cache_bytes and "
            "allocated_bytes are known of it"
        )


_PROJECTIONS = (  # those that may have a bias
    *("q_proj", "q_a_proj", "q_b_proj"),
    *("k_proj", "v_proj", "kv_a_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
)


def _outputs(layer: LayerShape) -> dict[str, Formula]:
    """The output channels of each projection, by name."""
    check_known(layer)
    found = {"q_proj": QUERY_HEADS * HEAD}
    if layer.q_lora_rank is not None:
        found = {"q_a_proj": QUERY_LATENT, "q_b_proj": QUERY_HEADS * HEAD}
    if layer.keys_of is None:
        found |= _key_outputs(layer)
    found["o_proj"] = HIDDEN
    if layer.gate is not None:
        found["gate_proj"] = QUERY_HEADS if layer.gate == "head" else QUERY_HEADS * VALUE
    return found


def _key_outputs(layer: LayerShape) -> dict[str, Formula]:
    if layer.kind == "MLA":
        return {
            "kv_a_proj_with_mqa": LATENT + ROTARY,
            "kv_b_proj": QUERY_HEADS * (HEAD - ROTARY + VALUE),
        }
    if layer.kind == "LatentKV":
        return {"kv_a_proj": LATENT, "kv_b_proj": KEY_HEADS * (HEAD + VALUE)}
    return {"k_proj": KEY_HEADS * HEAD, "v_proj": KEY_HEADS * VALUE}


def _inputs(layer: LayerShape) -> dict[str, Formula]:
    """The input channels of each projection, by name."""
    others = {"q_b_proj": QUERY_LATENT, "kv_b_proj": LATENT, "o_proj": QUERY_HEADS * VALUE}
    return {name: others.get(name, HIDDEN) for name in _outputs(layer)}


def _norms(layer: LayerShape) -> dict[str, Formula]:
    found: dict[str, Formula] = {}
    own_keys = layer.keys_of is None
    if layer.kind == "MLA" and layer.latent_norm:
        if layer.q_lora_rank is not None:
            found["q_a_layernorm"] = QUERY_LATENT
        if own_keys:
            found["kv_a_layernorm"] = LATENT
    if layer.qk_norm is not None:
        each_head = layer.qk_norm == "head"
        found["q_norm"] = HEAD if each_head else QUERY_HEADS * HEAD
        if own_keys:
            found["k_norm"] = HEAD if each_head else KEY_HEADS * HEAD
    return found
