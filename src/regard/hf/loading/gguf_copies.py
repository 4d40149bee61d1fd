"""Copies of GGUF files as safetensors in the user's cache: reading them again takes a second.

A copy is a folder that `save_pretrained` wrote, with a digest of each of its files. Its name is a
digest of all that it was made of. Weights are copied bit by bit. The folder is written under
another name and renamed when it is complete; an incomplete or changed copy is written anew.
"""

import hashlib
import json
import os
import shutil
import tempfile
import time
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from regard.cache_folder import cache_folder, remove_oldest
from regard.hf.loading.untrusted import OTHER_JSON, TOKENIZER_JSON, CheckpointError, read_json

FORMAT = 1  # of a copy, part of its name: a change of format makes new copies
MOST = 8 << 30  # bytes of all copies together: those read longest ago are removed first
ABANDONED = 86_400  # seconds after which an incomplete copy is that of a killed process
DIGESTS = "copy.json"
BESIDE = (*OTHER_JSON, *TOKENIZER_JSON, "chat_template.jinja", "tokenizer.model")
SAMPLE = "The 2 quick brown foxes, über 1,000 of them:\n\tjumped! <|end|> 東京"


def name_of(file: Path, dtype: torch.dtype) -> str:
    """The name of a copy: a digest of the GGUF, of the files beside it that transformers reads, of
    the dtype of the weights, and of the versions of the packages."""
    made_by = [str(FORMAT), str(dtype), *(version(name) for name in ("transformers", "gguf"))]
    digest = hashlib.sha256("\0".join(made_by).encode())
    for each in (file, *(file.parent / name for name in BESIDE)):
        if each.is_file():
            digest.update(f"\0{each.name if each != file else ''}\0{_sha256(each)}".encode())
    return digest.hexdigest()


def find(name: str) -> Path | None:
    """The folder of the copy of this name, if all its files are there and unchanged."""
    try:
        folder = _root() / name
        files = read_json(folder / DIGESTS)
        there = {each.name for each in folder.iterdir()} - {DIGESTS}
        if there != set(files) or any(_sha256(folder / each) != files[each] for each in files):
            return None
        with suppress(OSError):  # on a read-only disk nothing is removed, by age or otherwise
            os.utime(folder)
    except (OSError, RuntimeError, CheckpointError):
        return None
    return folder


def write(name: str, model: Any, tokenizer: Any) -> str | None:
    """Write a copy; returns None, or a sentence that says why there is no copy."""
    nbytes = sum(each.numel() * each.element_size() for each in model.parameters())
    if nbytes > MOST:
        return f"it would take {nbytes >> 30} GiB, and copies may take {MOST >> 30} GiB together"
    try:
        root = _root()
        root.mkdir(parents=True, exist_ok=True)
        if nbytes > shutil.disk_usage(root).free // 2:
            return f"it would take more than half of what is free in {root}"
        with tempfile.TemporaryDirectory(dir=root, suffix=".partial") as scratch:
            made = Path(scratch) / name
            _write_files(made, model, tokenizer)
            shutil.rmtree(root / name, ignore_errors=True)  # one that `find` rejected
            made.rename(root / name)
        for each in root.glob("*.partial"):
            if time.time() - each.stat().st_mtime > ABANDONED:
                shutil.rmtree(each, ignore_errors=True)
        whole = (each for each in root.iterdir() if each.is_dir() and each.suffix != ".partial")
        remove_oldest(whole, MOST, keep=root / name)
    except Exception as error:  # of the disk or of saving: the model itself is loaded already
        return f"{type(error).__name__}: {error}"
    return None


def _root() -> Path:
    return cache_folder() / "gguf"


def _write_files(folder: Path, model: Any, tokenizer: Any) -> None:
    model.save_pretrained(folder)
    if tokenizer is not None:
        from transformers import AutoTokenizer

        tokenizer.save_pretrained(folder)
        again = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        if len(again) != len(tokenizer) or again(SAMPLE) != tokenizer(SAMPLE):
            raise ValueError("the tokenizer reads back as a different one")
    digests = {each.name: _sha256(each) for each in sorted(folder.iterdir())}
    (folder / DIGESTS).write_text(json.dumps(digests), encoding="utf-8")


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
