"""Saving a converted model to a new folder, which appears only when it is complete."""

import json
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any
from uuid import uuid4

import torch

from regard.convert.measuring import dtype_name
from regard.hf.families.finding import attention_modules
from regard.hf.loading.descriptions import described
from regard.hf.loading.latent_layers import FORMAT, INDEX, MODEL_TYPE, WEIGHTS
from regard.hf.loading.offloaded import fetched
from regard.hf.placing.place import has_placed_layers

SHARD = "5GB"  # largest file of weights, as transformers 4 writes them


def check_free(out: str | Path) -> Path:
    """The absolute path, if `save` can write there; to be called before the work. Raises a
    FileExistsError if it is there and not an empty folder, a FileNotFoundError if its parent folder
    is missing, an OSError if that cannot be written."""
    out = Path(out).absolute()
    if out.is_symlink() or out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise FileExistsError(f"{out} exists and is not empty; give another folder, or remove it")
    if not out.parent.is_dir():
        raise FileNotFoundError(f"{out.parent} is not a folder; make it, or give another out")
    try:
        with TemporaryFile(dir=out.parent) as file:
            file.write(bytes(1 << 16))
    except OSError as error:
        raise _not_written(out, error) from error
    return out


def save(
    model: Any,
    tokenizer: Any,
    out: str | Path,
    *,
    card: str = "",
    report: Mapping[str, Any] | None = None,
    max_shard_size: str = SHARD,
    dtype: torch.dtype | None = None,
) -> Path:
    """Write a converted model, and return its path.

    A model whose layers transformers has is written by `save_pretrained`; transformers loads it.
    One with latent layers is written for `regard.hf.load`: `config.json` describes the base model
    and every layer, weights are in `regard.safetensors`, and transformers alone cannot load it.

    Everything is written to a folder beside `out`, which is renamed last: if writing is
    interrupted, `out` does not exist.

    Args:
        model: from `regard.hf.place` or `to_deepseek_v3`.
        tokenizer: its tokenizer, or None.
        out: a folder that does not exist yet, or is empty.
        card: the text of the model card, `README.md`; without one, the class of the model.
        report: data for `report.json`, if any.
        max_shard_size: largest size of a file of weights.
        dtype: of the weights that are written, one file after the other; as they are if None.

    Raises:
        FileExistsError: if `out` exists and is not empty.
        FileNotFoundError: if the parent folder of `out` is missing.
        TypeError, ValueError: if JSON cannot hold the report, or a layer cannot be described.

    Examples:
        >>> import tempfile
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from regard.convert import as_latent, save
        >>> from regard.hf import attention_modules, attention_of, load, place
        >>> config = LlamaConfig(hidden_size=16, num_attention_heads=2, vocab_size=20,
        ...     num_hidden_layers=1, intermediate_size=16)
        >>> model = LlamaForCausalLM(config)
        >>> (attention,) = attention_modules(model).values()
        >>> model = place(model, [as_latent(attention_of(attention))])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = save(model, None, f"{folder}/converted")
        ...     loaded, _ = load(path)
        >>> loaded.model.layers[0].self_attn.kind
        'LatentKV'
    """
    out = check_free(out)
    texts = {"README.md": card or f"# {type(model).__name__}\n\nConverted by regard.convert.\n"}
    if report is not None:
        texts["report.json"] = _json(report)
    with _beside(out) as folder:
        if has_placed_layers(model):
            _write_placed(model, folder, max_shard_size)
        else:
            _write_stock(model, folder, max_shard_size)
        if dtype is not None:
            _cast_files(folder, dtype, _tied_on_disk(model))
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    return out


@contextmanager
def _beside(out: Path) -> Iterator[Path]:
    """A new folder beside `out`, renamed to `out` at the end and removed after an error."""
    from safetensors import SafetensorError

    folder = out.with_name(f".{out.name}.{uuid4().hex[:8]}.partial")
    try:
        folder.mkdir()
        yield folder
        for file in folder.rglob("*"):
            _flush(file)
        _flush(folder)
        if out.exists():
            out.rmdir()  # empty, or this raises
        folder.rename(out)
    except Exception as error:
        of_disk = isinstance(error, OSError | SafetensorError) or type(error) is Exception
        if not of_disk:  # on a full disk, tokenizers raise an `Exception` of no class
            raise
        raise _not_written(out, error) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    _flush(out.parent)


def _not_written(out: Path, error: Exception) -> OSError:
    return OSError(
        f"{out} is not written: {error}; give a folder on a disk with room, whose parent folder "
        "can be written"
    )


def _flush(path: Path) -> None:
    """Write the file or folder to disk, so that the final name never refers to incomplete data."""
    if path.is_dir() and os.name != "posix":
        return
    handle = os.open(path, os.O_RDONLY if os.name == "posix" else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, allow_nan=False) + "\n"


