"""A GGUF is read once: its copy has the same weights, and damaged copies are written anew."""

import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch

from checkpoints import write_gguf
from regard.cache_folder import cache_folder
from regard.hf.loading import checkpoints, gguf_copies
from regard.hf.loading.checkpoints import load
from regard.hf.loading.gguf_copies import SAMPLE
from regard.rates import speed_path

WORDS = 300


@pytest.fixture
def file(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", WORDS)
    return tmp_path / "tiny.gguf"


@pytest.fixture
def reads(monkeypatch):
    """How often a GGUF itself was read."""
    seen, own = [], checkpoints.read_gguf
    monkeypatch.setattr(checkpoints, "read_gguf", lambda *a, **o: seen.append(a[0]) or own(*a, **o))
    return seen


def same(one, other):
    (model, words), (again, others) = one, other
    state, wanted = again.state_dict(), model.state_dict()
    assert state.keys() == wanted.keys()
    assert all(state[name].equal(each) for name, each in wanted.items())
    assert {each.dtype for each in state.values()} == {each.dtype for each in wanted.values()}
    assert type(again) is type(model) and again.config.name_or_path == model.config.name_or_path
    assert again.config._attn_implementation == model.config._attn_implementation
    assert others(SAMPLE) == words(SAMPLE) and len(others) == len(words) >= WORDS
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        assert again(ids).logits.equal(model(ids).logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_second_time_the_copy_is_read_and_gives_the_same(file, copies, reads, dtype):
    first = load(file, dtype=dtype)
    assert len(list(copies.iterdir())) == 1 and not list(copies.glob("*.partial"))
    same(first, load(file, dtype=dtype))
    assert len(reads) == 1


def test_a_model_from_a_gguf_is_saved_like_any_other(file, tmp_path):
    model, _ = load(file)
    model.save_pretrained(tmp_path / "again")
    assert "quantization_config" not in json.loads((tmp_path / "again/config.json").read_text())


def append(file):
    with file.open("ab") as stream:
        stream.write(b"\0" * 32)


def beside(file):
    (file.parent / "generation_config.json").write_text('{"max_new_tokens": 7}')


@pytest.mark.parametrize("change", [append, beside])
def test_another_file_has_a_copy_of_its_own(file, reads, change):
    load(file)
    change(file)
    load(file)
    assert len(reads) == 2


def test_another_dtype_has_a_copy_of_its_own(file, reads):
    load(file)
    assert load(file, dtype=torch.bfloat16)[0].dtype == torch.bfloat16
    assert len(reads) == 2


def cut(path):
    path.write_bytes(path.read_bytes()[:-8])


def flipped(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "config.json", "tokenizer.json", "copy.json"]
)
@pytest.mark.parametrize("spoil", [cut, flipped, Path.unlink])
def test_a_spoiled_copy_is_made_again(file, copies, reads, name, spoil):
    first = load(file)
    (folder,) = copies.iterdir()
    spoil(folder / name)
    same(first, load(file))
    same(first, load(file))
    assert len(reads) == 2


def test_a_file_that_was_put_into_a_copy_is_not_read(file, copies, reads):
    load(file)
    (folder,) = copies.iterdir()
    (folder / "chat_template.jinja").write_text("{{ 1 }}")
    assert load(file)[1].chat_template is None
    assert len(reads) == 2


def nowhere(copies, monkeypatch):
    copies.parent.joinpath("gguf").write_text("a file where the folder should be")


def homeless(copies, monkeypatch):
    def raised():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(gguf_copies, "_root", raised)


def full(copies, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda root: shutil._ntuple_diskusage(1, 1, 1))


def too_large(copies, monkeypatch):
    monkeypatch.setattr(gguf_copies, "MOST", 1 << 10)


@pytest.mark.parametrize("where", [nowhere, homeless, full, too_large])
def test_without_a_copy_the_model_is_read_and_slowness_warned_of(file, copies, monkeypatch, where):
    first = load(file)
    shutil.rmtree(copies)
    where(copies, monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same(first, load(file))
    monkeypatch.setattr(checkpoints, "SLOW", 0.0)
    with pytest.warns(UserWarning, match=r"no copy was written, because .*; set REGARD_CACHE to"):
        load(file)


def test_copies_make_room_for_the_newest(file, copies, monkeypatch):
    load(file)
    (first,) = copies.iterdir()
    size = sum(each.stat().st_size for each in first.iterdir())
    monkeypatch.setattr(gguf_copies, "MOST", int(1.5 * size))
    append(file)
    load(file)
    (second,) = copies.iterdir()
    assert second != first


def test_what_a_killed_process_left_is_removed(file, copies, monkeypatch):
    for name in ("old.partial", "new.partial"):
        (copies / name).mkdir(parents=True)
    then = (copies / "old.partial").stat().st_mtime
    monkeypatch.setattr(gguf_copies.time, "time", lambda: then + gguf_copies.ABANDONED + 1)
    load(file)
    assert not (copies / "old.partial").exists()


def test_progress_is_called(file):
    seen = []
    load(file, progress=lambda what, done, total: seen.append((what, done, total)))
    assert seen[0] == ("reading the vocabulary", 0, 3) and seen[-1] == ("read", 3, 3)


@pytest.mark.parametrize(
    ("settings", "folder"),
    [
        ({"REGARD_CACHE": "/a"}, "/a"),
        ({"REGARD_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/regard"),
        ({"XDG_CACHE_HOME": "b"}, "/home/me/.cache/regard"),
        ({}, "/home/me/.cache/regard"),
    ],
)
def test_one_folder_for_all_that_is_stored(settings, folder, monkeypatch):
    monkeypatch.setattr(Path, "home", lambda: Path("/home/me"))
    for name in ("REGARD_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    assert cache_folder() == Path(folder)
    assert speed_path().parent == Path(folder)
