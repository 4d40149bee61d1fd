"""Gradient steps on one converted layer, towards the outputs that it should have.

Fits in closed form choose one matrix at a time, for errors that are small. At a quarter of the
cache they are not small, and projections can still make up for each other: queries for keys that
are not exact, keys for a rotation that was left out. So the projections before the attention take
some steps together, on the same text. Layers are trained one after the other, each on the inputs
that it has behind the converted ones: no step needs more than one layer.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.convert.linear import linear_of, weight_and_bias

PASSES = 4  # over the text: on other texts, DeepSeek's form of half of SmolLM2's cache has 1.154 of
# the perplexity after two passes, 1.129 after four and 1.122 after eight, which take twice as long
# (`benchmarks/elsewhere.py --many-kinds --passes 8`)
RATE = 3e-3  # first size of a step, as a share of a matrix's root mean square
WARM = 4  # steps in which it grows to that: the first directions of Adam are those of one window
DECAYS = (0.9, 0.99)  # of Adam's means: a layer takes some dozens of steps in all


def refine(
    layer: nn.Module, x: Float[Tensor, "N L E"], target: Float[Tensor, "N L E"], *, passes: int
) -> None:
    """Train the projections before the attention, so that outputs over `x` are nearer to `target`.

    A step is one window; windows come in a random order that is always the same. Projections that
    the layer shares with its model are copied first. `o_proj` is not trained: `refit_output` has
    its best value in closed form.

    Args:
        layer: a converted layer, changed in place; it is trained in float32 at least.
        x: its inputs over some text.
        target: the outputs that it should have.
        passes: over the windows.

    Examples:
        >>> import torch
        >>> from regard import Attention
        >>> from regard.convert.lossy.refining import refine
        >>> layer, other, x = Attention(8, 2), Attention(8, 2), torch.randn(4, 16, 8)
        >>> wanted = other(x).detach()
        >>> before = (layer(x) - wanted).norm()
        >>> refine(layer, x, wanted, passes=9)
        >>> bool((layer(x) - wanted).norm() < before)
        True
    """
    names = [n for n, each in layer.named_children() if isinstance(each, nn.Linear)]
    names.remove("o_proj")
    own = x.dtype
    with torch.inference_mode(False), torch.enable_grad():
        for name in names:
            weight, bias = weight_and_bias(layer, name)
            setattr(layer, name, linear_of(weight.detach().clone(), bias))
        layer.to(wide := torch.promote_types(own, torch.float32))
        _train(layer, names, x.to(wide, copy=True), target.to(wide, copy=True), passes)
        layer.to(own)


def _train(layer: nn.Module, names: list[str], x: Tensor, target: Tensor, passes: int) -> None:
    weights = [layer.get_parameter(f"{name}.weight") for name in names]
    rates = [RATE * float(each.detach().square().mean().sqrt()) for each in weights]
    groups = [{"params": [weight], "lr": rate} for weight, rate in zip(weights, rates, strict=True)]
    adam = torch.optim.Adam(groups, betas=DECAYS)
    chance = torch.Generator("cpu").manual_seed(0)
    order = torch.cat([torch.randperm(len(x), generator=chance) for _ in range(passes)]).tolist()
    whole = target.square().mean().clamp_min(1e-30)
    for step, at in enumerate(order):
        share = min(1.0, (step + 1) / WARM) * (1.0 - step / len(order))
        for group, rate in zip(adam.param_groups, rates, strict=True):
            group["lr"] = share * rate
        error = (layer(x[at : at + 1]) - target[at : at + 1]).square().mean() / whole
        for weight, slope in zip(weights, torch.autograd.grad(error, weights), strict=True):
            weight.grad = slope
        adam.step()
    for weight in weights:
        weight.grad = None
