"""OpenVINO's attention over a state: what its CPU plugin makes of a language model's cache.

The plugin fuses a graph of this form into one kernel that appends to the state and attends to it,
in the precision of KV_CACHE_PRECISION (u8 for one's scales a token and head). Each buffer of keys
is the state of a request of its own, filled before timing. Left unequal: a state cannot be
truncated at no cost, so each call finds one more token than its call before (a percent at most by
the end of a case); a prefill empties the state first. A ragged batch has no form here: a state has
one length. u4 is left out: the plugin of 2026.4.1 crashes the process with it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from common import THREADS, installed
from problems import Problem, Run
from torch import Tensor

from cases import Case


def _floats(given: Problem) -> Run | None:
    case = given.case
    runs = not case.bits and case.kind in ("decode", "prefill", "prefill fast")
    stored = "bf16" if case.dtype == "bfloat16" else "f32"
    return _run(given, stored) if runs and installed("openvino") else None


def _codes(stored: str, given: Problem) -> Run | None:
    return (
        _run(given, stored) if given.case.kind == "int8 cache" and installed("openvino") else None
    )


def _run(given: Problem, stored: str) -> Run:
    case = given.case
    model = _compiled(case, stored)
    requests = [_filled(model, case, given.q, *pair) for pair in given.cold.buffers]

    def run() -> Tensor:
        given.cold()
        request, _ = requests[given.cold.turn]
        if case.length > 1:
            request.reset_state()
        request.start_async()
        request.wait()
        return _tensor(request.get_output_tensor(0))

    return run


def _filled(model: Any, case: Case, q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, list[Tensor]]:
    """A request whose state has all keys but the new ones; and the tensors it reads."""
    import openvino

    request = model.create_infer_request()
    past = case.keys - case.length
    new = [q, k[:, :, past:].contiguous(), v[:, :, past:].contiguous()]
    beams = torch.arange(case.batch, dtype=torch.int32)
    if past > 0:  # one step, which also moves the state into the kernel's own memory
        states = {"k": k[:, :, : past - 1].float(), "v": v[:, :, : past - 1].float()}
        for state in request.query_state():
            state.state = openvino.Tensor(states[state.name].contiguous().numpy())
        last = [x[:, :, past - 1 : past].contiguous() for x in (k, v)]
        _give(request, [q, *last, beams])
        request.infer()
    _give(request, [*new, beams])
    return request, [*new, beams]


def _give(request: Any, tensors: list[Tensor]) -> None:
    """Inputs in the memory of these tensors."""
    import openvino

    for index, x in enumerate(tensors):
        if x.dtype == torch.bfloat16:
            numbers = x.view(torch.int16).numpy()
            shared = openvino.Tensor(numbers, openvino.Shape(list(x.shape)), openvino.Type.bf16)
        else:
            shared = openvino.Tensor(x.numpy(), shared_memory=True)
        request.set_input_tensor(index, shared)


def _tensor(given: Any) -> Tensor:
    """A result, in its own memory."""
    if str(given.element_type).find("bfloat16") >= 0:
        return torch.from_numpy(given.data.view("int16")).view(torch.bfloat16)
    return torch.from_numpy(given.data)


def _compiled(case: Case, stored: str) -> Any:
    import openvino

    precision = "bf16" if case.dtype == "bfloat16" else "f32"
    how = {
        "INFERENCE_NUM_THREADS": THREADS,
        "NUM_STREAMS": 1,
        "INFERENCE_PRECISION_HINT": precision,
        "KV_CACHE_PRECISION": stored,
    }
    graph = _model(case, getattr(openvino.Type, precision))
    model = openvino.Core().compile_model(graph, "CPU", how)
    made = {
        str(op.get_rt_info()["layerType"].astype(str)) for op in model.get_runtime_model().get_ops()
    }
    if "ScaledDotProductAttention" not in made:
        raise RuntimeError("the plugin of OpenVINO does not fuse this attention")
    return model


def _model(case: Case, dtype: Any) -> Any:
    """Attention over a state, in the form that the plugin fuses."""
    import numpy as np
    import openvino
    from openvino import op, opset6, opset13

    def indices(*each: int) -> Any:
        return opset13.constant(np.array(each, np.int64))

    zero = opset13.constant(np.int64(0))
    heads, groups, width = case.heads, case.kv_heads, case.head_dim
    q, *new = (
        opset13.parameter(openvino.PartialShape([-1, count, -1, width]), dtype)
        for count in (heads, groups, groups)
    )
    beams = opset13.parameter(openvino.PartialShape([-1]), openvino.Type.i32)
    stored, present = [], []
    for name, x in zip("kv", new, strict=True):
        rows = opset13.gather(opset13.shape_of(q, "i64"), indices(0), zero)
        shape = opset13.concat([rows, indices(groups, 0, width)], 0)
        empty = opset13.broadcast(opset13.constant(np.float32(0), dtype), shape)
        dims = openvino.PartialShape([-1, groups, -1, width])
        past = opset13.gather(opset6.read_value(empty, name, dtype, dims), beams, zero)
        keys = opset13.concat([past, x], 2)
        stored.append(opset6.assign(keys, name))
        if heads != groups:
            ones = opset13.constant(np.ones((1, 1, heads // groups, 1, 1), np.float32), dtype)
            wide = opset13.unsqueeze(keys, opset13.constant(np.int64(2)))
            wide = opset13.multiply(wide, ones)
            keys = opset13.reshape(wide, indices(0, heads, -1, width), True)
        present.append(keys)
    out = opset13.scaled_dot_product_attention(q, *present, causal=case.length > 1)
    return openvino.Model([op.Result(out.output(0))], stored, [q, *new, beams])


PEERS: dict[str, Callable[[Problem], Run | None]] = {
    "OpenVINO": _floats,
    "OpenVINO, u8 keys": partial(_codes, "u8"),
}
