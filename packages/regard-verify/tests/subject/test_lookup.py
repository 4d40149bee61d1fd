"""Objects by name: one is taken, or a sentence tells what can be named and where the file fails."""

from pathlib import Path

import pytest

import subjects
from regard_verify import SubjectError, understand

HERE = Path(subjects.__file__)
CLASS = """
import torch
from torch import nn


class {name}(nn.Module):
    def __init__(self, dim=8):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(dim, dim) for _ in "qkv")

    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v
"""
MAIN = """
def helper(x):
    return x


if __name__ == "__main__":
    raise RuntimeError("this is run as a program only")
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    """Writes a file into an empty folder, which is the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*__import__("sys").path])

    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return name

    return write


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("nowhere.py:attention", "there is no file nowhere.py"),
        ("nowhere.py", "there is no file nowhere.py"),
        (f"{HERE}:missing", "has no 'missing'; it has"),
        (f"{HERE}:Tutorrial", "has no 'Tutorrial'; did you mean Tutorial"),
        (f"{HERE}", r"is a file: name one of CausalSelfAttention, .* after a colon"),
        ("no.such.module", "there is no module .no."),
        ("nothing", "there is no module .nothing."),
        (":attention", "there is no module '': give PATH.py:NAME"),
        (".near:attention", "there is no module .\\.near."),
        ("no/such/folder", "there is no module .no/such/folder."),
        ("torch.nn:MultiheadAtention", "did you mean MultiheadAttention"),
    ],
)
def test_a_name_that_cannot_be_found_gets_a_sentence(name, problem):
    with pytest.raises(SubjectError, match=problem):
        understand(name)


def test_a_file_with_neighbours_is_run_in_its_package(file):
    file("pack/__init__.py", "")
    file("pack/base.py", CLASS.format(name="Base"))
    name = file("pack/derived.py", "from .base import Base\n\n\nclass Attention(Base):\n    pass\n")
    assert understand(f"{name}:Attention").name == "pack/derived.py:Attention"
    file("loose/near.py", CLASS.format(name="Near"))
    name = file("loose/far.py", "from .near import Near\n\n\nclass Attention(Near):\n    pass\n")
    assert understand(f"{name}:Attention").kind == "module"


def test_subjects_of_a_file_are_listed(file):
    both = CLASS.format(name="Mixer") + CLASS.format(name="SelfAttention") + MAIN
    with pytest.raises(SubjectError, match=r"two\.py is a file: name one of SelfAttention after"):
        understand(file("two.py", both))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("import torch\nimport no_such_thing\n", r"\(bad.py:2: import no_such_thing\)"),
        ("x = 1\ny = x.missing\n", r"AttributeError: .*\(bad.py:2: y = x.missing\)"),
        ("def f():\n    return [][0]\n\n\nx = f()\n", r"\(bad.py:2: return \[\]\[0\]\)"),
        ("def f(:\n", r"SyntaxError: .*\(.*bad.py:1: def f\("),
        ("raise SystemExit(2)\n", "ended the program, exit code 2"),
        ("from .missing import x\n", "missing., which is not installed"),
        ("x = 1\n", "defines no class with forward and no function of"),
    ],
)
def test_a_file_that_cannot_be_run_is_told_by_its_line(file, text, problem):
    with pytest.raises(SubjectError, match=problem):
        understand(file("bad.py", text))


def test_a_folder_gets_a_sentence(file):
    file("plain/attention.py", CLASS.format(name="Attention"))
    with pytest.raises(SubjectError, match=r"plain is a folder: .* a function .* that loads it"):
        understand("plain")
