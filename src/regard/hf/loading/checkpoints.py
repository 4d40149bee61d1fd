"""Loading a model from a Hugging Face folder or a GGUF: nothing is fetched, nothing executed.

Checkpoints are not trusted. What transformers would read is checked first, and the model's skeleton
is compared with the headers of the weights before memory for any weight is allocated.
"""

import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import mkdtemp
from typing import Any
from weakref import finalize

import torch

from regard.cache_folder import FOLDER
from regard.hf.loading import gguf_copies, latent_layers
from regard.hf.loading.huge_pages import to_huge_pages
from regard.hf.loading.reading_gguf import check_gguf, read_once
from regard.hf.loading.skeleton import MEND, check_skeleton, filled, model_class
from regard.hf.loading.untrusted import (
    CheckpointError,
    Contents,
    check_config,
    check_files,
    check_json_files,
    check_weights,
    read_json,
    refused,
)
from regard.hf.packages import quiet, require

SLOW = 10.0  # seconds of reading a GGUF: if longer, and no copy could be written, a warning
Progress = Callable[[str, int, int], None]  # the current step, steps done, steps in all
NEEDED = "a folder with config.json and *.safetensors, or a .gguf file"
TOKENIZERS = (  # any of these files is a tokenizer
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model"),
    *("sentencepiece.bpe.model", "vocab.json", "vocab.txt", "tekken.json"),
)


def load(
    path: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    low_memory: bool = False,
    progress: Progress = lambda what, done, total: None,
) -> tuple[Any, Any]:
    """A model in eval mode and its tokenizer, offline; None for a tokenizer that is not there.

    Reads what `save_pretrained` and `regard.convert.save` write, and GGUF files; pickles and code
    that comes with a checkpoint are refused. The model's class is the first of the configuration's
    `architectures` that transformers has.

    Reading a GGUF takes long, so a safetensors copy is written to `$REGARD_CACHE`,
    `$XDG_CACHE_HOME/regard` or `~/.cache/regard`, and read the next time. If no copy can be
    written, and reading took more than ten seconds, there is a warning. On a CPU weights are read
    into huge pages, as by `to_huge_pages`.

    Args:
        path: of a folder, or of a GGUF file.
        dtype: of the weights.
        device: where they go.
        low_memory: leave the weights in their safetensors, and fetch each when it is read: for
            models larger than the memory. They run on the CPU, slowly.
        progress: called with the current step, steps done and steps in all, while a GGUF is read.

    Returns:
        The model and the tokenizer.

    Raises:
        FileNotFoundError: if there is nothing at `path`, or the folder lacks a file.
        CheckpointError: if what is there is not a sound model; a ValueError.
        ValueError: if `low_memory` is asked for a GGUF file or a folder of `regard.convert.save`.
        ImportError: if transformers is missing.

    Examples:
        >>> import tempfile
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from regard.hf import load
        >>> config = LlamaConfig(hidden_size=16, num_attention_heads=2, vocab_size=20,
        ...     num_hidden_layers=1, intermediate_size=16)
        >>> made = LlamaForCausalLM(config)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     made.save_pretrained(folder)
        ...     model, tokenizer = load(folder, dtype=torch.bfloat16)
        >>> type(model).__name__, model.dtype, tokenizer
        ('LlamaForCausalLM', torch.bfloat16, None)
    """
    with _reading(path) as path:
        placed = path.is_dir() and latent_layers.is_described(path)
        if low_memory and (placed or not path.is_dir()):
            raise _Refused("low_memory reads stock safetensors; give the model's own folder")
        if placed:
            model, config = latent_layers.load_described(path, dtype)
            tokenizer = _tokenizer(_local(path), config=config) if _has_tokenizer(path) else None
        elif path.is_dir():
            model, tokenizer = _from_folder(path, dtype, low_memory)
        else:
            model, tokenizer = _from_gguf(path, dtype, progress)
    if not low_memory:
        to_huge_pages(model.to(device))
    return model.eval(), tokenizer


def skeleton(path: str | Path) -> Any:
    """The model that `load` would return, on the meta device: its modules without weights.

    Of the weights only headers are read, so that errors of the configuration take a second. Raises
    as `load`.
    """
    with _reading(path) as path:
        if path.is_dir() and latent_layers.is_described(path):
            return latent_layers.check_described(path)[2]
        with nullcontext() if path.is_dir() else read_once():
            source, contents, _ = _folder(path) if path.is_dir() else sound_gguf(path)
            config = _config(source)
        return check_skeleton(model_class(config), config, contents, path).eval()


def stored_dtype(path: str | Path) -> torch.dtype:
    """The dtype of a checkpoint, which its cache has: the one that its configuration names, else
    that of most of its weights; float16 of a GGUF, whose codes stand for numbers of 16 bits.

    Args:
        path: of a folder, or of a GGUF file.

    Raises:
        FileNotFoundError, CheckpointError, ImportError: as `load`.

    Examples:
        >>> import tempfile
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from regard.hf.loading.checkpoints import stored_dtype
        >>> config = LlamaConfig(hidden_size=16, num_attention_heads=2, vocab_size=20,
        ...     num_hidden_layers=1, intermediate_size=16)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
        ...     stored_dtype(folder)
        torch.bfloat16
    """
    with _reading(path) as path:
        if not path.is_dir():
            return torch.float16
        if latent_layers.is_described(path):
            config, contents, _ = latent_layers.base_of(path)
        else:
            source, contents, _ = _folder(path)
            config = _config(source)
    named: torch.dtype | None = config.get_text_config(decoder=True).dtype or config.dtype
    return named or getattr(torch, contents.dtype)


