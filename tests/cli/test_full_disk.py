"""Every verb on a disk that is full, or without a folder to store anything in."""

import importlib
import re
import sys
import warnings

import pytest

from full_disk import files_of_at_most
from lettered import write_lettered
from regard.cache_folder import FOLDER
from regard.cli.app import run

SUBJECT = """
def attention(q, k, v):
    return ((q @ k.mT) * q.shape[-1] ** -0.5).softmax(-1) @ v
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = write_lettered(tmp_path_factory.mktemp("models") / "tiny")
    folder.with_suffix(".txt").write_text("abcdefgh" * 400)  # to calibrate on
    return folder


@pytest.fixture
def call(monkeypatch, capsys):
    """Runs a verb; returns its exit code, what it printed, and its errors."""

    def called(*arguments):
        monkeypatch.setattr(sys, "argv", ["regard", *map(str, arguments)])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            code = run()
        out, err = capsys.readouterr()
        return code, out, re.sub(r"\r?\x1b\[(\d*[A-Kml]|\?25[lh])", "", err).strip()

    return called


def names(folder):
    return sorted(each.name for each in folder.rglob("*") if each.is_file())


@pytest.fixture
def subject(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(SUBJECT)
    return f"{path}:attention"


def arguments(model, subject, out):
    """A short call of each verb that computes something."""
    return {
        "generate": ("generate", model, "--prompt", "abc", "--max-new-tokens", 2),
        "compare": ("compare", model, "--context", 8, "--attention", "mqa"),
        "convert": ("convert", model, "--to", "mqa", "--out", out, "--calibrate", f"{model}.txt"),
        "show attention": ("show", "attention", model, "--text", "abc"),
        "show mask": ("show", "mask", "Causal()", "--queries", 3),
        "verify": ("verify", subject, "--only", "scale_closed_form", "--quick"),
    }


# Of `bench`, `compare` and `verify`, only compiled code and converted layers are stored: their own
# tests have this.
@pytest.mark.parametrize("verb", ["convert", "generate", "show attention", "show mask"])
def test_a_file_in_the_place_of_the_folder_changes_no_result(
    verb, model, subject, tmp_path, monkeypatch, call
):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv(FOLDER, str(tmp_path / "file"))
    code, out, err = call(*arguments(model, subject, tmp_path / "out")[verb])
    assert (code, "Traceback" in err) == (0, False) and out


WRITING = {  # a verb, and the option that names what it writes
    "compare": "--html",
    "convert": "--out",
    "generate": "--prefix-cache",
    "show attention": "--html",
    "show mask": "--svg",
    "verify": "--html",
}


@pytest.mark.parametrize("verb", WRITING)
def test_a_full_disk_is_one_sentence_and_leaves_nothing(verb, model, subject, tmp_path, call):
    before, path = names(tmp_path), tmp_path / "written"
    given = [*arguments(model, subject, path)[verb]]
    if verb != "convert":
        given += [WRITING[verb], path]
    given += ["--cache", "paged"] if verb == "generate" else []
    with files_of_at_most(1000):
        code, out, err = call(*given)
    assert (code, out) == (2, "")
    assert re.fullmatch(rf"regard: {path}.* written: .*; give a .*", err), err
    assert names(tmp_path) == before


@pytest.mark.parametrize("disk", ["full", "a file"])
def test_rates_are_not_measured_where_they_cannot_be_stored(disk, tmp_path, monkeypatch, call):
    folder = tmp_path / "rates"
    monkeypatch.setenv(FOLDER, str(folder))
    monkeypatch.setattr("regard.bench.measure_speed", lambda: pytest.fail("measured"))
    if disk == "a file":
        folder.write_text("no folder")
    with files_of_at_most(1000):
        code, out, err = call("tune")
    assert (code, out) == (2, "")
    assert re.fullmatch(rf"regard: rates cannot be stored in {folder}: .*; set {FOLDER} to .*", err)


def test_the_full_disk_of_these_tests_leaves_no_damaged_bytecode(tmp_path, monkeypatch):
    (tmp_path / "module_of_this_test.py").write_text("x = [1, 2, 3]\n" * 500)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    with files_of_at_most(1000):
        importlib.import_module("module_of_this_test")
    assert not (tmp_path / "__pycache__").exists()
    assert not sys.dont_write_bytecode
