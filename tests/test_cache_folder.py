"""The folder of all that regard stores, by the environment."""

from pathlib import Path

import pytest

from regard.cache_folder import cache_folder


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
