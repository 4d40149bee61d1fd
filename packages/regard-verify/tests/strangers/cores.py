"""The inner part: from queries, keys and values to their weighted sum, and the weights."""

from strangers.by_hand import by_hand
from strangers.by_kernel import by_kernel
from strangers.inner import Core, sizes

__all__ = ["Core", "write_core"]


def write_core(core: Core) -> list[str]:
    """The lines from q, k, v to `out`; `weights` are there unless torch's kernel is called."""
    if core.drawing.core == "sdpa":
        return [*sizes(core), *by_kernel(core)]
    return [*sizes(core), *by_hand(core)]
