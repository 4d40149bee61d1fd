"""save: a converted model in a folder of its own, which is complete or is not there."""

import json
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from regard.hf.families.finding import attention_modules
from regard.hf.loading.latent_layers import FORMAT, INDEX, MODEL_TYPE, WEIGHTS
from regard.hf.loading.offloaded import fetched
from regard.hf.placing.describing import described
from regard.hf.placing.placing import hosts

SHARD = "5GB"


def check_free(out: str | Path) -> Path:
    """The path, if a folder can be made of it: call it before the work that leads to `save`.

    Raises:
        FileExistsError: if there is something that is not an empty folder.
        FileNotFoundError: if the folder it lies in is missing.
    """
    out = Path(out).absolute()
    if out.is_symlink() or out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise FileExistsError(f"{out} exists and is not empty; give another folder, or remove it")
    if not out.parent.is_dir():
        raise FileNotFoundError(f"{out.parent} is not a folder; make it, or give another out")
    return out


def save(
    model: Any,
    tokenizer: Any,
    out: str | Path,
    *,
    card: str,
    report: Mapping[str, Any],
    max_shard_size: str = SHARD,
) -> Path:
    """Write a converted model, and say where it is.

    A model in a form that transformers knows is written by `save_pretrained`, for anybody to load.
    One with latent layers is written for `regard.hf.load`: `config.json` describes the base model
    and every layer, weights are in `regard.safetensors`, and transformers by itself refuses it.

    Everything is written to a folder beside `out`, which gets its name last: whatever interrupts,
    `out` holds all of it or is not there.

    Args:
        model: from `regard.hf.place` or `to_deepseek_v3`.
        tokenizer: its tokenizer, or None.
        out: a folder that is not there yet, or is empty.
        card: the text of the model card, `README.md`.
        report: what was done and lost, for `report.json`.
        max_shard_size: of a file of weights.

    Raises:
        FileExistsError: if `out` is there and not empty.
        FileNotFoundError: if the folder that `out` lies in is missing.
        TypeError, ValueError: if the report is not what JSON holds, or a layer cannot be described.
    """
    out = check_free(out)
    texts = {"README.md": card, "report.json": _json(report)}
    with _beside(out) as folder:
        if hosts(model):
            _write_hosted(model, folder, max_shard_size)
        else:
            _write_stock(model, folder, max_shard_size)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    return out


@contextmanager
def _beside(out: Path) -> Iterator[Path]:
    """A new folder that becomes `out` if all goes well, and is removed if not."""
    folder = out.with_name(f".{out.name}.{uuid4().hex[:8]}.partial")
    folder.mkdir()
    try:
        yield folder
        for file in folder.rglob("*"):
            _flush(file)
        _flush(folder)
        if out.exists():
            out.rmdir()  # empty, or this raises
        folder.rename(out)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    _flush(out.parent)


def _flush(path: Path) -> None:
    """To the disk, so that a name never stands for what is not yet written."""
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
        # of weights on the disk, that a shard must fit into memory: it does
        warnings.filterwarnings("ignore", "Attempting to save a model with offloaded modules")
        model.save_pretrained(folder, max_shard_size=max_shard_size)


def _write_hosted(model: Any, folder: Path, max_shard_size: str) -> None:
    config = _base_config(model)
    modules: Any = attention_modules(model).values()
    entries = [described(module) for module in modules]
    said = {
        "model_type": MODEL_TYPE,
        "architectures": ["RegardModel"],
        "format": FORMAT,
        "base": config,
        "layers": entries,
    }
    (folder / "config.json").write_text(_json(said), encoding="utf-8")
    _write_weights(model, folder, max_shard_size)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(folder)


def _base_config(model: Any) -> dict[str, Any]:
    """The configuration of the model that the layers stand in, as transformers would save it."""
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
        tensors = {key: _held(model, key, state[key]).contiguous() for key in keys}
        save_file(tensors, folder / name, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / INDEX).write_text(_json(index), encoding="utf-8")


def _held(model: Any, key: str, tensor: Any) -> Any:
    """The tensor, from the disk if it was left there: one file's worth is in memory at a time."""
    path, _, name = key.rpartition(".")
    return fetched(model.get_submodule(path), name) if tensor.is_meta else tensor


def _untied(model: Any) -> dict[str, Any]:
    """Every tensor once: what the model ties, it ties again; whatever else shares is copied."""
    state = model.state_dict()
    tied = getattr(model, "_tied_weights_keys", None) or {}
    for name, source in dict(tied).items():
        if name in state and source in state and _same(model, state[name], state[source]):
            del state[name]
    seen: set[int] = set()
    for name, tensor in state.items():
        start = tensor.untyped_storage().data_ptr()
        if start in seen:
            state[name] = tensor.clone()
        seen.add(start)
    return dict(state)


def _same(model: Any, one: Any, other: Any) -> bool:
    if one.is_meta or other.is_meta:  # on the disk: the configuration says it
        return bool(model.config.tie_word_embeddings)
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape
