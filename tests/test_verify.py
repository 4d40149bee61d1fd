"""regard.verify and the verb: those of regard_verify, or how to install it."""

import sys

import pytest

import regard.verify
import regard_verify
from interpreters import run_python
from regard.cli.app import run

WITHOUT = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name == "regard_verify":
            raise ModuleNotFoundError("No module named 'regard_verify'", name=name)

sys.meta_path.insert(0, Absent())
from regard.cli import main
sys.argv = ["regard", *sys.argv[1:]]
main()
"""


def test_the_names_are_those_of_regard_verify():
    assert regard.verify.__all__ == regard_verify.__all__
    for name in regard.verify.__all__:
        assert getattr(regard.verify, name) is getattr(regard_verify, name)


def test_the_verb_is_the_command_of_regard_verify(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["regard", "verify", "--list"])
    assert run() == 0
    listed = capsys.readouterr().out
    assert all(f"{law.name} ({law.kind}): " in listed for law in regard_verify.LAWS.values())


@pytest.mark.parametrize(
    "arguments", [["verify", "a.py:A", "--quick"], ["verify", "--list"], ["verify"]]
)
def test_without_it_the_verb_says_what_to_install(arguments):
    done = run_python("-c", WITHOUT, *arguments)
    assert done.returncode == 2 and done.stdout == ""
    assert "regard verify needs regard-verify: python -m pip install 'regard-verify" in done.stderr
    assert "./packages/regard-verify" in done.stderr and "Traceback" not in done.stderr


def test_without_it_other_verbs_work():
    done = run_python("-c", WITHOUT, "--help")
    assert done.returncode == 0 and "it needs the package" in done.stdout


def test_without_it_the_import_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "regard_verify", None)
    monkeypatch.delitem(sys.modules, "regard.verify")
    with pytest.raises(ModuleNotFoundError, match="pip install regard-verify, or, from a clone"):
        import regard.verify  # noqa: F401
