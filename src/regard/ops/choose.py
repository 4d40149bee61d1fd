"""The choice of a backend: the one with the lowest estimated time among those without objection."""

import math
from dataclasses import replace

import torch

from regard.ops.backends import BACKENDS
from regard.ops.call import Backend, Call, is_everything
from regard.ops.parts import GATHERED, reads_in_parts
from regard.rates import SPEED

_ANY_LENGTH = "sdpa", "eager"  # they object to no length, as one exported program serves them all
_OPERATORS = 20  # operators that dequantise keys and values
_PASSES = 5  # passes over all their elements while they do
_OF_A_PIECE = 15  # operators that gather a piece of the pages, start the backend, and merge
_MERGING = 4  # passes over the outputs of a piece while they are merged


def choose(call: Call, backend: str = "auto") -> str:
    """The name of the cheapest backend without an objection, or of the one asked for.

    Raises:
        ValueError: if there is none of that name, or it objects; its objection is the message.
    """
    if backend != "auto":
        if backend not in BACKENDS:
            names = ", ".join(map(repr, BACKENDS))
            raise ValueError(f"backend={backend!r} is not one of 'auto', {names}")
        objection = BACKENDS[backend].objection(call)
        if objection is not None:
            raise ValueError(f"backend={backend!r} cannot run this call: {objection}; use 'auto'")
        return backend
    if torch.compiler.is_exporting():
        return next(name for name in _ANY_LENGTH if objection_of(call, name) is None)
    if call.score_bias is None and is_everything(call.mask) and call.immediate:
        span = replace(call.span, kv_stop=call.span.kv_start + rounded(call.num_keys))
        call = call.at(span)
    return _cheapest(call)


def rounded(keys: int) -> int:
    """A number of keys rounded up to four binary digits, or to 16, which take less to read than a
    choice: choices are made for it, so that a growing cache seldom needs another one."""
    step = max(16, 1 << max(0, keys.bit_length() - 4))
    return -(-keys // step) * step


def _cheapest(call: Call) -> str:
    able = [name for name in BACKENDS if objection_of(call, name) is None]
    if len(able) == 1:
        return able[0]
    best, least = "eager", math.inf
    for name in able:
        seconds = seconds_of(call, BACKENDS[name])
        if seconds < least:
            best, least = name, seconds
    return best


def seconds_of(call: Call, backend: Backend) -> float:
    """The time that a backend is expected to take; codes that it cannot read are dequantised, and
    parts that it cannot merge are copied side by side."""
    elements = call.batch * call.num_kv_heads * call.num_keys * (call.head_dim + call.v_head_dim)
    stored = call.storage
    if not stored.several:
        seconds = backend.estimate(call)
    elif not reads_in_parts(call, backend):
        seconds = backend.estimate(call) + 2 * elements / SPEED.elements
    elif backend.reads and all(kind in backend.reads for kind in stored.kinds):
        seconds = backend.estimate(call.but(partial=True))
    else:
        merged = _merged_seconds(call.but(partial=True), backend)
        seconds = merged + elements / SPEED.elements
    if stored.bits is None or any(kind in backend.reads for kind in stored.kinds):
        return seconds
    return seconds + _OPERATORS * SPEED.call + _PASSES * elements / SPEED.elements


def _merged_seconds(call: Call, backend: Backend) -> float:
    """The time of reading in pieces: the keys before the first query, which seldom need a mask; the
    other keys; and the merge of the partial results."""
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


def objection_of(call: Call, name: str) -> str | None:
    """Why a backend cannot run this call, in a sentence; None if it can."""
    return BACKENDS[name].objection(call)
