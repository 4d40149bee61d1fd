"""A latent layer as the arguments that build it, those as plain data for a file, and back.

What is read may come from anybody: every entry is checked, and sizes are bounded, before a layer is
built of it.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from regard.hf.families.table import HOSTED
from regard.hf.loading.untrusted import refused
from regard.layers.latent import LatentKVAttention, MultiHeadLatentAttention
from regard.masks import Causal, Mask, SlidingWindow
from regard.rope import NO_ROPE, NoRotary, Rotary
from regard.rope.scaling import NTK, Frequencies, LinearScaling, Llama3, LongRope, Scaling, Yarn

WIDEST = 1 << 20  # channels: ten times what the largest published models have
WIDEST_ROPE = 1 << 16  # its frequencies are computed when it is built
SCALINGS: dict[str, Any] = {
    each.__name__: each for each in (Frequencies, LinearScaling, Llama3, LongRope, NTK, Yarn)
}
MLA_BIASES = ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
Latent = LatentKVAttention | MultiHeadLatentAttention


def arguments_of(layer: Latent) -> dict[str, Any]:
    """The arguments that build such a layer, as it is now: attributes may have been set since.

    Raises:
        ValueError: if it has a score bias, or a pattern other than `Causal()` with or without a
            `SlidingWindow`: transformers' masks say no more than that.
    """
    family = HOSTED["HostedLatent"]
    window = family.window_of(layer)
    if layer.mask not in (pattern_of(window), _swapped(window)):
        raise ValueError(
            f"a layer in a model of transformers has mask=Causal(), or Causal() & "
            f"SlidingWindow(size), got {layer.mask!r}"
        )
    if layer.score_bias is not None:
        raise ValueError("a layer in a model of transformers has no score_bias; set it to None")
    names = (name for name in KINDS[layer.kind].fields if name not in _DERIVED)
    given = {name: getattr(layer, name) for name in names}
    biased = {
        name for name in MLA_BIASES if getattr(getattr(layer, name, None), "bias", None) is not None
    }
    if isinstance(layer, LatentKVAttention):
        given |= {"bias": bool(biased - {"o_proj"}), "out_bias": "o_proj" in biased}
        given |= {"qk_norm": _norm_of(layer), "norm_eps": _eps_of(layer.k_norm)}
    else:
        norm = layer.kv_a_layernorm
        normed = not isinstance(norm, nn.Identity)
        eps = getattr(norm, "eps", None) if normed else None
        given |= {"bias": biased, "latent_norm": normed, "norm_eps": eps or 1e-6}
    return given | {"mask": layer.mask}


def _norm_of(layer: LatentKVAttention) -> str | None:
    if layer.k_norm is None:
        return None
    return "width" if layer.norm_width else "head"


def _eps_of(norm: Any) -> float:
    """The epsilon of an RMS norm; that of its dtype where it is left to torch, 1e-6 without one."""
    if not isinstance(norm, nn.RMSNorm):
        return 1e-6
    return torch.finfo(norm.weight.dtype).eps if norm.eps is None else norm.eps


def _check_norms(layer: Latent) -> None:
    """Raise a ValueError for norms of queries or keys that a file does not describe."""
    for name in ("q_norm", "k_norm"):
        norm = getattr(layer, name, None)
        if norm is not None and (type(norm) is not nn.RMSNorm or norm.weight is None):
            raise ValueError(
                f"{name} is {norm!r}, and only an nn.RMSNorm with a weight can be saved: exchange "
                f"layer.{name}, or build the layer with qk_norm='head' or 'width'"
            )


def pattern_of(window: int | None) -> Mask:
    """The rule of a decoder's layer with this window, or none."""
    return Causal() if window is None else Causal() & SlidingWindow(window)


def _swapped(window: int | None) -> Mask:
    return Causal() if window is None else SlidingWindow(window) & Causal()


def described(layer: Latent) -> dict[str, Any]:
    """A latent layer as data that JSON holds; `layer_from` reads it.

    >>> from regard import Causal, LatentKVAttention, Rotary
    >>> layer = LatentKVAttention(16, 2, num_kv_heads=1, head_dim=8, kv_lora_rank=4,
    ...     rope=Rotary(8), mask=Causal())
    >>> described(layer)["rope"]
    {'dim': 8, 'theta': 10000.0, 'pairing': 'halves', 'scaling': None}
    """
    _check_norms(layer)
    given = arguments_of(layer)
    rows = KINDS[layer.kind].fields
    given["window"] = HOSTED["HostedLatent"].window_of(layer)
    return {"kind": layer.kind} | {name: rows[name].write(given[name]) for name in rows}


def layer_from(entry: Any, file: Path) -> Latent:
    """The layer that an entry of `file` describes, with parameters that are yet to be filled.

    Raises:
        CheckpointError: if an entry is missing, unknown, or not what such a layer could have.
    """
    kind = entry.get("kind") if isinstance(entry, dict) else None
    if not isinstance(kind, str) or kind not in KINDS:
        raise refused(file, f"a layer must have a kind out of {', '.join(KINDS)}", entry)
    made_by, rows = KINDS[kind]
    entry = ADDED.get(kind, {}) | entry
    if set(entry) != {"kind", *rows}:
        raise refused(file, f"a layer of kind {kind!r} must have {', '.join(rows)}", sorted(entry))
    given = {name: _read(rows[name], name, entry[name], file) for name in rows}
    given["mask"] = pattern_of(given.pop("window"))
    try:
        return made_by(**given)
    except (ValueError, TypeError, OverflowError) as error:
        raise refused(file, "a layer must be one that can be built", str(error)) from error


