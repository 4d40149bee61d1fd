"""Entries that are not trusted: what is read, and what is refused by name."""

from pathlib import Path
from typing import Any

import pytest

from regard.hf.loading.untrusted import CheckpointError
from regard.plan.reading import WIDEST, Keys

FILE = Path("config.json")


def keys(**values: Any) -> Keys:
    return Keys(
        values, FILE, names={"hidden_size": "n_embd"}, defaults={"head_dim": 64, "on": True}
    )


def test_names_defaults_and_null() -> None:
    assert keys(n_embd=8).size("hidden_size") == 8
    assert keys(hidden_size=8).size("hidden_size") == 8
    assert keys(hidden_size=8, n_embd=8).size("hidden_size") == 8
    with pytest.raises(CheckpointError, match=r"'n_embd' must be the same as 'hidden_size'"):
        keys(hidden_size=8, n_embd=9).size("hidden_size")
    assert keys().optional_size("head_dim") == 64
    assert keys(head_dim=None).optional_size("head_dim") is None  # null is not left out
    assert keys().flag("on") and not keys(on=None).flag("on")


@pytest.mark.parametrize("value", [True, 0, -1, 2.0, "3", [3], WIDEST + 1, None])
def test_sizes(value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"'x' must be a whole number of 1 to 1048576, got"):
        keys(x=value).size("x")


@pytest.mark.parametrize("value", [True, "1", None, float("nan"), float("inf"), [1.0]])
def test_numbers(value: Any) -> None:
    with pytest.raises(CheckpointError, match="'x' must be a finite number, got"):
        keys(x=value).number("x")
    assert keys(x=2).number("x") == 2 and keys(x=None).optional_number("x") is None


def test_lists_of_words() -> None:
    known = ("full", "window")
    assert keys(x=["full", "window"]).words("x", known, 2) == ["full", "window"]
    assert keys().words("x", known, 2) is None
    for value in (["full"], ["full", "chunk"], ["full", 3], ["full", ["full"]], "full", 7):
        with pytest.raises(CheckpointError, match="'x' must be"):
            keys(x=value).words("x", known, 2)


def test_lists_of_flags() -> None:
    assert keys(x=[1, 0, True]).flags("x", 3) == [True, False, True]
    for value in ([1, 0], [1, 0, 2], [1, 0, 1.0], [1, 0, None], "101"):
        with pytest.raises(CheckpointError, match="'x' must be"):
            keys(x=value).flags("x", 3)


def test_sizes_that_divide() -> None:
    assert keys(n_embd=12, heads=3).divided("hidden_size", "heads") == 4
    with pytest.raises(CheckpointError, match="'heads' must be a divisor of 'hidden_size'"):
        keys(n_embd=12, heads=5).divided("hidden_size", "heads")


@pytest.mark.parametrize(
    "name",
    ["kv_cache_window", "CacheSize", "num_shared_layers", "latent_dim", "chunk_size", "indexer"],
)
def test_unread_entries_that_matter_are_refused(name: str) -> None:
    with pytest.raises(CheckpointError, match=f"'{name}' is an entry that may change"):
        keys(**{name: 3}).check_unread(set())
    keys(**{name: 3}).check_unread({name})
    keys(**{name: None}).check_unread(set())  # null, false and empty say nothing
    read = keys(**{name: 3})
    read.get(name)
    read.check_unread(set())


def test_unread_entries_that_do_not_matter() -> None:
    keys(vocab_size=3, hidden_act="silu", tie=True, rms_norm_eps=1e-5).check_unread(set())


def test_names_of_entries_are_escaped_in_errors() -> None:
    with pytest.raises(CheckpointError) as refusal:
        keys(**{"\x1b[31mkv": 3}).check_unread(set())
    assert "\x1b" not in str(refusal.value) and r"\x1b[31mkv" in str(refusal.value)


def test_where_an_entry_stands() -> None:
    inner = Keys({}, FILE, inside="text_config.")
    with pytest.raises(CheckpointError, match=r"^config\.json: 'text_config\.x' must be"):
        inner.size("x")
