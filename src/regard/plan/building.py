"""The layers that transformers builds from a configuration, read as shapes.

A configuration is not trusted: sizes and counts are checked before anything is built, layers are
built on the meta device, where weights take no memory, and their modules are counted meanwhile.
"""

import copy
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from regard.hf.families.table import FAMILIES
from regard.hf.loading.skeleton import at_most
from regard.hf.loading.untrusted import CheckpointError, refused
from regard.hf.packages import require
from regard.plan.modules import shape_of_module
from regard.plan.shapes import DTYPE_BYTES, LayerShape, ModelShape

SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads")
MOST = {  # ten times what published models have; of layers, four times
    "hidden_size": 1 << 20,
    "num_hidden_layers": 512,
    "num_attention_heads": 1 << 16,
    "num_key_value_heads": 1 << 16,
    "head_dim": 1 << 16,
    "sliding_window": 1 << 30,
    "max_position_embeddings": 1 << 30,
}
PARTS = 50_000  # modules and parameters that are built; DeepSeek-V3 has 3,000
POSITIONS = 4_096  # built of tables of positions, whose length changes no layer
LEFT_OUT = ("id2label", "label2id", "num_labels", "dtype", "torch_dtype")  # change no layer
ATTENTION = re.compile(r"attention|mixer|deltanet", re.IGNORECASE)  # in names of classes
MATTERS = re.compile(r"window$|kv_|latent|chunk|sparse").search  # in names of entries
UNKNOWN = "a description without knowing it would be a guess"


def describe_config(
    values: Mapping[str, Any], file: Path, name: str, weight_bytes: int | None, inside: str = ""
) -> ModelShape:
    """The shapes of the layers that transformers builds from a configuration: that of config.json,
    or of the model that a converted one was made from, which stands `inside` a file.

    `name` is that of the model, `weight_bytes` the size of its files of weights. Raises a
    CheckpointError that names the entry, or has the reason of transformers.
    """
    dtype, remarks = _dtype(values, file, inside)
    architecture, kind = _architecture(values, file, inside)
    with _errors(file, f"'{inside}model_type' {architecture!r}"):
        config = _config(values, kind)
        text = config.get_text_config(decoder=True) if "text_config" in vars(config) else config
        _check_sizes(config, text, values, file, inside)
        layers, classes = _layers(_built(text), text)
        remarks += (*_about_parts(config, text, values), *_about_running(classes))
        positions = getattr(text, "max_position_embeddings", None)
    return ModelShape(
        name=name,
        architecture=architecture,
        layers=layers,
        hidden_size=layers[0].hidden_size,
        dtype=dtype,
        max_positions=positions,
        weight_bytes=weight_bytes,
        remarks=remarks,
    )


def _architecture(values: Mapping[str, Any], file: Path, inside: str) -> tuple[str, Any]:
    """The architecture's name, and its class of configurations in transformers."""
    require("transformers")
    name = values.get("model_type")
    if not isinstance(name, str):
        rule = f"'{inside}model_type' must name the architecture"
        raise refused(file, rule, name, "add it, as 'llama'")
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if name not in CONFIG_MAPPING:
        rule = f"'{inside}model_type' cannot be described: transformers has no such architecture"
        raise refused(file, rule, name, UNKNOWN)
    return name, CONFIG_MAPPING[name]


def _config(values: Mapping[str, Any], kind: Any) -> Any:
    """Build the configuration object of transformers from a file's entries."""
    given = {key: copy.deepcopy(value) for key, value in values.items() if key not in LEFT_OUT}
    for inner in given.values():
        for key in LEFT_OUT if isinstance(inner, dict) else ():
            inner.pop(key, None)
    config = kind.from_dict(given)
    if config.is_encoder_decoder or getattr(config, "add_cross_attention", False):
        raise ValueError("it has cross-attention, whose cache follows another sequence")
    return config


def _check_sizes(
    config: Any, text: Any, values: Mapping[str, Any], file: Path, inside: str
) -> None:
    """Raise unless the file has the sizes of its layers, and they are sizes of a model."""
    if text is not config:
        inside += "text_config."
    for entry, most in MOST.items():
        value = getattr(text, entry, None)
        needed = entry in SIZES and hasattr(text, entry)
        if needed and config is text and not _given(text, values, entry):
            value = None
        if not needed and (value is None or (value == 0 and entry == "sliding_window")):
            continue
        if type(value) is not int or not 1 <= value <= most:
            shown = text.attribute_map.get(entry, entry)
            rule = f"'{inside}{shown}' must be a whole number of 1 to {most}"
            raise refused(file, rule, value, "correct the entry")


def _given(text: Any, values: Mapping[str, Any], entry: str) -> bool:
    """Whether a file has an entry, by its own name or the usual one."""
    return any(values.get(name) is not None for name in (entry, text.attribute_map.get(entry)))


