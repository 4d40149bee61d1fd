"""The output projection fitted anew to what a converted layer really computes."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.convert.linear import linear_of, numbers_of

RIDGE = 0.1  # of the mean energy of a channel: how strongly the old projection is held on to


@torch.no_grad()
def refit_output(
    layer: nn.Module,
    x: Float[Tensor, "N L E"],
    target: Float[Tensor, "N L E"],
    *,
    ridge: float = RIDGE,
) -> tuple[float, float]:
    """Replace `layer.o_proj` by the one whose output over `x` is nearest to `target`.

    Ridge regression towards the projection it has: where the text says little, little changes.
    Returns the share of the target's energy that was missed before, and that is missed now.
    """
    old, offset = numbers_of(layer, "o_proj")
    weight = old.double()
    gram = weight.new_zeros(weight.shape[1], weight.shape[1])
    cross, missed, whole = torch.zeros_like(weight), 0.0, 0.0
    for window, wanted in zip(x, target, strict=True):
        merged, out = _passing(layer, window[None])
        short = wanted - out
        gram += (merged.mT @ merged).double()
        cross += (short.mT @ merged).double()
        missed += float(short.double().square().sum())
        whole += float(wanted.double().square().sum())
    held = ridge * gram.diagonal().mean()
    change = torch.linalg.solve(gram + held * torch.eye(len(gram)).to(gram), cross.mT).mT
    layer.o_proj = linear_of((weight + change).to(old.dtype), offset)
    gained = 2 * (change * cross).sum() - ((change @ gram) * change).sum()
    return missed / whole, (missed - float(gained)) / whole


def _passing(layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """What the output projection reads and puts out."""
    seen: list[Tensor] = []
    hook = layer.get_submodule("o_proj").register_forward_pre_hook(
        lambda module, given: seen.append(given[0])
    )
    try:
        out: Tensor = layer(x)
    finally:
        hook.remove()
    return seen[0][0], out[0]