class Field(NamedTuple):
    """How an argument is written and read, and what it must be."""

    rule: str
    read: Callable[[Any], Any]
    write: Callable[[Any], Any] = lambda value: value


def _read(field: Field, name: str, value: Any, file: Path) -> Any:
    try:
        return field.read(value)
    except (ValueError, TypeError, OverflowError, ArithmeticError) as error:
        rule = f"{name!r} of a layer must be {field.rule}"
        raise refused(file, rule, str(error) or value) from error


def _size(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= WIDEST:  # `type`, because a bool is an int
        raise ValueError(repr(value))
    return value


def _number(value: Any) -> float | int:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError(repr(value))
    number: float | int = value
    return number


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError(repr(value))
    return value


def _biases(value: Any) -> set[str]:
    if not isinstance(value, list) or not all(name in MLA_BIASES for name in value):
        raise ValueError(repr(value))
    return set(value)


def _norm(value: Any) -> str | None:
    if value not in (None, "head", "width"):
        raise ValueError(repr(value))
    norm: str | None = value
    return norm


def _or_none(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else read(value)


def _written_rope(rope: Rotary | NoRotary) -> dict[str, Any] | None:
    if not isinstance(rope, Rotary):
        return None
    scaling = rope.scaling
    return {
        "dim": rope.dim,
        "theta": rope.theta,
        "pairing": rope.pairing,
        "scaling": None if scaling is None else _written_scaling(scaling),
    }


def _written_scaling(scaling: Scaling) -> dict[str, Any]:
    name = type(scaling).__name__
    if SCALINGS.get(name) is not type(scaling):
        raise ValueError(f"scaling={scaling!r} cannot be saved; {', '.join(SCALINGS)} can")
    values = {each.name: getattr(scaling, each.name) for each in fields(SCALINGS[name])}
    plain = {key: list(v) if isinstance(v, tuple) else v for key, v in values.items()}
    return {"kind": name} | plain


def _read_rope(value: Any) -> Rotary | NoRotary:
    if value is None:
        return NO_ROPE
    if set(value) != {"dim", "theta", "pairing", "scaling"}:
        raise ValueError(str(sorted(value)))
    dim, scaling = _size(value["dim"]), value["scaling"]
    if dim > WIDEST_ROPE:
        raise ValueError(f"dim={dim}")
    made = None if scaling is None else _read_scaling(scaling)
    return Rotary(dim, theta=_number(value["theta"]), pairing=value["pairing"], scaling=made)


def _read_scaling(value: Mapping[str, Any]) -> Scaling:
    kind = value["kind"] if isinstance(value, dict) and "kind" in value else None
    if not isinstance(kind, str) or kind not in SCALINGS:
        raise ValueError(f"scaling={value!r}")
    numbers = {name: each for name, each in value.items() if name != "kind"}
    if set(numbers) != {each.name for each in fields(SCALINGS[kind])}:
        raise ValueError(f"{kind} of {sorted(numbers)}")
    scaling: Scaling = SCALINGS[kind](**{name: _plain(each) for name, each in numbers.items()})
    return scaling


def _plain(value: Any) -> Any:
    """A number, a list of them, a flag or nothing."""
    if isinstance(value, list):
        return tuple(_number(each) for each in value)
    return value if value is None or type(value) is bool else _number(value)


class Kind(NamedTuple):
    """A class of layers, and the arguments that a file holds for one."""

    made_by: Any
    fields: dict[str, Field]


SIZE = Field(f"a whole number up to {WIDEST}", _size)
OPTIONAL_SIZE = Field(f"null or a whole number up to {WIDEST}", _or_none(_size))
NUMBER = Field("a finite number", _number)
OPTIONAL_NUMBER = Field("null or a finite number", _or_none(_number))
FLAG = Field("true or false", _flag)
COMMON = {
    "hidden_size": SIZE,
    "num_heads": SIZE,
    "kv_lora_rank": SIZE,
    "rope": Field("null or a rotary embedding", _read_rope, _written_rope),
    "window": OPTIONAL_SIZE,
    "dropout": NUMBER,
    "scale": NUMBER,
}
KINDS = {
    "LatentKV": Kind(
        LatentKVAttention,
        COMMON
        | {"num_kv_heads": SIZE, "head_dim": SIZE, "softcap": OPTIONAL_NUMBER}
        | {"bias": FLAG, "out_bias": FLAG}
        | {"qk_norm": Field("null, 'head' or 'width'", _norm), "norm_eps": NUMBER},
    ),
    "MLA": Kind(
        MultiHeadLatentAttention,
        COMMON
        | {"q_lora_rank": OPTIONAL_SIZE, "qk_nope_head_dim": SIZE, "qk_rope_head_dim": SIZE}
        | {"v_head_dim": SIZE, "latent_norm": FLAG, "norm_eps": NUMBER}
        | {"bias": Field(f"a list of {', '.join(MLA_BIASES)}", _biases, sorted)},
    ),
}
ADDED = {"LatentKV": {"qk_norm": None, "norm_eps": 1e-6}}  # folders written earlier lack these
_DERIVED = ("window", "bias", "out_bias", "latent_norm", "norm_eps", "qk_norm")
