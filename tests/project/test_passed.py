"""The tests of regard-verify are left out only while nothing that they depend on has changed."""

import shutil
import subprocess

import pytest

import passed

FILES = {
    f"{passed.PACKAGE}/src/regard_verify/law.py": "law",
    f"{passed.PACKAGE}/tests/test_law.py": "test",
    "tests/support/shared.py": "shared",
    "conftest.py": "conftest",
    "constraints.txt": "torch==2.13.0",
    "docs/verify-matrix.md": "matrix",
}


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A project whose tests of regard-verify have passed."""
    for name, text in {**FILES, "src/regard/other.py": "other", ".gitignore": "*.pyc"}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    subprocess.run(["git", "-C", str(tmp_path), "add", "conftest.py"], check=True)
    monkeypatch.setattr(passed, "ROOT", tmp_path)
    assert passed.tests() == passed.PACKAGE
    (tmp_path / passed.RECORD).write_text(passed.digest() + "\n")
    assert passed.tests() == passed.WITH_REGARD
    return tmp_path


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("change", ["written", "deleted"])
def test_a_changed_file_brings_the_tests_back(tree, name, change):
    before = (tree / name).read_text()
    if change == "written":
        (tree / name).write_text("another")
    else:
        (tree / name).unlink()
    assert passed.tests() == passed.PACKAGE
    (tree / name).write_text(before)
    assert passed.tests() == passed.WITH_REGARD


def test_a_new_file_brings_the_tests_back(tree):
    (tree / passed.PACKAGE / "tests/test_new.py").write_text("new")
    assert passed.tests() == passed.PACKAGE


def test_files_of_regard_and_files_that_git_ignores_do_not(tree):
    (tree / "src/regard/other.py").write_text("another")
    (tree / passed.PACKAGE / "src/law.pyc").write_text("compiled")
    assert passed.tests() == passed.WITH_REGARD


def test_files_that_change_during_the_run_are_not_recorded(tree):
    record = tree / passed.RECORD
    record.unlink()
    before = passed.digest()
    (tree / "conftest.py").write_text("changed meanwhile")
    passed.record(before)
    assert not record.exists()
    passed.record(passed.digest())
    assert passed.tests() == passed.WITH_REGARD


def test_without_git_all_tests_are_run(tree):
    shutil.rmtree(tree / ".git")
    (tree / passed.RECORD).write_text("\n")
    assert passed.tests() == passed.PACKAGE
    passed.record(passed.digest())
    assert (tree / passed.RECORD).read_text() == "\n"


def test_another_python_runs_all_tests(tree, monkeypatch):
    monkeypatch.setattr(passed, "PYTHON", (3, 99))
    assert passed.tests() == passed.PACKAGE


def test_a_missing_record_brings_the_tests_back(tree):
    (tree / passed.RECORD).unlink()
    assert passed.tests() == passed.PACKAGE


def test_regard_verify_imports_nothing_of_regard():
    """But where a layer of regard is judged, and in the tests that are always run."""
    git = shutil.which("git")
    found = subprocess.run(
        [git, "grep", "-lE", r"^\s*(import|from) regard(\.|\s)", "--", f"{passed.PACKAGE}/src",
         f"{passed.PACKAGE}/tests"], cwd=passed.ROOT, capture_output=True, text=True, check=False,
    ).stdout.split()  # fmt: skip
    allowed = {passed.WITH_REGARD, f"{passed.PACKAGE}/tests/support/subjects.py"}
    assert {*found} <= allowed
