"""The rank of each layer's latent within a total, by how much the model's predictions depend on it.

A direction that a latent leaves out changes the layer's outputs by an energy that is known
(`energies_of`). How much an error of the outputs costs differs by layer: to second order, the
divergence of the predictions is half the mean of `(g^T e)^2` over the gradients g of the
log-likelihood of tokens drawn from the predictions (the Fisher information). One backward pass of
the model over some text gives it for all layers. The total then goes to the dearest directions.
"""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float64, Int
from torch import Tensor, nn

from regard.convert.recording import first

SMALLEST = 4  # a rank is at least the mean rank divided by this


def importance(
    model: nn.Module, attentions: Sequence[nn.Module], windows: Int[Tensor, "N L"]
) -> Float64[Tensor, " layers"]:
    """The mean square of the gradient of the predictions' log-likelihood by each layer's outputs.

    Args:
        model: a causal language model of transformers; it is not changed.
        attentions: its attention modules, in the order in which they run.
        windows: a thousand tokens of calibration text are enough.
    """
    chance = torch.Generator("cpu").manual_seed(0)
    found = torch.zeros(len(attentions), dtype=torch.float64, device="cpu")
    for window in windows.split(1):
        outs: list[Tensor] = []
        hooks = [each.register_forward_hook(_following(outs)) for each in attentions]
        with torch.inference_mode(False), torch.enable_grad():
            try:
                logits = model(input_ids=window.clone(), use_cache=False).logits[0].float()
            finally:
                for hook in hooks:
                    hook.remove()
            likelihood = logits.log_softmax(-1)
            drawn = torch.multinomial(likelihood.detach().exp().cpu(), 1, generator=chance)
            chosen = likelihood.gather(1, drawn.to(likelihood.device)).sum()
        gradients = torch.autograd.grad(chosen, outs)
        found += torch.stack([each.double().square().mean().cpu() for each in gradients])
    return found / len(windows)


def _following(outs: list[Tensor]) -> Callable[..., object]:
    """A hook that keeps the outputs of a module, of which gradients are wanted."""

    def hook(module: nn.Module, args: object, out: object) -> object:
        value = first(out)
        outs.append(value if value.requires_grad else value.detach().requires_grad_())
        return (outs[-1], *out[1:]) if isinstance(out, tuple) else outs[-1]

    return hook


def allot(costs: Sequence[Float64[Tensor, " R"]], mean: int) -> list[int]:
    """A rank for each layer, with the sum of `mean` for each, and the least cost of the rest.

    Args:
        costs: for each layer, the cost of leaving out each direction, the largest first.
        mean: the mean of the ranks.

    Raises:
        ValueError: if there are not so many directions.

    Examples:
        >>> import torch
        >>> allot([torch.tensor([4.0, 3, 2]).double(), torch.tensor([1, 0.5, 0.2]).double()], 2)
        [3, 1]
    """
    total, most = mean * len(costs), sum(map(len, costs))
    if total > most:
        raise ValueError(
            f"latents of mean rank {mean} have {total} directions, of which are {most}"
        )
    ranks = [max(1, mean // SMALLEST)] * len(costs)
    dearest = sorted(
        ((float(cost), layer) for layer, each in enumerate(costs) for cost in each[ranks[layer] :]),
        reverse=True,
    )
    for _, layer in dearest[: total - sum(ranks)]:
        ranks[layer] += 1
    return ranks
