"""The folder of all that regard stores, by the environment."""

import os
from pathlib import Path

import pytest

from regard.cache_folder import FOLDER, cache_folder, check_can_store, remove_oldest


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"REGARD_CACHE": "/a"}, "/a"),
        ({"REGARD_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/regard"),
        ({"XDG_CACHE_HOME": "b"}, "/home/me/.cache/regard"),  # the standard asks for a whole path
        ({}, "/home/me/.cache/regard"),
    ],
)
def test_the_environment_chooses_the_folder(environment, expected, monkeypatch):
    for name in ("REGARD_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/me", **environment}.items():
        monkeypatch.setenv(name, value)
    assert cache_folder() == Path(expected)


def test_without_a_home_the_way_out_is_named(monkeypatch):
    for name in (FOLDER, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(FileNotFoundError, match="no home folder; set REGARD_CACHE to a folder"):
        cache_folder()


def test_a_folder_that_cannot_be_written_is_a_sentence(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv(FOLDER, str(tmp_path / "file"))
    with pytest.raises(OSError, match=rf"rates cannot be stored in {tmp_path}/file: .*; set REG"):
        check_can_store("rates")
    monkeypatch.setenv(FOLDER, str(tmp_path / "a" / "b"))
    check_can_store("rates")
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_the_oldest_go_until_the_others_fit_and_never_the_one_to_keep(tmp_path):
    folder, *files = (tmp_path / name for name in ("folder", "new", "old", "older", "kept"))
    folder.mkdir()
    (folder / "inside").write_bytes(bytes(4))
    for each in files:
        each.write_bytes(bytes(3))
    for age, each in enumerate([files[0], folder, *files[1:]]):
        os.utime(each, (1_000 - age, 1_000 - age))
    remove_oldest(tmp_path.iterdir(), most=10, keep=tmp_path / "kept")
    assert {each.name for each in tmp_path.iterdir()} == {"kept", "new", "folder"}
    remove_oldest(tmp_path.iterdir(), most=9, keep=tmp_path / "kept")
    assert {each.name for each in tmp_path.iterdir()} == {"kept", "new"}
    remove_oldest(tmp_path.iterdir(), most=0, keep=tmp_path / "kept")
    assert {each.name for each in tmp_path.iterdir()} == {"kept"}