def _from_folder(path: Path, dtype: torch.dtype, low_memory: bool = False) -> tuple[Any, Any]:
    source, contents, has_tokenizer = _folder(path)
    tokenizer = _tokenizer(source) if has_tokenizer else None
    return _model(source, contents, path, dtype, low_memory), tokenizer


def _from_gguf(path: Path, dtype: torch.dtype, progress: Progress) -> tuple[Any, Any]:
    """Load a GGUF from its safetensors copy, or from itself and write the copy."""
    checked = sound_gguf(path)
    name = gguf_copies.name_of(path, dtype)
    copy = gguf_copies.find(name)
    if copy is not None:
        model, tokenizer = _from_folder(copy, dtype)
        model.config.name_or_path = str(path.parent)
        return model, tokenizer
    started = time.perf_counter()
    model, tokenizer = read_gguf(path, checked, dtype, progress)
    seconds = time.perf_counter() - started
    progress("writing a copy", 2, 3)
    with quiet():
        missing = gguf_copies.write(name, model, tokenizer)
    progress("read", 3, 3)
    if missing is not None and seconds > SLOW:
        warnings.warn(
            f"reading {path} took {seconds:.0f} s, and will again: no copy was written, because "
            f"{missing}; set {FOLDER} to a folder that can be written",
            stacklevel=4,
        )
    return model, tokenizer


def read_gguf(
    path: Path,
    checked: tuple[dict[str, Any], Contents, bool],
    dtype: torch.dtype,
    progress: Progress = lambda what, done, total: None,
) -> tuple[Any, Any]:
    """The model and the tokenizer of a GGUF that `sound_gguf` found sound, from the file itself."""
    source, contents, has_tokenizer = checked
    with read_once():
        progress("reading the vocabulary", 0, 3)
        tokenizer = _tokenizer(source) if has_tokenizer else None
        progress("reading weights", 1, 3)
        model = _model(source, contents, path, dtype)
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None:  # the weights are dequantised now, and can be saved
        quantizer.remove_quantization_config(model)
    vars(model.config).pop("quantization_config", None)
    return model, tokenizer


def _folder(path: Path) -> tuple[dict[str, Any], Contents, bool]:
    """Arguments of `from_pretrained`, what the weights hold, and whether there is a tokenizer."""
    if not (path / "config.json").exists():
        raise FileNotFoundError(f"{path} has no config.json; give {NEEDED}")
    check_files(path)
    check_json_files(path)
    check_config(read_json(path / "config.json"), path / "config.json")
    return _local(path), check_weights(path), _has_tokenizer(path)


def _local(path: Path, **given: Any) -> dict[str, Any]:
    """Arguments of `from_pretrained` that read this folder, and run no code from it."""
    name = {"pretrained_model_name_or_path": str(path)}
    return {**name, "local_files_only": True, "trust_remote_code": False, **given}


def _has_tokenizer(path: Path) -> bool:
    return any((path / name).exists() for name in TOKENIZERS)


def sound_gguf(path: Path) -> tuple[dict[str, Any], Contents, bool]:
    """Check a GGUF and the JSON files beside it; returns what `_folder` returns."""
    checked = check_gguf(path)
    check_json_files(path.parent)
    source = _local(path.parent, gguf_file=path.name)
    return source, checked.contents, "tokenizer.ggml.model" in checked.keys


def _tokenizer(source: Mapping[str, Any], **given: Any) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(**source, **given)


def _config(source: Mapping[str, Any]) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(**source)


class _Refused(ValueError):
    """An error of the arguments, not of the checkpoint."""


def _model(
    source: Mapping[str, Any],
    contents: Contents,
    path: Path,
    dtype: torch.dtype,
    low_memory: bool = False,
) -> Any:
    """The model, if the files hold all of its weights and it is no larger than they are."""
    options: dict[str, Any] = {}
    config = _config(source)
    made_by = model_class(config)
    check_skeleton(made_by, config, contents, path)
    if made_by._supports_sdpa:  # else transformers chooses
        options["attn_implementation"] = "sdpa"
    if low_memory:
        require("accelerate")
        scratch = mkdtemp(prefix="regard-")
        options |= {"device_map": {"": "disk"}, "offload_folder": scratch}
    if "gguf_file" in source:
        from transformers import GgufConfig

        options["quantization_config"] = GgufConfig(dequantize=True)
    else:
        options["use_safetensors"] = True
    model = filled(made_by, path, **source, **options, config=config, dtype=dtype)
    if low_memory:
        finalize(model, shutil.rmtree, scratch, ignore_errors=True)
    return model


@contextmanager
def _reading(given: str | Path) -> Iterator[Path]:
    """The path, if it exists and the packages that read it are installed. In the `with` block there
    is no network, and every error becomes a CheckpointError that names the path."""
    path = Path(given)
    if not path.exists():
        on_the_hub = not path.is_absolute() and len(path.parts) == 2  # OWNER/NAME, perhaps
        fetch = f"; to fetch it from the Hub: hf download {path} --local-dir FOLDER"
        raise FileNotFoundError(f"{path} does not exist; give {NEEDED}{fetch * on_the_hub}")
    require("transformers", *(("safetensors",) if path.is_dir() else ("accelerate", "gguf")))
    from huggingface_hub import constants

    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield path
    except (CheckpointError, FileNotFoundError, _Refused):
        raise
    except BaseException as error:
        # a panic of the Rust code in tokenizers and safetensors is not an Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        what = f"{type(error).__name__}: {error}"
        raise refused(path, "transformers must be able to read it", what, MEND) from error
    finally:
        constants.HF_HUB_OFFLINE = before
