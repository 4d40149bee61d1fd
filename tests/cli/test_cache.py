"""regard cache lists what is stored, and removes what is named."""

import json

import pytest

from regard.cache_folder import FOLDER
from regard.cli.app import run as run_command
from regard.cli.cache import KINDS, cache, kept
from regard.hf import SMOLLM2


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """One file of each kind, and one that is not regard's."""
    monkeypatch.setenv(FOLDER, str(tmp_path))
    files = (f"{SMOLLM2}/model.safetensors", "gguf/a/b.safetensors", "compare/c.safetensors")
    for at, name in enumerate((*files, "compiled/d.nbi", "speed-2.13-2-x.json", "mine.txt")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(bytes(1000 * (at + 1)))
    return tmp_path


def test_what_is_stored_is_listed(capsys, folder):
    cache(clear=None, as_json=False)
    text = " ".join(capsys.readouterr().out.split())
    assert str(folder) in text and ": 14.6 KiB" in text
    assert all(kind in text and what in text for kind, (what, _) in KINDS.items())
    cache(clear=None, as_json=True)
    data = json.loads(capsys.readouterr().out)
    assert [each["nbytes"] for each in data["kinds"]] == [1000, 2000, 3000, 4000, 5000]
    assert {each["files"] for each in data["kinds"]} == {1} and not data["removed"]


def test_what_is_named_is_removed_and_nothing_else(capsys, folder):
    cache(clear=["compare", "rates"], as_json=False)
    assert "removed 7.81 KiB from" in capsys.readouterr().out
    assert [kept(kind).files for kind in KINDS] == [1, 1, 0, 1, 0]
    cache(clear=["all"], as_json=False)
    assert not any(kept(kind).files for kind in KINDS)
    assert [each.name for each in folder.iterdir()] == ["mine.txt"]


def test_an_unknown_kind_removes_nothing(folder, monkeypatch):
    monkeypatch.setattr("sys.argv", ["regard", "cache", "--clear", "all", "--clear", "compared"])
    assert run_command() == 2
    assert all(kept(kind).files for kind in KINDS)