def _write_stock(model: Any, folder: Path, max_shard_size: str) -> None:
    with warnings.catch_warnings():
        # it warns that a shard of offloaded weights must fit in memory
        warnings.filterwarnings("ignore", "Attempting to save a model with offloaded modules")
        model.save_pretrained(folder, max_shard_size=max_shard_size)


def _write_placed(model: Any, folder: Path, max_shard_size: str) -> None:
    config = _base_config(model)
    modules: Any = attention_modules(model).values()
    description = {
        "model_type": MODEL_TYPE,
        "architectures": ["RegardModel"],
        "format": FORMAT,
        "base": config,
        "layers": [described(module) for module in modules],
    }
    (folder / "config.json").write_text(_json(description), encoding="utf-8")
    _write_weights(model, folder, max_shard_size)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(folder)


def cast(name: str, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The weight of this name in a dtype. Raises a ValueError if it is too large for the dtype."""
    rounded = weight.to(dtype)
    if bool((rounded.isinf() & weight.isfinite()).any()):
        raise ValueError(
            f"{name} has a weight of {float(weight.abs().max()):.3g}, and {dtype_name(dtype)} "
            f"ends at {torch.finfo(dtype).max:.3g}; give --dtype bfloat16 or float32"
        )
    return rounded


def _tied_on_disk(model: Any) -> set[str]:
    """The weights of a model on disk that are others of its weights: transformers compares
    addresses, of which these have none, and writes them twice."""
    if not any(each.is_meta for each in model.parameters()):
        return set()
    tied = getattr(model, "_tied_weights_keys", None) or {}
    return set(dict(tied)) if model.config.tie_word_embeddings else set()


def _cast_files(folder: Path, dtype: torch.dtype, without: Set[str]) -> None:
    """Write the weights in a dtype, but some, one file at a time, and name it in the configuration:
    those of a model that lies on disk are not in memory together."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    saved = 0
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            keys = file.keys()
            tensors = {key: file.get_tensor(key) for key in keys if key not in without}
        floats = {key: each for key, each in tensors.items() if each.is_floating_point()}
        if len(tensors) < len(keys) or any(each.dtype != dtype for each in floats.values()):
            tensors |= {key: cast(key, each, dtype) for key, each in floats.items()}
            save_file(tensors, path, metadata=metadata)
        saved += sum(each.numel() * each.element_size() for each in tensors.values())
    for path in folder.glob("*.index.json"):
        index = json.loads(path.read_text(encoding="utf-8"))
        index["metadata"]["total_size"] = saved
        for key in without:
            index["weight_map"].pop(key, None)
        path.write_text(_json(index), encoding="utf-8")
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    named = config.get("base", config)
    named["dtype"] = str(dtype).removeprefix("torch.")
    path.write_text(_json(config), encoding="utf-8")


def _base_config(model: Any) -> dict[str, Any]:
    """The configuration of the model that the layers are placed in, as transformers saves it."""
    config = json.loads(model.config.to_json_string(use_diff=False))
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    given = config | {"architectures": [type(model).__name__], "dtype": dtype}
    return {name: value for name, value in given.items() if not name.startswith("_")}


def _write_weights(model: Any, folder: Path, max_shard_size: str) -> None:
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    state = _untied(model)
    stem, suffix = WEIGHTS.split(".")
    split = split_torch_state_dict_into_shards(
        state, filename_pattern=f"{stem}{{suffix}}.{suffix}", max_shard_size=max_shard_size
    )
    for name, keys in split.filename_to_tensors.items():
        tensors = {key: _loaded(model, key, state[key]).contiguous() for key in keys}
        save_file(tensors, folder / name, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / INDEX).write_text(_json(index), encoding="utf-8")


def _loaded(model: Any, key: str, tensor: Any) -> Any:
    """The tensor, read from disk if it is offloaded; one shard is in memory at a time."""
    path, _, name = key.rpartition(".")
    return fetched(model.get_submodule(path), name) if tensor.is_meta else tensor


def _untied(model: Any) -> dict[str, Any]:
    """The state dict without tied weights; other tensors that share memory are copied."""
    state = model.state_dict()
    tied = getattr(model, "_tied_weights_keys", None) or {}
    for name, source in dict(tied).items():
        if name in state and source in state and _same(model, state[name], state[source]):
            del state[name]
    starts: set[int] = set()
    for name, tensor in state.items():
        start = tensor.untyped_storage().data_ptr()
        if start in starts:
            state[name] = tensor.clone()
        starts.add(start)
    return dict(state)


def _same(model: Any, one: Any, other: Any) -> bool:
    if one.is_meta or other.is_meta:  # offloaded: the configuration tells
        return bool(model.config.tie_word_embeddings)
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape
