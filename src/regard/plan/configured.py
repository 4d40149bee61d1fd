"""The shapes that the entries of a configuration describe."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from regard.hf.families.table import FAMILIES
from regard.hf.loading.untrusted import refused
from regard.plan.building import Architecture
from regard.plan.configurations import CONFIGURATIONS, HARMLESS, NESTED
from regard.plan.reading import LONGEST, UNKNOWN, Keys
from regard.plan.shapes import DTYPE_BYTES, ModelShape

REFUSED = {
    model: f"{what}, whose cache follows another sequence"
    for model, what in (
        ("t5", "it has cross-attention"),
        ("bart", "it has cross-attention"),
        ("whisper", "it has cross-attention"),
    )
}


def described_values(
    values: Mapping[str, Any], file: Path, name: str, weight_bytes: int | None, inside: str = ""
) -> ModelShape:
    """The shapes that a configuration describes.

    Args:
        values: of config.json, or of the model that a converted one was made from.
        file: named in errors.
        name: of the model.
        weight_bytes: of its files of weights.
        inside: where `values` stand in the file.

    Raises:
        CheckpointError: as `describe`.
    """
    architecture = _word(values, file, inside, None)
    outer = values
    if architecture in NESTED:
        values = Keys(values, file, inside=inside).object("text_config") or {}
        if not values:
            rule = f"'{inside}text_config' must describe the layers of {architecture!r}"
            raise refused(file, rule, values, UNKNOWN)
        inner = _word(values, file, f"{inside}text_config.", NESTED[architecture])
        row, keys = _row(inner, values, file, f"{inside}text_config.", nested=True)
    else:
        row, keys = _row(architecture, values, file, inside, nested=False)
    layers = row.layers(keys)
    dtype, remarks = _dtype(keys, outer)
    longest = keys.optional_size("max_position_embeddings", LONGEST)
    remarks += row.remarks(keys)
    keys.check_unread(HARMLESS | row.ignored | row.defaults.keys())
    return ModelShape(
        name=name,
        architecture=architecture,
        layers=layers,
        hidden_size=keys.size("hidden_size"),
        dtype=dtype,
        max_positions=longest,
        weight_bytes=weight_bytes,
        remarks=(*remarks, *_about_parts(values is not outer, keys, row), *_about_running(row)),
    )


def _word(values: Mapping[str, Any], file: Path, inside: str, default: str | None) -> str:
    """The architecture's name, which is known."""
    name = values.get("model_type", default)
    if not isinstance(name, str):
        rule = f"'{inside}model_type' must name the architecture"
        raise refused(file, rule, name, "add it, as 'llama'")
    if name in CONFIGURATIONS or (name in NESTED and not inside):
        return name
    why = REFUSED.get(
        name, f"none of those that are known: {', '.join((*CONFIGURATIONS, *NESTED))}"
    )
    raise refused(file, f"'{inside}model_type' cannot be described", name, why)


def _row(
    name: str, values: Mapping[str, Any], file: Path, inside: str, *, nested: bool
) -> tuple[Architecture, Keys]:
    row = CONFIGURATIONS[name]
    if nested and not row.sizes:
        rule = f"'{inside}model_type' must be one that is known as a part of another"
        raise refused(file, rule, name, UNKNOWN)
    defaults = {**row.defaults, **(row.sizes if nested else {})}
    return row, Keys(values, file, names=row.names, defaults=defaults, inside=inside)


def _dtype(keys: Keys, outer: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    """The dtype of the cache, and a remark if the file's is not one of a cache."""
    found = [keys.values.get(name, outer.get(name)) for name in ("dtype", "torch_dtype")]
    name = next((each for each in found if each is not None), None)
    if name is None:
        return "float32", ("The file names no dtype: sizes are those of float32.",)
    if not isinstance(name, str):
        raise keys.refused("dtype", "the name of a dtype", name)
    name = name.removeprefix("torch.")
    if name in DTYPE_BYTES:
        return name, ()
    if name == "auto":
        return "float32", ("The file names no dtype: sizes are those of float32.",)
    raise keys.refused("dtype", f"one of {', '.join(DTYPE_BYTES)}", name)


def _about_parts(nested: bool, keys: Keys, row: Architecture) -> tuple[str, ...]:
    remarks: tuple[str, ...] = ()
    if keys.values.get("quantization_config") is not None:
        remarks += ("Weights are quantised; parameters are counted as they are before that.",)
    if not nested:
        return remarks
    left = [name for name in row.sizes if not keys.given(name)]
    if left:
        listed = ", ".join(left)
        remarks += (f"The file leaves out {listed}: these are the values transformers takes.",)
    return (*remarks, "Only the part that writes text is described; others attend on their own.")


def _about_running(row: Architecture) -> tuple[str, ...]:
    if row.attention in FAMILIES:
        return (f"regard.hf.install runs it: {row.attention} is in regard.hf.FAMILIES.",)
    return (
        f"regard.hf.install does not run it: {row.attention} is not in regard.hf.FAMILIES; "
        "regard.hf.register() runs what goes through transformers' attention interface.",
    )
