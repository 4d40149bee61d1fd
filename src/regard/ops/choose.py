"""The choice of a backend: the one with the lowest estimated time among those without objection."""

import math
from dataclasses import replace
from operator import attrgetter

import torch

from regard.constants import accumulating_dtype
from regard.ops.backends import BACKENDS
from regard.ops.call import Backend, Call, is_everything
from regard.ops.parts import GATHERED, no_log_sum_exp, reads_in_parts
from regard.ops.rates import SPEED

# Memoised: a decoding step has many equal layers, and estimating each again would cost what the
# best backend saves.
_MEMOISED: dict[tuple[object, ...], str] = {}
_MOST = 256
_OPERATORS = 20  # operators that dequantise keys and values
_PASSES = 5  # passes over all their elements while they do
_OF_A_PIECE = 15  # operators that gather a piece of the pages, start the backend, and merge
_MERGING = 4  # passes over the outputs of a piece while they are merged
_shape_of = attrgetter(
    "batch", "num_heads", "num_kv_heads", "head_dim", "v_head_dim", "dtype", "device",
    "num_queries", "softcap", "dropout", "precision", "needs_grad", "joined", "bits",
    "in_parts",
)  # fmt: skip


def choose(call: Call, backend: str = "auto", *, partial: bool = False) -> str:
    """The name of the cheapest backend without an objection, or of the one asked for.

    Raises:
        ValueError: if there is none of that name, or it objects; its objection is the message.
    """
    if backend != "auto":
        if backend not in BACKENDS:
            raise ValueError(f"backend={backend!r} is not one of 'auto', {_names()}")
        objection = objection_of(call, backend, partial=partial)
        if objection is not None:
            raise ValueError(f"backend={backend!r} cannot run this call: {objection}; use 'auto'")
        return backend
    if torch.compiler.is_exporting():  # one program serves every length: the first that can run any
        able = (name for name in BACKENDS if BACKENDS[name].any_length)
        return next(name for name in able if objection_of(call, name, partial=partial) is None)
    if call.score_bias is not None or not is_everything(call.mask) or not call.immediate:
        return _cheapest(call, partial=partial)
    keys = rounded(call.num_keys)
    key = (*_shape_of(call), keys, call.sinks is None, partial, SPEED.version)
    name = _MEMOISED.get(key)
    if name is None:
        if len(_MEMOISED) >= _MOST:
            _MEMOISED.clear()
        span = replace(call.span, kv_stop=call.span.kv_start + keys)
        _MEMOISED[key] = name = _cheapest(call.at(span), partial=partial)
    return name


def rounded(keys: int) -> int:
    """A number of keys rounded up to four binary digits: what a choice is made for, so that a
    growing cache seldom needs another one."""
    step = 1 << max(0, keys.bit_length() - 4)
    return -(-keys // step) * step


def _cheapest(call: Call, *, partial: bool) -> str:
    able = [name for name in BACKENDS if objection_of(call, name, partial=partial) is None]
    if len(able) == 1:  # without an estimate, for which a machine may have to be measured
        return able[0]
    best, least = "eager", math.inf
    for name in able:
        seconds = seconds_of(call, BACKENDS[name], partial=partial)
        if seconds < least:
            best, least = name, seconds
    return best


def seconds_of(call: Call, backend: Backend, *, partial: bool = False) -> float:
    """The time that a backend is expected to take; codes that it cannot read are dequantised, and
    parts that it cannot merge are copied side by side.

    Args:
        partial: whether the call has to return a log-sum-exp.
    """
    elements = call.batch * call.num_kv_heads * call.num_keys * (call.head_dim + call.v_head_dim)
    merged = call.in_parts and reads_in_parts(call, backend)
    wide = call
    if backend.widens and (merged or partial):
        wide = call.but(dtype=accumulating_dtype(call.dtype))
    if not call.in_parts or (merged and backend.reads_pages):
        seconds = backend.estimate(wide)
    elif merged:
        seconds = _merged_seconds(wide, backend) + elements / SPEED.elements
    else:
        seconds = backend.estimate(call) + 2 * elements / SPEED.elements
    if call.bits is None or backend.quantized is not None:
        return seconds
    return seconds + _OPERATORS * SPEED.call + _PASSES * elements / SPEED.elements


def _merged_seconds(call: Call, backend: Backend) -> float:
    """Keys before the first query, which seldom need a mask when they are read on their own; the
    rest; and the merge of all pieces."""
    span = call.span
    first = min(max(span.first_query, span.kv_start), span.kv_stop)
    seconds = 0.0
    for start, stop in ((span.kv_start, first), (first, span.kv_stop)):
        if start < stop:
            seconds += backend.estimate(call.of_keys(start, stop))
    pieces = -(-call.num_keys // GATHERED)
    outputs = call.batch * call.num_heads * call.num_queries * call.v_head_dim
    merging = _OF_A_PIECE * SPEED.call + _MERGING * outputs / SPEED.elements
    return seconds + pieces * merging


def objection_of(call: Call, name: str, *, partial: bool = False) -> str | None:
    """Why a backend cannot run this call, in a sentence; None if it can."""
    backend = BACKENDS[name]
    objection = backend.objection(call)
    return no_log_sum_exp(call, backend) if partial and objection is None else objection


def _names() -> str:
    return ", ".join(repr(name) for name in BACKENDS)
