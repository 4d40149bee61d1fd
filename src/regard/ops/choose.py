"""The choice of a backend: the one with the lowest estimated time among those without objection."""

import math
from operator import attrgetter

import torch

from regard.ops.backends import BACKENDS
from regard.ops.call import Call, is_everything
from regard.ops.rates import SPEED

# Memoised: a decoding step has many equal layers, and estimating each again would cost what the
# best backend saves.
_MEMOISED: dict[tuple[object, ...], str] = {}
_MOST = 256
_shape_of = attrgetter(
    "batch", "num_heads", "num_kv_heads", "head_dim", "v_head_dim", "dtype", "device",
    "num_queries", "num_keys", "softcap", "dropout", "precision", "needs_grad",
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
    key = (*_shape_of(call), call.sinks is None, partial, SPEED.version)
    name = _MEMOISED.get(key)
    if name is None:
        if len(_MEMOISED) >= _MOST:
            _MEMOISED.clear()
        _MEMOISED[key] = name = _cheapest(call, partial=partial)
    return name


def _cheapest(call: Call, *, partial: bool) -> str:
    best, least = "eager", math.inf
    for name, candidate in BACKENDS.items():
        if objection_of(call, name, partial=partial) is None:
            seconds = candidate.estimate(call)
            if seconds < least:
                best, least = name, seconds
    return best


def objection_of(call: Call, name: str, *, partial: bool = False) -> str | None:
    """Why a backend cannot run this call, in a sentence; None if it can."""
    if partial and BACKENDS[name].partial is None:
        return f"{name} gives no log-sum-exp"
    return BACKENDS[name].objection(call)


def _names() -> str:
    return ", ".join(repr(name) for name in BACKENDS)
