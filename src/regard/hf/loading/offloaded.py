"""Weights that stay on the disk until they are read: for models larger than the memory.

accelerate's hooks load a module's weights when it runs, and free them afterwards. Conversions and
writers read weights without running the module: they use `fetched`.
"""

from torch import Tensor, nn


def only_offloaded(module: nn.Module) -> bool:
    """Whether accelerate's hook loads the weights of a module, and does nothing else."""
    own = vars(module)
    hook, old = own.get("_hf_hook"), own.get("_old_forward")
    return type(hook).__name__ == "AlignDevicesHook" and (
        getattr(old, "__func__", None) is type(module).forward
    )


def fetched(module: nn.Module, name: str) -> Tensor:
    """A parameter or buffer of a module, read from the disk if it is offloaded. Raises a ValueError
    if it is on the meta device and not offloaded."""
    tensor: Tensor = getattr(module, name)
    if not tensor.is_meta:
        return tensor.detach()
    held = getattr(getattr(module, "_hf_hook", None), "weights_map", None)
    if held is None:
        raise ValueError(
            f"{name} of {type(module).__name__} is on the meta device: it has no values"
        )
    return held[name]
