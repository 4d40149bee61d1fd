"""A latent layer as data for a JSON file, and back.

Files are not trusted: every entry is checked, and sizes are bounded, before a layer is built.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from regard.hf.loading.untrusted import refused
from regard.hf.placing.placed import LatentLayer, arguments_of, pattern_of, window_of
from regard.layers.latent import LatentKVAttention, MultiHeadLatentAttention
from regard.layers.query_scale import UNSCALED, PositionScale, QueryScale
from regard.rope import NO_ROPE, NoRotary, Rotary
from regard.rope.scaling import NTK, Frequencies, LinearScaling, Llama3, LongRope, Scaling, Yarn

WIDEST = 1 << 20  # channels: ten times what the largest published models have
WIDEST_ROPE = 1 << 16  # its frequencies are computed when it is built
ROPE = ("dim", "theta", "pairing")  # entries of a rotary embedding, besides its scaling
SCALINGS: dict[str, Any] = {
    each.__name__: each for each in (Frequencies, LinearScaling, Llama3, LongRope, NTK, Yarn)
}
MLA_BIASES = ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")


def described(layer: LatentLayer) -> dict[str, Any]:
    """A latent layer as data that JSON holds; `layer_from` reads it.

    Examples:
        >>> from regard import Causal, LatentKVAttention, Rotary
        >>> layer = LatentKVAttention(16, 2, num_kv_heads=1, head_dim=8, kv_lora_rank=4,
        ...     rope=Rotary(8), mask=Causal())
        >>> described(layer)["rope"]
        {'dim': 8, 'theta': 10000.0, 'pairing': 'halves', 'scaling': None}
    """
    for name in ("q_norm", "k_norm"):
        norm = getattr(layer, name, None)
        if norm is not None and (type(norm) is not nn.RMSNorm or norm.weight is None):
            raise ValueError(
                f"{name} is {norm!r}, and only an nn.RMSNorm with a weight can be saved: exchange "
                f"layer.{name}, or build the layer with qk_norm='head' or 'width'"
            )
    arguments = arguments_of(layer) | {"window": window_of(layer)}
    _, rows = KINDS[layer.kind]
    return {"kind": layer.kind} | {name: rows[name].write(arguments[name]) for name in rows}


def layer_from(entry: Any, file: Path) -> LatentLayer:
    """The layer that an entry of `file` describes, with parameters that are yet to be filled.
    Raises a CheckpointError if an entry is missing, unknown, or not what such a layer could have.
    """
    kind = entry.get("kind") if isinstance(entry, dict) else None
    if not isinstance(kind, str) or kind not in KINDS:
        raise refused(file, f"a layer must have a kind out of {', '.join(KINDS)}", entry)
    made_by, rows = KINDS[kind]
    entry = ADDED.get(kind, {}) | entry
    if set(entry) != {"kind", *rows}:
        raise refused(file, f"a layer of kind {kind!r} must have {', '.join(rows)}", sorted(entry))
    arguments = {name: _read(rows[name], name, entry[name], file) for name in rows}
    arguments["mask"] = pattern_of(arguments.pop("window"))
    try:
        return made_by(**arguments)
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


def _such(accepts: Callable[[Any], bool]) -> Callable[[Any], Any]:
    """A check of a file's value: returns an accepted one, raises a ValueError for others."""

    def read(value: Any) -> Any:
        if not accepts(value):
            raise ValueError(repr(value))
        return value

    return read


# `type`, because a bool is an int
_size = _such(lambda value: type(value) is int and 0 <= value <= WIDEST)
_number = _such(lambda value: type(value) in (int, float) and math.isfinite(value))
_biases = _such(lambda value: isinstance(value, list) and all(each in MLA_BIASES for each in value))


def _or_none(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else read(value)


def _written_rope(rope: Rotary | NoRotary) -> dict[str, Any] | None:
    if not isinstance(rope, Rotary):
        return None
    scaling = None if rope.scaling is None else _written_scaling(rope.scaling)
    return {name: getattr(rope, name) for name in ROPE} | {"scaling": scaling}


def _written_factor(scale: object) -> list[float] | None:
    """A factor of queries by their positions."""
    if scale is UNSCALED:
        return None
    if not isinstance(scale, PositionScale):
        raise ValueError(f"query_scale={scale!r} cannot be saved; PositionScale can")
    return [scale.beta, scale.original_max_position, scale.offset]


def _read_factor(value: Any) -> QueryScale:
    if value is None:
        return UNSCALED
    beta, most, offset = map(_number, value)
    return PositionScale(beta, most, offset)


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
    if set(value) != {*ROPE, "scaling"}:
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
    return SCALINGS[kind](**{name: _plain(each) for name, each in numbers.items()})


def _plain(value: Any) -> Any:
    """A number, a list of them, a flag or nothing."""
    if isinstance(value, list):
        return tuple(_number(each) for each in value)
    return value if value is None or type(value) is bool else _number(value)


SIZE = Field(f"a whole number up to {WIDEST}", _size)
OPTIONAL_SIZE = Field(f"null or a whole number up to {WIDEST}", _or_none(_size))
NUMBER = Field("a finite number", _number)
OPTIONAL_NUMBER = Field("null or a finite number", _or_none(_number))
FLAG = Field("true or false", _such(lambda value: type(value) is bool))
BIASES = Field(f"a list of {', '.join(MLA_BIASES)}", lambda value: set(_biases(value)), sorted)
NORM = Field("null, 'head' or 'width'", _such((None, "head", "width").__contains__))
GATE = Field("null, 'head' or 'channel'", _such((None, "head", "channel").__contains__))
COMMON = {
    **dict.fromkeys(("hidden_size", "num_heads", "kv_lora_rank"), SIZE),
    **dict.fromkeys(("dropout", "scale", "norm_eps"), NUMBER),
    "rope": Field("null or a rotary embedding", _read_rope, _written_rope),
    "window": OPTIONAL_SIZE,
}
OF_LATENT_KV = {
    **dict.fromkeys(("num_kv_heads", "head_dim"), SIZE),
    **dict.fromkeys(("bias", "out_bias"), FLAG),
    "softcap": OPTIONAL_NUMBER,
    "qk_norm": NORM,
}
OF_MLA = {
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), SIZE),
    **dict.fromkeys(("latent_norm", "sinks"), FLAG),
    "q_lora_rank": OPTIONAL_SIZE,
    "bias": BIASES,
    "gate": GATE,
    "query_scale": Field("null or three numbers", _read_factor, _written_factor),
}
# classes of layers, and the arguments that a file holds for one
KINDS: dict[str, tuple[Any, dict[str, Field]]] = {
    "LatentKV": (LatentKVAttention, COMMON | OF_LATENT_KV),
    "MLA": (MultiHeadLatentAttention, COMMON | OF_MLA),
}
ADDED: dict[str, dict[str, Any]] = {  # older folders lack these
    "LatentKV": {"qk_norm": None, "norm_eps": 1e-6},
    "MLA": {"sinks": False, "gate": None, "query_scale": None},
}
