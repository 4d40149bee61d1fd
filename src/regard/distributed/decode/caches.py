"""A cache over ranks for every layer inside a module."""

from collections.abc import Callable

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from regard.cache import Cache, KVCache
from regard.distributed.context.sending import KINDS
from regard.distributed.decode.sharded import ShardedCache


def sharded_caches(
    module: nn.Module,
    mesh: DeviceMesh,
    page_size: int = 64,
    storage: Callable[[], Cache] = KVCache,
) -> dict[str, ShardedCache]:
    """A new `ShardedCache` for every layer of regard inside a module, by the name of the layer.

    Where `tensor_parallel` has split the heads over the same ranks, the queries are gathered, and
    every rank attends to its tokens for all heads (Helix, Bhatia et al. 2025, arXiv:2507.07120). So
    keys shared by several heads, and latents, which tensor parallelism stores on several ranks, are
    stored once. Where the heads are split over another dimension of the mesh, tokens are spread
    over the ranks that have the same heads.

    Args:
        module: a layer of regard, whose name is `""`, or a model that contains some.
        mesh: of one dimension.
        page_size: tokens that follow one another on one rank.
        storage: a function that makes the cache of a rank's tokens.

    Raises:
        TypeError: as `ShardedCache`.
        ValueError: as `ShardedCache`, or if there is no layer of regard.

    Examples:
        >>> from torch import nn
        >>> from regard.distributed import sharded_caches
        >>> try:
        ...     sharded_caches(nn.Linear(8, 8), mesh=None)
        ... except (TypeError, ValueError):
        ...     print("a layer of regard, and a mesh: init_device_mesh('cpu', (2,))")
        a layer of regard, and a mesh: init_device_mesh('cpu', (2,))
    """
    modules = module.named_modules()
    layers: dict[str, nn.Module] = {name: x for name, x in modules if isinstance(x, KINDS)}
    if not layers:
        raise ValueError(
            f"{type(module).__name__} contains no attention layer of regard that could fill a "
            "cache; transformers models take regard.hf.cache(model, 'made', make=...)"
        )
    return {
        name: ShardedCache(mesh, page_size, storage, layer=layer) for name, layer in layers.items()
    }
