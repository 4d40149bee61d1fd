"""The shapes of a model's attention, from its description on disk: no weights are read."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from regard.hf.loading.descriptions import layer_from
from regard.hf.loading.latent_layers import ENTRIES, FORMAT, MODEL_TYPE
from regard.hf.loading.untrusted import check_config, check_files, read_json, refused
from regard.hf.packages import require
from regard.plan.building import describe_config
from regard.plan.modules import shape_of
from regard.plan.shapes import ModelShape

CONFIG = "config.json"


def describe(path: str | Path) -> ModelShape:
    """The layers of a model's attention, from its description alone.

    Neither weights nor vocabulary are read. The layers are those that transformers builds of the
    configuration, on the meta device, where weights take no memory; kinds of layers whose cache is
    not known are refused by name.

    Args:
        path: a folder with config.json, such a file, or a .gguf; also a folder that
            `regard.convert.save` has written.

    Returns:
        The layers in order, and what else a plan needs.

    Raises:
        FileNotFoundError: if there is no such file, or no config.json in the folder.
        CheckpointError: naming the file, the entry, the rule and what came: for an architecture
            that transformers does not have, an entry that is missing or wrong, and damaged files.
        ImportError: if transformers is missing, or gguf for a GGUF.

    Examples:
        >>> import json, tempfile
        >>> from pathlib import Path
        >>> from regard.plan import describe
        >>> config = {"model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16,
        ...     "num_attention_heads": 32, "num_key_value_heads": 8, "rope_theta": 500000.0}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "config.json").write_text(json.dumps(config))
        ...     model = describe(folder)
        >>> len(model.layers), model.layers[0].kind, model.layers[0].head_dim, model.layers[0].rope
        (16, 'GQA', 64, 'Rotary(64, theta=500000.0)')
    """
    path, in_folder = Path(path), Path(path).is_dir()
    if in_folder:
        check_files(path)
    file = path / CONFIG if in_folder else path
    if not file.exists() or file.is_dir():
        raise FileNotFoundError(
            f"{file} does not exist: give a folder with {CONFIG}, a {CONFIG} or a .gguf file"
        )
    if file.suffix.lower() == ".gguf":
        return _describe_gguf(file)
    values, name = read_json(file), file.parent.resolve().name
    check_config(values, file)
    weight_bytes = _bytes_of_weights(path) if in_folder else None
    read = _describe_converted if values.get("model_type") == MODEL_TYPE else describe_config
    return read(values, file, name, weight_bytes)


def _bytes_of_weights(folder: Path) -> int | None:
    """The size of the files of weights; those of other formats beside them do not count."""
    for pattern in ("model*.safetensors", "regard*.safetensors", "*.safetensors"):
        if files := [file for file in folder.glob(pattern) if file.is_file()]:
            return sum(file.stat().st_size for file in files)
    return None


def _describe_converted(
    values: Mapping[str, Any], file: Path, name: str, weight_bytes: int | None
) -> ModelShape:
    """The shapes of the layers that `regard.convert.save` has written, and what the description of
    the model that they were made from says besides."""
    if set(values) != ENTRIES or values["format"] != FORMAT:
        rule = f"it must have {', '.join(sorted(ENTRIES))}, and format {FORMAT}"
        raise refused(file, rule, sorted(values))
    base, entries = values["base"], values["layers"]
    if not isinstance(base, dict) or not isinstance(entries, list):
        raise refused(file, "'base' must be an object and 'layers' a list", values)
    model = describe_config(base, file, name, weight_bytes, inside="base.")
    if len(entries) != len(model.layers):
        rule = f"'layers' must have an entry for each of the {len(model.layers)} layers"
        raise refused(file, rule, len(entries))
    with torch.device("meta"):  # no memory for parameters
        layers = tuple(shape_of(layer_from(entry, file)) for entry in entries)
    for layer in layers:
        if layer.hidden_size != model.hidden_size:
            rule = f"layers must have the base's hidden_size={model.hidden_size}"
            raise refused(file, rule, layer.hidden_size)
    remarks = (f"Converted from {model.architecture}; regard.hf.load runs it.",)
    return replace(model, architecture=MODEL_TYPE, layers=layers, remarks=remarks)


def _describe_gguf(file: Path) -> ModelShape:
    """The shapes that transformers reads from the header of a GGUF."""
    require("transformers", "gguf")
    from regard.hf.loading.reading_gguf import check_gguf, read_once

    checked = check_gguf(file)
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    try:
        with read_once():
            values = dict(load_gguf_checkpoint(file)["config"])
    except (ValueError, KeyError, TypeError) as error:
        rule = "transformers must be able to read its configuration"
        raise refused(file, rule, str(error), "describe the model's config.json") from error
    check_config(values, file)
    model = describe_config({"dtype": "float16"} | values, file, file.stem, None)
    remark = "Sizes are those of a float16 cache, which llama.cpp has if nothing else is given."
    return replace(model, weight_bytes=checked.contents.nbytes, remarks=(remark, *model.remarks))