@contextmanager
def _errors(file: Path, what: str) -> Iterator[None]:
    """A context that raises every error of transformers as a CheckpointError of one sentence, and
    hides its warnings."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except CheckpointError:
        raise
    except Exception as error:  # of entries that are wrong in any way
        rule = f"{what} cannot be described"
        message = " ".join(f"{type(error).__name__}: {error}".split())
        raise refused(file, rule, message, "correct the entry") from error
    finally:
        logging.set_verbosity(before)


def _built(text: Any) -> nn.Module:
    """The text model on the meta device. Raises a ValueError if it is no model of text, or has too
    many modules."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING, MODEL_MAPPING

    of_text = type(text) in MODEL_FOR_CAUSAL_LM_MAPPING or type(text) in MODEL_FOR_MASKED_LM_MAPPING
    if not of_text and text.model_type != "vit":
        raise ValueError("transformers has no model for it that reads or writes text alone")
    text = copy.deepcopy(text)
    text._attn_implementation = "eager"
    if getattr(text, "max_position_embeddings", None) is not None:
        text.max_position_embeddings = min(text.max_position_embeddings, POSITIONS)
    classes = MODEL_MAPPING if type(text) in MODEL_MAPPING else MODEL_FOR_CAUSAL_LM_MAPPING
    made_by = classes[type(text)]
    too_many = ValueError(f"it has more than {PARTS:,} modules and parameters")
    with at_most(PARTS, lambda name: too_many), torch.device("meta"):
        model: nn.Module = (made_by[0] if isinstance(made_by, tuple) else made_by)(text)
    return model


def _layers(model: nn.Module, text: Any) -> tuple[tuple[LayerShape, ...], dict[str, None]]:
    """The shape of each layer, and the classes of their attention."""
    rotates = any("rotary" in name for name, _ in model.named_modules())
    kinds = getattr(text, "layer_types", None) or [""] * text.num_hidden_layers
    latest: dict[str, int] = {}  # layer of each kind that has keys of its own
    shapes: list[LayerShape] = []
    classes: dict[str, None] = {}
    for index, (layer, kind) in enumerate(zip(_stack(model, text), kinds, strict=True)):
        module = _attention(layer, index)
        shared = latest[kind] if getattr(module, "is_kv_shared_layer", False) else None
        if shared is None:
            latest[kind] = index
        shape = shape_of_module(module, text, kind, rotates=rotates, keys_of=shared)
        of_heads = shape.kind in ("MHA", "GQA", "MQA")  # modules round heads of a group down
        given = getattr(text, "num_key_value_heads", None) if of_heads else None
        for keys in (shape.num_kv_heads, given or 1):
            if shape.num_heads % keys:
                raise ValueError(f"{keys} key heads do not divide {shape.num_heads} query heads")
        if shared is not None:
            reason = shapes[shared].unsupported or "keys and values are those of another layer"
            shape = replace(shape, unsupported=reason)
        shapes.append(shape)
        classes[type(getattr(module, "self", module)).__name__] = None
    return tuple(shapes), classes


def _stack(model: nn.Module, text: Any) -> nn.ModuleList:
    """The list of the model's layers."""
    for child in model.modules():
        if isinstance(child, nn.ModuleList) and len(child) == text.num_hidden_layers:
            return child
    raise ValueError(f"{type(model).__name__} has no list of {text.num_hidden_layers} layers")


def _attention(layer: nn.Module, index: int) -> nn.Module:
    """The module of a layer that mixes tokens: attention, or what stands in its place."""
    found: dict[str, nn.Module] = {}
    for name, module in layer.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if name and not inside and ATTENTION.search(type(module).__name__):
            found[name] = module
    if len(found) != 1:
        names = ", ".join(type(each).__name__ for each in found.values()) or "none that is known"
        raise ValueError(
            f"layer {index}, {type(layer).__name__}, has {names} as attention, not one"
        )
    return found.popitem()[1]


def _dtype(values: Mapping[str, Any], file: Path, inside: str) -> tuple[str, tuple[str, ...]]:
    """The dtype of the cache, and a remark if the file names none."""
    inner = values.get("text_config")
    holders = [inner, values] if isinstance(inner, dict) else [values]
    given = [each.get(name) for name in ("dtype", "torch_dtype") for each in holders]
    name = next((each for each in given if each is not None), "auto")
    if not isinstance(name, str):
        raise refused(file, f"'{inside}dtype' must be the name of a dtype", name, "correct it")
    name = name.removeprefix("torch.")
    if name == "auto":
        return "float32", ("The file names no dtype: sizes are those of float32.",)
    if name not in DTYPE_BYTES:
        rule = f"'{inside}dtype' must be one of {', '.join(DTYPE_BYTES)}"
        raise refused(file, rule, name, "correct the entry")
    return name, ()


def _about_parts(config: Any, text: Any, values: Mapping[str, Any]) -> tuple[str, ...]:
    remarks: tuple[str, ...] = ()
    if getattr(text, "quantization_config", None) or values.get("quantization_config"):
        remarks += ("Weights are quantised; parameters are counted as they are before that.",)
    if getattr(text, "alibi", False):
        remarks = ("Scores have ALiBi's bias instead of RoPE.", *remarks)
    inner = values if text is config else values.get("text_config") or {}
    known = {each.name for each in fields(text)} | text.attribute_map.keys()
    if unread := sorted(key for key in inner if key not in known and inner[key] and MATTERS(key)):
        remarks += (f"transformers does not read {', '.join(unread)} of this architecture.",)
    if text is config:
        return remarks
    if left := [entry for entry in SIZES if not _given(text, inner, entry)]:
        listed = ", ".join(left)
        remarks += (f"The file leaves out {listed}: these are the values transformers takes.",)
    return (*remarks, "Only the part that writes text is described; others attend on their own.")


def _about_running(classes: Mapping[str, None]) -> tuple[str, ...]:
    if not (names := [name for name in classes if "Attention" in name]):
        return ()
    if all(name in FAMILIES for name in names):
        return (f"regard.hf.install runs it: {names[0]} is in regard.hf.FAMILIES.",)
    return (
        f"regard.hf.install does not run {names[0]}; regard.hf.register() runs what goes through "
        "transformers' attention interface.",
    )
