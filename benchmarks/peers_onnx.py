"""ONNX Runtime's operator `GroupQueryAttention`, which its builders of language models emit.

A session runs a graph of this one operator on tensors bound by address: nothing is copied on the
way in or out, and the present keys are the buffer of the past ones. Left unequal: a step also
writes its new token into the buffer, a prefill also writes its keys there. The CPU kernel has no
bfloat16; an int8 cache has one scale for a tensor or a channel, where regard has one for each token
and group of channels.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from common import THREADS, installed
from problems import Problem, Run
from torch import Tensor

KINDS = ("decode", "ragged", "prefill", "int8 cache")
ONNX_TYPES = {torch.float32: 1, torch.int32: 6, torch.int8: 3}  # onnx.TensorProto's numbers
PER_TENSOR, PER_CHANNEL = (0, 1, 2, 3), (0, 2)  # dimensions that share a scale, [B, G, S, D]


def _float(given: Problem) -> Run | None:
    case = given.case
    runs = not case.bits and case.kind in KINDS and case.dtype == "float32"
    return _run(given, "NONE", PER_TENSOR) if runs and installed("onnx", "onnxruntime") else None


def _int8(mode: str, dims: tuple[int, ...], given: Problem) -> Run | None:
    case = given.case
    runs = case.kind == "int8 cache" and case.dtype == "float32"
    return _run(given, mode, dims) if runs and installed("onnx", "onnxruntime") else None


def _codes(dims: tuple[int, ...], x: Tensor) -> tuple[Tensor, ...]:
    scale = x.abs().amax(dims, keepdim=True) / 127
    return (x / scale).round().to(torch.int8), scale if len(dims) < 4 else scale.view(1)


def _run(given: Problem, mode: str, dims: tuple[int, ...]) -> Run:
    """A step or a prefill on each buffer in turn."""
    case = given.case
    session = _session(case.heads, case.kv_heads, case.head_dim, mode)
    ends = torch.tensor(case.lengths() if case.kind == "ragged" else [case.keys] * case.batch)
    firsts = (ends - case.length).view(-1, 1, 1, 1)
    new = firsts + torch.arange(case.length).view(-1, 1)  # the slots that this call writes
    out = torch.empty(case.batch, case.length, case.heads * case.head_dim)
    same = {
        "query": _joined(given.q),
        "seqlens_k": (ends - 1).int(),
        "total_sequence_length": torch.tensor(case.keys, dtype=torch.int32),
    }

    codes = [_codes(dims, x) for x in given.cold.buffers[0]] if mode != "NONE" else None

    def bound(k: Tensor, v: Tensor) -> tuple[Any, dict[str, Tensor]]:
        pair = copy.deepcopy(codes) if codes else [(k,), (v,)]
        (past_k, *k_scale), (past_v, *v_scale) = pair
        given_all = {
            **same,
            "key": _joined(k.take_along_dim(new.expand(-1, *k.shape[1:2], -1, k.shape[3]), 2)),
            "value": _joined(v.take_along_dim(new.expand(-1, *v.shape[1:2], -1, v.shape[3]), 2)),
            "past_key": past_k,
            "past_value": past_v,
            **({"k_scale": k_scale[0], "v_scale": v_scale[0]} if k_scale else {}),
        }
        results = {"output": out, "present_key": past_k, "present_value": past_v}
        return _bind(session, given_all, results), given_all  # these tensors must live on

    bindings = [bound(*pair) for pair in given.cold.buffers]

    def run() -> Tensor:
        given.cold()
        session.run_with_iobinding(bindings[given.cold.turn][0])
        return out.unflatten(-1, (case.heads, -1)).transpose(1, 2)

    return run


def _joined(x: Tensor) -> Tensor:
    """From [B, H, L, D] to [B, L, H D]."""
    return x.transpose(1, 2).flatten(2).contiguous()


def _bind(session: Any, given: dict[str, Tensor], results: dict[str, Tensor]) -> Any:
    binding = session.io_binding()
    for tensors, bind in ((given, binding.bind_input), (results, binding.bind_output)):
        for name, x in tensors.items():
            bind(name, "cpu", 0, ONNX_TYPES[x.dtype], list(x.shape), x.data_ptr())
    return binding


def _session(heads: int, kv_heads: int, head_dim: int, mode: str) -> Any:
    """A session with a graph of the one operator."""
    import onnxruntime
    from onnx import helper

    number, index = ONNX_TYPES[torch.float32], ONNX_TYPES[torch.int32]
    stored = number if mode == "NONE" else ONNX_TYPES[torch.int8]
    cached = (stored, ["b", kv_heads, "m", head_dim])
    inputs = {
        "query": (number, ["b", "l", heads * head_dim]),
        "key": (number, ["b", "l", kv_heads * head_dim]),
        "value": (number, ["b", "l", kv_heads * head_dim]),
        "past_key": cached,
        "past_value": cached,
        "seqlens_k": (index, ["b"]),
        "total_sequence_length": (index, []),
    }
    outputs = {"output": inputs["query"], "present_key": cached, "present_value": cached}
    names, how = list(inputs), {}
    if mode != "NONE":
        scale = (number, [1, kv_heads, 1, head_dim] if mode == "PER_CHANNEL" else [1])
        inputs |= {"k_scale": scale, "v_scale": scale}
        names += [""] * 5 + ["k_scale", "v_scale"]  # cosines to head_sink are absent
        how = {"k_quant_type": mode, "v_quant_type": mode, "kv_cache_bit_width": 8}
    node = helper.make_node(
        "GroupQueryAttention", names, list(outputs), domain="com.microsoft",
        num_heads=heads, kv_num_heads=kv_heads, **how,
    )  # fmt: skip
    values = [
        [helper.make_tensor_value_info(name, *each) for name, each in table.items()]
        for table in (inputs, outputs)
    ]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(helper.make_graph([node], "step", *values), opset_imports=opsets)
    model.ir_version = 10  # onnx writes newer ones than a runtime of the same day reads
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = THREADS, 1
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


PEERS: dict[str, Callable[[Problem], Run | None]] = {
    "ONNX Runtime": _float,
    "ONNX Runtime, int8 per tensor": partial(_int8, "PER_TENSOR", PER_TENSOR),
    "ONNX Runtime, int8 per channel": partial(_int8, "PER_CHANNEL", PER_CHANNEL),
}
