"""RoPE of a configuration, in the spellings of transformers 4 and 5, as a `Rotary`."""

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from regard.hf.families.layers import SCALINGS, rope_of
from regard.plan.reading import LONGEST, UNKNOWN, Keys
from regard.rope import Pairing, Rotary

PAIRS = 1 << 15  # of channels of a head: a scaling has a number for each
# entries of each type, besides those of all (transformers' modeling_rope_utils)
EVERY = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
ORIGINAL = "original_max_position_embeddings"
NUMBERS = {
    "default": set[str](),
    "linear": {"factor"},
    "dynamic": {"factor", ORIGINAL},
    "llama3": {"factor", ORIGINAL, "low_freq_factor", "high_freq_factor"},
    "yarn": {"factor", ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "mscale"}
    | {"mscale_all_dim", "truncate"},
    "longrope": {"factor", ORIGINAL, "attention_factor", "short_factor", "long_factor"},
}
LISTS = ("short_factor", "long_factor")


def rotary(
    keys: Keys,
    head_dim: int,
    *,
    kind: str = "",
    pairing: Pairing = "halves",
    theta: str = "rope_theta",
    scaled: bool = True,
    renamed: Mapping[str, str] | None = None,
) -> Rotary:
    """The rotary embedding of a layer.

    `rope_scaling` (transformers 4) comes before `rope_parameters` (transformers 5), which may have
    an object for each kind of layer.

    Args:
        keys: with `rope_parameters` or `rope_scaling`, and entries beside them.
        head_dim: channels of a head.
        kind: of the layer, where kinds differ.
        pairing: of the channels.
        theta: the entry for the base, if it stands beside the object.
        scaled: whether `rope_scaling` applies to this kind of layer.
        renamed: types that this architecture reads as another.

    Raises:
        CheckpointError: if the type is unknown, or an entry is not what the type has.
    """
    rope, where = _parameters(keys, kind, scaled)
    rope.setdefault("rope_theta", keys.get(theta))
    if keys.get("partial_rotary_factor") is not None:
        rope.setdefault("partial_rotary_factor", keys.number("partial_rotary_factor"))
    name = rope.get("rope_type", rope.get("type", "default"))
    name = (renamed or {}).get(name, name) if isinstance(name, str) else name
    _add_original(rope, name, keys)
    _check(rope, name, Keys(rope, keys.file, inside=f"{keys.inside}{where}."))
    if name == "llama3" and rope.get("low_freq_factor") == rope.get("high_freq_factor"):
        # the ramp is a step (Llama 4 Scout), which Llama3 computes from the next larger number
        rope["high_freq_factor"] = math.nextafter(rope["low_freq_factor"], math.inf)
    config = SimpleNamespace(
        rope_parameters=rope | {"rope_type": name},
        max_position_embeddings=keys.size("max_position_embeddings", LONGEST),
        rope_interleave=pairing == "pairs",
    )
    try:
        made = rope_of(config, head_dim)
        if made.dim > head_dim:
            raise ValueError(f"{made.dim} channels are more than the {head_dim} of a head")
        return made
    except (ValueError, TypeError, KeyError, OverflowError, ZeroDivisionError) as error:
        rule = "parameters of a rotary embedding that can be computed"
        raise keys.refused(where, rule, f"{type(error).__name__}: {error}") from error


def _parameters(keys: Keys, kind: str, scaled: bool) -> tuple[dict[str, Any], str]:
    """The entries for this kind of layer, as a copy, and the name of their object."""
    new, old = keys.object("rope_parameters") or {}, keys.object("rope_scaling")
    nested = {name for name in new if isinstance(new[name], dict)}
    if new and kind and not nested:
        rule = f"made of objects, one for each kind of layer, as {kind!r}"
        raise keys.refused("rope_parameters", rule, new)
    if nested and kind:
        inner = Keys(new, keys.file, inside=f"{keys.inside}rope_parameters.")
        own = dict(inner.object(kind) or {})
        return (own | old if old and scaled else own), f"rope_parameters.{kind}"
    if old:
        return (dict(old) if scaled else {}), "rope_scaling"
    return dict(new), "rope_parameters"


def _add_original(rope: dict[str, Any], name: object, keys: Keys) -> None:
    """The context before scaling: beside the object (Phi-3), in it, or the whole context."""
    if name not in ("llama3", "yarn", "longrope"):
        return
    beside = keys.optional_size(ORIGINAL, LONGEST)
    if beside is not None:
        rope[ORIGINAL] = beside
    rope.setdefault(ORIGINAL, keys.get("max_position_embeddings"))


def _check(rope: Mapping[str, Any], name: object, keys: Keys) -> None:
    """Raise unless the type is known, and each entry is one of the type's and a number."""
    if not isinstance(name, str) or name not in SCALINGS or name not in NUMBERS:
        known = ", ".join(NUMBERS)
        raise keys.refused("rope_type", f"one of {known}", name, UNKNOWN)
    for entry, value in rope.items():
        if entry not in EVERY | NUMBERS[name] and value is not None:
            rule = f"left out: RoPE of type {name!r} has {', '.join(sorted(NUMBERS[name]))}"
            raise keys.refused(entry, rule, value, UNKNOWN)
        if value is None or entry in ("rope_type", "type"):
            continue
        if entry == "truncate":
            keys.flag(entry)
        elif entry in LISTS:
            _check_list(entry, value, keys)
        elif entry == ORIGINAL:
            keys.size(entry, LONGEST)
        else:
            keys.number(entry)


def _check_list(entry: str, value: Any, keys: Keys) -> None:
    if not isinstance(value, list) or not 1 <= len(value) <= PAIRS:
        raise keys.refused(entry, f"a list of 1 to {PAIRS} numbers", value)
    for each in value:
        if type(each) not in (int, float):
            raise keys.refused(entry, "a list of numbers", each)
