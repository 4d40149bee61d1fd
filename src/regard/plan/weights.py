"""Parameters of a layer of attention on one rank, as matrices and vectors by their names.

Of a layer on the ranks of a workload. Functions raise a ValueError for linear attention, whose
projections do not follow from its sizes, and if `bias` names no projection of the layer.
"""

from regard.plan.shapes import LayerShape, Workload

_PROJECTIONS = (  # those that may have a bias
    *("q_proj", "q_a_proj", "q_b_proj"),
    *("k_proj", "v_proj", "kv_a_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
)


def parameters(layer: LayerShape, work: Workload) -> int:
    """The number of parameters: projections, biases, norms, sinks and gates, as regard's layers
    have them.

    A layer with `keys_of` has neither projections nor norms of keys and values. With `tp` ranks
    these are the parameters of one rank; projections to latents, and what is added to the hidden
    states, are on each of them.
    """
    counted = sum(matrices(layer, work).values()) + sum(vectors(layer, work).values())
    return counted + layer.extra_parameters


def matrices(layer: LayerShape, work: Workload) -> dict[str, int]:
    """The elements of the weight of each projection, inputs times outputs."""
    inputs = {
        "q_b_proj": layer.q_lora_rank or 0,
        "kv_b_proj": layer.latent,
        "o_proj": work.query_heads(layer) * layer.v_head_dim,
    }
    return {
        name: inputs.get(name, layer.hidden_size) * outputs
        for name, outputs in _outputs(layer, work).items()
    }


def vectors(layer: LayerShape, work: Workload) -> dict[str, int]:
    """The elements of biases, norms and sinks."""
    outputs = _outputs(layer, work)
    known = [name for name in _PROJECTIONS if name in outputs]
    if unknown := sorted(set(layer.bias) - set(known)):
        raise ValueError(f"bias names {', '.join(unknown)}; this layer has {', '.join(known)}")
    biases = {f"{name}.bias": outputs[name] for name in layer.bias}
    sinks = {"sinks": work.query_heads(layer)} if layer.sinks else {}
    return biases | _norms(layer, work) | sinks


def check_known(layer: LayerShape) -> None:
    """Raise for linear attention: its projections do not follow from the sizes of a layer."""
    if layer.kind == "linear":
        raise ValueError(
            "projections of linear attention do not follow from its sizes; only cache_bytes and "
            "allocated_bytes are known of it"
        )


def _outputs(layer: LayerShape, work: Workload) -> dict[str, int]:
    """The number of output channels of each projection, by name."""
    check_known(layer)
    heads = work.query_heads(layer)
    outputs = {"q_proj": heads * layer.head_dim}
    if layer.q_lora_rank is not None:
        outputs = {"q_a_proj": layer.q_lora_rank, "q_b_proj": heads * layer.head_dim}
    if layer.keys_of is None:
        outputs |= _key_outputs(layer, work)
    outputs["o_proj"] = layer.hidden_size
    if layer.gate is not None:
        outputs["gate_proj"] = heads if layer.gate == "head" else heads * layer.v_head_dim
    return outputs


def _key_outputs(layer: LayerShape, work: Workload) -> dict[str, int]:
    if layer.kind == "MLA":
        unrotated = layer.head_dim - layer.qk_rope_head_dim
        return {
            "kv_a_proj_with_mqa": layer.latent + layer.qk_rope_head_dim,
            "kv_b_proj": work.query_heads(layer) * (unrotated + layer.v_head_dim),
        }
    heads = work.key_heads(layer)
    if layer.kind == "LatentKV":
        kv_b = heads * (layer.head_dim + layer.v_head_dim)
        return {"kv_a_proj": layer.latent, "kv_b_proj": kv_b}
    keys = {"k_proj": heads * layer.head_dim}
    return keys if layer.tied_channels is not None else keys | {"v_proj": heads * layer.v_head_dim}


def _norms(layer: LayerShape, work: Workload) -> dict[str, int]:
    norms: dict[str, int] = {}
    own_keys = layer.keys_of is None
    if layer.kind == "MLA" and layer.latent_norm:
        if layer.q_lora_rank is not None:
            norms["q_a_layernorm"] = layer.q_lora_rank
        if own_keys:
            norms["kv_a_layernorm"] = layer.latent
    if layer.qk_norm is not None:
        every = layer.qk_norm == "width"  # all heads together
        norms["q_norm"] = layer.head_dim * (work.query_heads(layer) if every else 1)
        if own_keys:
            norms["k_norm"] = layer.head_dim * (work.key_heads(layer) if every else 1)
    return norms
