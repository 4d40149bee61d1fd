"""Weights that stay on the disk until they are read: models larger than the memory.

accelerate's hooks fetch a module's weights when it runs and let go of them after. What is not run
but read, by a conversion or a writer, is fetched here.
"""

from typing import Any

from torch import Tensor, nn


def is_offloaded(model: nn.Module) -> bool:
    """Whether any weight is not in memory."""
    return any(parameter.is_meta for parameter in model.parameters())


def only_offloaded(module: nn.Module) -> bool:
    """Whether all that accelerate's hook adds to calling a module is to bring its weights."""
    own = vars(module)
    hook, old = own.get("_hf_hook"), own.get("_old_forward")
    return type(hook).__name__ == "AlignDevicesHook" and (
        getattr(old, "__func__", None) is type(module).forward
    )


def fetched(module: nn.Module, name: str) -> Tensor:
    """A tensor of a module's own, from the disk if that is where it is.

    Raises:
        ValueError: if it is nowhere: a module on the meta device has no numbers.

    >>> fetched(nn.Linear(2, 3), "bias").shape
    torch.Size([3])
    """
    tensor: Tensor = getattr(module, name)
    if not tensor.is_meta:
        return tensor.detach()
    hook: Any = getattr(module, "_hf_hook", None)
    held = getattr(hook, "weights_map", None)
    if held is None:
        raise ValueError(
            f"{name} of {type(module).__name__} is on the meta device: it has no numbers"
        )
    read: Tensor = held[name]
    return read
