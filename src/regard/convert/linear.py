"""Linear layers made of given numbers, and read back as numbers."""

import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn

from regard.attention import Attention
from regard.hf.offloaded import fetched


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
        ValueError: if it is something else: adapters and quantised layers are not plain numbers.
    """
    linear = module.get_submodule(name)
    if type(linear) is not nn.Linear:
        raise ValueError(
            f"{name} is a {type(linear).__name__}; only a plain nn.Linear can be converted: "
            "merge adapters and undo quantisation first"
        )
    bias = None if linear.bias is None else fetched(linear, "bias")
    return fetched(linear, "weight"), bias


def rows_of(layer: nn.Module, name: str) -> Float64[Tensor, "R E1"]:
    """A projection's weight in float64, with its bias (or zeros) as one more column."""
    weight, bias = numbers_of(layer, name)
    column = weight.new_zeros(len(weight)) if bias is None else bias
    return torch.cat([weight, column[:, None]], dim=1).double()


def refuse_unheld(layer: Attention, target: str, *, softcap: bool = True) -> None:
    """Raise a ValueError if the layer has what `target` has no place for; `softcap`: it has one."""
    unheld = {
        "qk_norm": layer.k_norm is not None,
        "gate": layer.gate_proj is not None,
        "sinks": layer.sinks is not None,
        "context_size": layer.context_size != layer.hidden_size,
        "softcap": layer.softcap is not None and not softcap,
    }
    if any(unheld.values()):
        names = ", ".join(name for name, given in unheld.items() if given)
        raise ValueError(f"{target} has no place for {names}, which this layer has")
