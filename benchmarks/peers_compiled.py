"""torch's compiler: FlexAttention and SDPA, compiled for each shape by a C++ compiler."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from problems import Problem, Run
from torch import Tensor


def _flex(given: Problem) -> Run | None:
    """Compiled for this shape, with its block mask made before timing."""
    case = given.case
    if case.latent or case.bits or case.kind in ("backward", "ragged"):
        return None
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, dynamic=False)
    blocks = None
    if case.length > 1:
        keep = given.keep

        def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return i >= j if keep is None else keep[b % keep.shape[0], 0, i, j]

        rows = None if keep is None or keep.shape[0] == 1 else keep.shape[0]
        blocks = create_block_mask(visible, rows, None, case.length, case.keys, device="cpu")
    grouped = case.heads != case.kv_heads
    return lambda: compiled(given.q, *given.cold(), block_mask=blocks, enable_gqa=grouped)


def _sdpa(given: Problem) -> Run | None:
    """What `torch.compile` makes of the call that most models have."""
    case = given.case
    if case.latent or case.bits or case.kind == "backward":
        return None
    torch._dynamo.reset()
    compiled = torch.compile(F.scaled_dot_product_attention, dynamic=False)
    grouped = case.heads != case.kv_heads
    return lambda: compiled(given.q, *given.cold(), enable_gqa=grouped, **given.flags)


PEERS: dict[str, Callable[[Problem], Run | None]] = {
    "FlexAttention": _flex,
    "sdpa, compiled": _sdpa,
}
