"""Linear layers made of given numbers, and read back as numbers."""

import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn

from regard.hf.loading.offloaded import fetched, only_offloaded
from regard.layers.attention import Attention
from regard.layers.construct import matrix_objection


def linear_of(weight: Float[Tensor, "O I"], bias: Float[Tensor, " O"] | None = None) -> nn.Linear:
    """A linear layer whose parameters are these.

    >>> import torch
    >>> linear_of(torch.eye(2))(torch.ones(2))
    tensor([1., 1.], grad_fn=<SqueezeBackward4>)
    """
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    made.weight = nn.Parameter(weight)
    if bias is not None:
        made.bias = nn.Parameter(bias)
    return made


def numbers_of(module: nn.Module, name: str) -> tuple[Tensor, Tensor | None]:
    """The weight and the bias of a plain linear layer, from the disk if they were left there.

    Raises:
        ValueError: if calling it does more than these say: adapters, quantised layers, hooks.
    """
    linear = module.get_submodule(name)
    objection = None if only_offloaded(linear) else matrix_objection(linear)
    if objection is not None:
        raise ValueError(
            f"{name} {objection}; only a plain nn.Linear can be converted: merge adapters, undo "
            "quantisation and remove hooks first"
        )
    assert isinstance(linear, nn.Linear)
    bias = None if linear.bias is None else fetched(linear, "bias")
    return fetched(linear, "weight"), bias


def rows_of(layer: nn.Module, name: str) -> Float64[Tensor, "R E1"]:
    """A projection's weight in float64, with its bias (or zeros) as one more column."""
    weight, bias = numbers_of(layer, name)
    column = weight.new_zeros(len(weight)) if bias is None else bias
    return torch.cat([weight, column[:, None]], dim=1).double()


JOINT_LATENT = "a joint latent of keys and values"
HELD = {  # by target: the features that it has a place for
    JOINT_LATENT: {"qk_norm", "softcap"},
    "DeepSeek's MLA": set(),
    "an aligned merge": {"softcap"},
}


def refuse_unheld(layer: Attention, target: str) -> None:
    """Raise a ValueError if the layer has a feature that `target`, a key of `HELD`, has no place
    for. The error names what can be done instead."""
    has = {
        "qk_norm": layer.k_norm is not None,
        "gate": layer.gate_proj is not None,
        "sinks": layer.sinks is not None,
        "context_size": layer.context_size != layer.hidden_size,
        "softcap": layer.softcap is not None,
    }
    features = {name for name, given in has.items() if given}
    unheld = features - HELD[target]
    if not unheld:
        return
    out = "a quantised cache does: regard.hf.cache(model, 'quantized', bits=8)"
    if features <= HELD[JOINT_LATENT]:
        out = f"{JOINT_LATENT} does: to='mla' with a budget, or to='mla:RANK'; {out}"
    names = ", ".join(name for name in has if name in unheld)
    raise ValueError(
        f"{target} has no place for {names}, which this layer has; to save memory, {out}"
    )
