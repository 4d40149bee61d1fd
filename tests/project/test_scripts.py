"""The commands of the first screen, and what `regard` says where something is missing."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SCRIPTS = ("scripts/setup", "scripts/test", "scripts/demo", ".ci/run")
BLOCKED = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
"""


def python(code: str, *blocked: str) -> subprocess.CompletedProcess[str]:
    """Run code where some packages are not installed."""
    code = BLOCKED.format(names=blocked) + code
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment
    )


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_are_bash_and_executable(name):
    script = ROOT / name
    assert os.access(script, os.X_OK)
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0


def test_the_tests_are_what_ci_runs():
    assert "scripts/test" in (ROOT / ".ci/run").read_text()


def test_everything_installed_for_the_tests_is_pinned():
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M))
    assert pinned["torch"] == "2.13.0"
    extras = PROJECT["optional-dependencies"]
    needed = [*PROJECT["dependencies"], *(name for extra in extras.values() for name in extra)]
    names = {re.split(r"[\[><=]", requirement)[0] for requirement in needed}
    assert names - {"regard"} <= set(pinned)


def test_the_command_brings_the_compiled_kernel():
    extras = PROJECT["optional-dependencies"]
    (included,) = re.findall(r"regard\[(.*)\]", " ".join(extras["cli"]))
    assert {"hf", "cpu"} == set(included.split(","))
    assert any(each.startswith("numba") for each in extras["cpu"])


def test_the_command_exists():
    module, _, function = PROJECT["scripts"]["regard"].partition(":")
    done = python(f"import {module}; assert callable({module}.{function})")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_the_command_says_how_to_install_what_it_lacks(missing):
    done = python("from regard.cli import main; main()", missing)
    assert done.returncode == 2
    assert done.stderr == (
        f"the regard command needs {missing}: python -m pip install 'regard[cli]'\n"
    )


def test_the_version_needs_nothing_else():
    done = python(
        "import sys; sys.argv[1:] = ['--version']; import regard.cli as c; c.main()", "typer"
    )
    assert done.returncode == 0
    assert re.fullmatch(r"regard \d+\.\d+\.\d+\n", done.stdout), done.stderr


def test_loading_says_how_to_install_what_it_lacks(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_text("")
    done = python(
        "import regard.hf, regard.hf.packages as p; p.find_spec = lambda name: None\n"
        f"regard.hf.load({str(tmp_path)!r})"
    )
    assert "regard.hf needs transformers, safetensors: python -m pip install" in done.stderr


def test_importing_regard_imports_nothing_optional():
    names = ["transformers", "typer", "rich", "gguf", "safetensors", "tokenizers"]
    names += ["beartype", "hypothesis"]
    done = python(f"import regard, regard.hf, sys; print([n for n in {names} if n in sys.modules])")
    assert done.stdout.strip() == "[]", done.stderr
