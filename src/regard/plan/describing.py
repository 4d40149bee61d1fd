"""The shapes of a model's attention, from its description on disk: no weights are read."""

from pathlib import Path

from regard.hf.loading.untrusted import check_config, check_files, read_json
from regard.plan.configured import described_values
from regard.plan.converted import describe_converted
from regard.plan.shapes import ModelShape

CONFIG = "config.json"
OWN = "regard"  # the model_type of what regard.convert.save writes


def describe(path: str | Path) -> ModelShape:
    """The layers of a model's attention, from its description alone.

    Neither weights nor vocabulary are read, and transformers is not imported. Entries that are not
    known are refused by name if they may change what is visible or cached.

    Args:
        path: a folder with config.json, such a file, or a .gguf; also a folder that
            `regard.convert.save` has written.

    Returns:
        The layers in order, and what else a plan needs.

    Raises:
        FileNotFoundError: if there is no such file, or no config.json in the folder.
        CheckpointError: naming the file, the entry, the rule and what came: for an architecture
            that is not known, an entry that is missing, unknown or wrong, and damaged files.

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
    path = Path(path)
    if path.is_dir():
        check_files(path)
        if not (path / CONFIG).is_file():
            raise FileNotFoundError(
                f"{path} has no {CONFIG}: give a folder that has one, a {CONFIG} or a .gguf file"
            )
        return _described(path / CONFIG, path.resolve().name, _bytes_of_weights(path))
    if not path.exists():
        raise FileNotFoundError(
            f"{path} does not exist: give a folder with {CONFIG}, a {CONFIG} or a .gguf file"
        )
    if path.suffix.lower() == ".gguf":
        from regard.plan.gguf import describe_gguf

        return describe_gguf(path)
    return _described(path, path.resolve().parent.name, None)


def _bytes_of_weights(folder: Path) -> int | None:
    """The size of the files of weights; those of other formats beside them do not count."""
    for pattern in ("model*.safetensors", "regard*.safetensors", "*.safetensors"):
        files = [file for file in folder.glob(pattern) if file.is_file()]
        if files:
            return sum(file.stat().st_size for file in files)
    return None


def _described(file: Path, name: str, weight_bytes: int | None) -> ModelShape:
    values = read_json(file)
    check_config(values, file)
    if values.get("model_type") == OWN:
        return describe_converted(values, file, name, weight_bytes)
    return described_values(values, file, name, weight_bytes)
