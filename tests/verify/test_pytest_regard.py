"""pytest --regard, and laws as parameters."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import subjects
from pytest_regard import LawBroken, laws

FILE = Path(subjects.__file__)


def pytest_runs(folder, *arguments):
    root = FILE.parents[2]
    path = os.pathsep.join([str(root / "src")])
    variables = {**os.environ, "PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "pytest_regard", "-q", "-rA", "--color=no"]
    done = subprocess.run(
        [*command, *arguments], cwd=folder, env=variables, capture_output=True, text=True
    )
    return done.returncode, done.stdout + done.stderr


def test_a_subject_on_the_command_line(tmp_path):
    code, out = pytest_runs(tmp_path, "--regard", f"{FILE}:Tutorial", "--regard-quick")
    assert code == 1
    assert "3 failed" in out
    assert "root of the whole width" in out
    assert "regard/verify" not in out.split("short test summary")[0]


def test_a_subject_that_cannot_be_understood_fails(tmp_path):
    code, out = pytest_runs(tmp_path, "--regard", f"{FILE}:nothing", "-x")
    assert code == 1
    assert "was not understood" in out


def test_laws_as_parameters(tmp_path):
    test = tmp_path / "test_mine.py"
    test.write_text(
        "import pytest\nfrom pytest_regard import laws\n\n"
        f"@pytest.mark.parametrize('law', laws({f'{FILE}:right'!r}, quick=True))\n"
        "def test_attention(law):\n    law()\n"
    )
    code, out = pytest_runs(tmp_path, "-k", "oracle_forward or cache_bytes or convexity")
    assert code == 0
    assert "2 passed, 1 skipped" in out


def test_an_object_can_be_checked_too():
    named = {each.id: each.values[0] for each in laws(subjects.Tutorial, quick=True)}
    named["convexity"]()
    with pytest.raises(LawBroken, match="root of the whole width"):
        named["scale_closed_form"]()
    with pytest.raises(pytest.skip.Exception):
        named["cache_bytes"]()
