"""How strongly a layer's outputs react to errors of its keys and values, measured on text.

An error e of the keys and values of one token changes the layer's outputs by J e, J being the
Jacobian of the outputs. The gradient g of their sum with random signs has `E[g g^T] = J^T J`, so
one backward pass estimates the squared change `|J e|^2` of any error, whatever is between keys and
outputs: rotation, norms, softmax, the output projection. Its mean over tokens is the metric of
errors, and tokens that outputs depend on more count more in the covariance of the inputs. Together
they approximate `E[(g^T D x)^2]`, the squared change by an error D of the projections' weights, as
the trace of `metric D covariance D^T` (the factors of K-FAC, Martens and Grosse 2015,
arXiv:1503.05671), of which low-rank approximations are known in closed form.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn
from torch.nn import functional as F

from regard.layers.attention import Attention

SHRINKAGE = 0.1  # of its diagonal, added to the metric: what two channels share is known less well


def sensitivity(
    layer: Attention, inputs: Float[Tensor, "*N L E"], gradients: Float[Tensor, "T R"] | None = None
) -> tuple[Float64[Tensor, "R R"], Float64[Tensor, "E1 E1"]]:
    """The metric of errors of keys stacked on values, and the covariance of the inputs.

    Keys are those before norm and rotation. Tokens of the covariance have the weights of how much
    the outputs depend on them, and a 1 appended for biases.

    Args:
        layer: MHA, GQA or MQA.
        inputs: of the layer over some text; windows of it.
        gradients: of the same tokens, from `gradients_of`; over these inputs if None.

    Examples:
        >>> import torch
        >>> from regard import GroupedQueryAttention
        >>> from regard.convert.lossy.sensitivity import sensitivity
        >>> metric, covariance = sensitivity(GroupedQueryAttention(16, 4, 2), torch.randn(2, 8, 16))
        >>> metric.shape, covariance.shape
        (torch.Size([16, 16]), torch.Size([17, 17]))
    """
    slopes = (gradients_of(layer, inputs) if gradients is None else gradients).double()
    metric = slopes.mT @ slopes / len(slopes)
    metric += SHRINKAGE * metric.diagonal().clamp_min(1e-300).diag()
    lower = torch.linalg.cholesky(metric)
    weights = torch.linalg.solve_triangular(lower, slopes.mT, upper=False).square().sum(0)
    weights = weights / weights.mean() if float(weights.sum()) > 0 else torch.ones_like(weights)
    wide = torch.promote_types(inputs.dtype, torch.float32)
    x = F.pad(inputs.flatten(0, -2).to(wide), (0, 1), value=1.0)
    return metric, ((weights.to(wide)[:, None] * x).mT @ x).double() / len(x)


def gradients_of(layer: Attention, inputs: Float[Tensor, "*N L E"]) -> Float[Tensor, "T R"]:
    """For each token, the gradient of the outputs' sum with random signs by its keys and values.

    Args:
        layer: MHA, GQA or MQA.
        inputs: of the layer over some text; windows of it.

    Examples:
        >>> import torch
        >>> from regard import GroupedQueryAttention
        >>> from regard.convert.lossy.sensitivity import gradients_of
        >>> gradients_of(GroupedQueryAttention(16, 4, 2), torch.randn(2, 8, 16)).shape
        torch.Size([16, 16])
    """
    chance = torch.Generator("cpu").manual_seed(0)
    windows = inputs.reshape(-1, *inputs.shape[-2:])
    return torch.cat([_gradient(layer, window, chance) for window in windows])


def _gradient(layer: Attention, window: Tensor, chance: torch.Generator) -> Tensor:
    """The gradient of the outputs' sum with random signs by the keys and values, `[L, R]`."""
    with torch.inference_mode(False), torch.enable_grad(), keys_and_values(layer) as leaves:
        out = layer(window.clone()[None])  # a tensor of inference mode cannot be saved for backward
        signs = torch.randint(2, out.shape, generator=chance, device="cpu").to(out) * 2 - 1
        return torch.cat(torch.autograd.grad(out, leaves(), signs), -1)[0]


@contextmanager
def keys_and_values(layer: Attention) -> Iterator[Callable[[], tuple[Tensor, Tensor]]]:
    """A function that returns the keys and values of a layer's call in the `with` block, before
    norm and rotation, for their gradients."""
    outs: dict[nn.Module, Tensor] = {}

    def keep(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        return outs.setdefault(module, out if out.requires_grad else out.requires_grad_())

    own = layer.k_proj, layer.v_proj
    hooks = [each.register_forward_hook(keep) for each in own]
    try:
        yield lambda: (outs[own[0]], outs[own[1]])
    finally:
        for hook in hooks:
            hook.remove()
