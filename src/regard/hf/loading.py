"""Loading a model from a Hugging Face folder or a GGUF: nothing is fetched, nothing executed."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partialmethod
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

GGUF_MAGIC = b"GGUF"
NEEDED = "a folder with config.json and *.safetensors, or a .gguf file"


def load(
    path: str | Path, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> tuple[Any, Any]:
    """A model in eval mode and its tokenizer, offline.

    Reads safetensors and GGUF only; pickles and code that comes with a checkpoint are refused.

    Raises:
        FileNotFoundError: if there is nothing at `path`, or the folder lacks a file.
        ValueError: if what is there is not a model.
        ImportError: if transformers is missing.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; give {NEEDED}")
    source = _folder(path) if path.is_dir() else _gguf(path)
    model, tokenizer = _read(source, dtype)
    return model.to(device).eval(), tokenizer


def _folder(path: Path) -> dict[str, Any]:
    if not (path / "config.json").is_file():
        raise FileNotFoundError(f"{path} has no config.json; give {NEEDED}")
    if not any(path.glob("*.safetensors")):
        pickles = sorted(file.name for file in path.glob("*.bin"))
        why = f"it has {', '.join(pickles)}, and pickles can run code" if pickles else "it has none"
        raise FileNotFoundError(f"{path} needs weights in *.safetensors: {why}")
    return {"pretrained_model_name_or_path": str(path)}


def _gguf(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        if file.read(len(GGUF_MAGIC)) != GGUF_MAGIC:
            raise ValueError(f"{path} is not a model: it is not a GGUF file; give {NEEDED}")
    return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}


def _read(source: Mapping[str, Any], dtype: torch.dtype) -> tuple[Any, Any]:
    require("transformers", "accelerate" if "gguf_file" in source else "safetensors")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    local = {**source, "local_files_only": True, "trust_remote_code": False}
    try:
        tokenizer = AutoTokenizer.from_pretrained(**local)
        model = AutoModelForCausalLM.from_pretrained(
            **local, dtype=dtype, attn_implementation="sdpa", **_plain_weights(source)
        )
    except (OSError, ValueError, KeyError) as error:
        where = source["pretrained_model_name_or_path"]
        raise ValueError(f"{where} is not a model that transformers can read: {error}") from error
    return model, tokenizer


def _plain_weights(source: Mapping[str, Any]) -> dict[str, Any]:
    if "gguf_file" not in source:
        return {"use_safetensors": True}
    from transformers import GgufConfig

    return {"quantization_config": GgufConfig(dequantize=True)}


def require(*packages: str) -> None:
    """Raise an ImportError that says how to install what is missing."""
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise ImportError(
            f"regard.hf needs {', '.join(missing)}: python -m pip install 'regard[hf]'"
        )


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers' own bars and notes off the terminal while a program shows its own."""
    require("transformers", "tqdm")
    import tqdm
    from transformers.utils import logging

    made = tqdm.tqdm.__init__
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tqdm.tqdm.__init__ = partialmethod(made, disable=True)  # the GGUF reader asks nobody
    try:
        yield
    finally:
        tqdm.tqdm.__init__ = made
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
