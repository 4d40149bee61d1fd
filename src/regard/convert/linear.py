"""Linear layers made of given numbers, and read back as numbers."""

from jaxtyping import Float
from torch import Tensor, nn


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
    """The weight and the bias of a plain linear layer.

    Raises:
        ValueError: if it is something else: adapters and quantised layers are not plain numbers.
    """
    linear = module.get_submodule(name)
    if type(linear) is not nn.Linear:
        raise ValueError(
            f"{name} is a {type(linear).__name__}; only a plain nn.Linear can be converted: "
            "merge adapters and undo quantisation first"
        )
    return linear.weight.detach(), None if linear.bias is None else linear.bias.detach()
