"""Decoding over MLA's latents on a GPU: each is read once, as a key and as a value."""

import functools
from importlib.util import find_spec

import torch
from jaxtyping import Float
from torch import Tensor

from regard.heads import fold_heads, unfold_heads
from regard.ops.backends.common import columns_contiguous
from regard.ops.call import Call, is_empty, is_everything, shown
from regard.ops.estimates import LATENTS, on_device
from regard.ops.partial import Partial, merge

_MOST_ROWS = 512  # query rows of a latent: of more, products take longer than reading twice
_WIDEST = 512, 128  # columns of a value, and of the rest of a key: registers hold them
_LEAST = (8, 0)  # compute capability: of an A100
_OPERATORS = 6  # whose start takes as long as that of two kernels of Triton


def objection(call: Call) -> str | None:
    if call.device.type != "cuda":
        return f"latents is for CUDA, got {call.device.type}"
    if is_empty(call):
        return "latents needs at least one query and one visible key"
    return _machine_objection(call.device) or _shape_objection(call) or _option_objection(call)


@functools.cache
def _machine_objection(device: torch.device) -> str | None:
    if find_spec("triton") is None:
        return "latents needs triton, which compiles its kernels for a GPU"
    found = torch.cuda.get_device_capability(device)
    return None if found >= _LEAST else f"latents needs compute capability {_LEAST}, got {found}"


def _shape_objection(call: Call) -> str | None:
    if call.dtype not in (torch.float16, torch.bfloat16):
        return f"latents is for float16 and bfloat16, got {call.dtype}"
    if not call.joined:
        return "latents is for keys whose first columns are the values"
    sizes, rows = (call.v_head_dim, call.head_dim - call.v_head_dim), call.group * call.num_queries
    if sizes[0] > _WIDEST[0] or sizes[1] > _WIDEST[1]:
        return f"latents takes values and further columns of at most {_WIDEST}, got {sizes}"
    return None if rows <= _MOST_ROWS else f"latents is for {_MOST_ROWS} query rows, got {rows}"


def _option_objection(call: Call) -> str | None:
    if not is_everything(call.mask) or call.score_bias is not None or call.softcap is not None:
        return "latents has no mask, no score_bias and no softcap"
    if call.dropout:
        return f"latents has no dropout (got {shown(call.dropout)})"
    if call.needs_grad:
        return "latents has no gradient"
    if torch.compiler.is_compiling() or not call.immediate:
        return "latents takes plain tensors, outside of graphs"
    return None


def estimate(call: Call) -> float:
    once = call.head_dim / (call.head_dim + call.v_head_dim)
    return on_device(call, operators=_OPERATORS, kernel=LATENTS, copies=once)


def run(
    call: Call,
    q: Float[Tensor, "B H L D"],
    k: Float[Tensor, "B G S D"],
    v: Float[Tensor, "B G S Dv"],
) -> Float[Tensor, "B H L Dv"]:
    found = partial(call, q, k, v)
    if call.sinks is not None:
        found = merge(found, Partial.of_sinks(call.sinks))
    return found.out.to(call.dtype)


def partial(
    call: Call,
    q: Float[Tensor, "B H L D"],
    k: Float[Tensor, "B G S D"],
    v: Float[Tensor, "B G S Dv"],
) -> Partial:
    from regard.ops.kernels.latents import attend_latents

    rows, latents = fold_heads(q, call.num_kv_heads), columns_contiguous(k)
    out, lse = attend_latents(rows, latents, call.v_head_dim, call.scale)
    unfolded = unfold_heads(lse.unsqueeze(-1), call.num_queries).squeeze(-1)
    return Partial(unfold_heads(out, call.num_queries), unfolded)
