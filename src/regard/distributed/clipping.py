"""Clipping gradients of which some are split over ranks."""

from collections import defaultdict

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


def clip_gradients(module: nn.Module, max_norm: float) -> Tensor:
    """Scale a module's gradients so that their norm is at most `max_norm`, as on one device.

    `torch.nn.utils.clip_grad_norm_` takes no mixture of tensors and DTensors, nor DTensors of
    several meshes, which `tensor_parallel` leaves in a model. Every rank calls this, after
    `sum_gradients` if the tokens are split.

    Args:
        module: a model on several ranks.
        max_norm: the largest norm, of all gradients together.

    Returns:
        The norm before, the same on every rank.

    Raises:
        ValueError: if `max_norm` is not positive.

    Examples:
        >>> import torch
        >>> from regard.distributed import clip_gradients
        >>> layer = torch.nn.Linear(2, 1, bias=False)
        >>> layer.weight.grad = torch.tensor([[3.0, 4.0]])
        >>> clip_gradients(layer, 1.0).item(), layer.weight.grad.norm().item() <= 1
        (5.0, True)
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm is above 0, got {max_norm}; 1.0 is usual")
    groups: dict[object, list[nn.Parameter]] = defaultdict(list)
    for each in module.parameters():
        if each.grad is not None:
            groups[each.device_mesh if isinstance(each, DTensor) else None].append(each)
    norms = [_norm(group) for group in groups.values()]
    total = torch.stack(norms).norm() if norms else torch.zeros(())
    for group in groups.values():
        clip_grads_with_norm_(group, max_norm, total)
    return total


def _norm(parameters: list[nn.Parameter]) -> Tensor:
    """The norm of gradients that lie on the same ranks."""
    norm = get_total_norm([each.grad for each in parameters if each.grad is not None])
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
