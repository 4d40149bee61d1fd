"""Norms of queries and keys as torch's own `nn.RMSNorm`, so that a converted layer can be saved."""

import torch
from torch import nn

from regard.hf.loading.offloaded import fetched


def plain_norm(norm: nn.Module) -> nn.Module:
    """An `nn.RMSNorm` that computes what `norm` does; `norm` itself if it is not an RMS norm.

    Models of transformers bring RMS norms of their own, some of which multiply by `weight` and some
    (Gemma's) by `1 + weight`. Which of the two it is, is found by running it.

    >>> norm = nn.LayerNorm(4)
    >>> plain_norm(norm) is norm
    True
    """
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if type(norm) is nn.RMSNorm or eps is None or getattr(norm, "weight", None) is None:
        return norm
    weight = fetched(norm, "weight")
    wide = weight.float()  # 1 + weight has more digits than a half-precision weight
    for gain in (weight, 1 + wide):
        made = nn.RMSNorm(len(weight), eps=eps, device=weight.device, dtype=gain.dtype)
        made.weight = nn.Parameter(gain)
        if _alike(made, norm, weight):
            return made.train(norm.training)
    return norm


@torch.no_grad()
def _alike(made: nn.Module, norm: nn.Module, weight: torch.Tensor) -> bool:
    """Whether both give the same for numbers of ordinary size and for some as small as epsilon."""
    sizes = torch.tensor([[1.0], [1e-3], [30.0]], device=weight.device)
    x = (sizes * torch.linspace(-2.0, 1.0, len(weight), device=weight.device)).to(weight.dtype)
    one, other = made(x.to(made.get_parameter("weight").dtype)).float(), norm(x).float()
    bound = 8 * torch.finfo(weight.dtype).eps  # half-precision norms round two or three times
    return bool(((one - other).abs() <= bound * (other.abs() + 1e-30)).all())
