"""Loading what `regard.convert.save` writes for latent layers: a base model, and layers as data.

The folder has `model_type: regard`, and its weights have another file name than usual, so that no
other library loads it with random values for missing weights. It is checked as any checkpoint is.
"""

from pathlib import Path
from typing import Any

import torch

from regard.hf.loading.descriptions import layer_from
from regard.hf.loading.skeleton import check_skeleton, filled, model_class
from regard.hf.loading.untrusted import (
    Contents,
    check_config,
    check_files,
    check_json_files,
    check_weights,
    read_json,
    refused,
)
from regard.hf.placing.place import place

MODEL_TYPE = "regard"
FORMAT = 1
WEIGHTS, INDEX = "regard.safetensors", "regard.index.json"
ENTRIES = {"model_type", "architectures", "format", "base", "layers"}


def is_described(folder: Path) -> bool:
    """Whether `folder` holds a model with latent layers of regard. Raises a CheckpointError if its
    configuration cannot be read, or leads out of the folder."""
    file = folder / "config.json"
    if not file.exists():
        return False
    check_files(folder)
    return read_json(file).get("model_type") == MODEL_TYPE


def load_described(folder: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    """The model in `folder`, and the configuration of its base model. Raises a FileNotFoundError if
    weights are missing, and a CheckpointError if the files are not those of a sound model."""
    from transformers import GenerationConfig

    made_by, config, _ = check_described(folder)
    source = {"pretrained_model_name_or_path": None, "state_dict": _weights(folder)}
    options = {"config": config, "dtype": dtype, "attn_implementation": "sdpa"}
    model = filled(made_by, folder, **source, **options)
    model.__class__ = made_by.__base__  # the subclass is needed for its constructor only
    model.config.name_or_path = str(folder)
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    return model, model.config


def check_described(folder: Path) -> tuple[Any, Any, Any]:
    """The class of the model in `folder`, its configuration, and the model on the meta device.
    Raises as `load_described`."""
    config, contents, entries = base_of(folder)
    made_by = _with_layers(model_class(config), entries, folder / "config.json")
    return made_by, config, check_skeleton(made_by, config, contents, folder)


def base_of(folder: Path) -> tuple[Any, Contents, list[Any]]:
    """The base model's configuration, the contents of the weights, and the entries for layers."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    check_json_files(folder)
    file = folder / "config.json"
    description = read_json(file)
    check_config(description, file)
    contents = check_weights(folder, WEIGHTS, INDEX)
    if set(description) != ENTRIES:
        raise refused(file, f"it must have {', '.join(sorted(ENTRIES))}", sorted(description))
    if description["format"] != FORMAT:
        out = "a newer regard may read it"
        raise refused(file, f"'format' must be {FORMAT}", description["format"], out)
    base, layers = description["base"], description["layers"]
    model_type = base.get("model_type") if isinstance(base, dict) else None
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise refused(file, "'base' must be the configuration of a model of transformers", base)
    if base.get("quantization_config") is not None:
        raise refused(file, "'base' may not be quantised", base["quantization_config"])
    if not isinstance(layers, list):
        raise refused(file, "'layers' must be a list", layers)
    return CONFIG_MAPPING[model_type].from_dict(base), contents, layers


def _with_layers(base: Any, entries: list[Any], file: Path) -> Any:
    """A subclass of `base` whose constructor places the layers that `entries` describe."""

    class WithLayers(base):  # type: ignore[misc]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            if len(entries) > config.get_text_config(decoder=True).num_hidden_layers:
                raise refused(file, "'layers' must have one entry for each layer", len(entries))
            place(self, [layer_from(entry, file) for entry in entries])

    WithLayers.__name__ = base.__name__  # transformers chooses the loss by it
    return WithLayers


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of the checkpoint, by name."""
    from safetensors.torch import load_file

    files = {WEIGHTS}
    if not (folder / WEIGHTS).is_file():
        files = set(read_json(folder / INDEX)["weight_map"].values())
    loaded = (load_file(folder / name) for name in sorted(files))
    return {name: tensor for tensors in loaded for name, tensor in tensors.items()}
