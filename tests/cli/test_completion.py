"""A shell completes verbs, options and their values, and no torch is imported for that."""

import os
import shutil
import subprocess
import sys

import pytest

import regard.cli.app  # noqa: F401  (enters the verbs)
from regard.cli.options import VERBS

BASH = shutil.which("bash")
PROGRAM = """
import sys
from regard.cli import main
try:
    main()
finally:
    sys.stderr.write("<torch>" * ("torch" in sys.modules))
"""
pytestmark = pytest.mark.skipif(BASH is None, reason="there is no bash")


@pytest.fixture
def in_bash(tmp_path):
    """Runs lines in bash, where `regard` is this source and the home folder is empty."""
    program = tmp_path / "bin" / "regard"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\n{PROGRAM}")
    program.chmod(0o755)
    home = tmp_path / "home"
    home.mkdir()
    environment = os.environ | {
        "HOME": str(home),
        "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }

    def run(lines):
        done = subprocess.run(
            [BASH, "--norc", "--noprofile", "-c", lines],
            capture_output=True, text=True, check=True, env=environment, cwd=home,
        )  # fmt: skip
        assert "<torch>" not in done.stderr
        return done.stdout

    run.home = home
    return run


COMPLETED = {
    "regard ": {typed.split()[0] for typed in VERBS},
    "regard show mask --q": {"--queries", "--q-start"},
    "regard compare --attention latent-5": {"latent-50", "latent-50-int8"},
    "regard compare a-file": set(),  # bash then completes the names of files
}


def test_bash_completes(in_bash):
    lines = ['eval "$(_REGARD_COMPLETE=source_bash regard)"', "complete -p regard"]
    for typed in COMPLETED:
        words = " ".join(f"'{word}'" for word in typed.split(" "))
        lines += [
            f"COMP_WORDS=({words}) COMP_CWORD={typed.count(' ')}",
            "_regard_completion regard",
            "echo ${COMPREPLY[@]}",
        ]
    shown, *found = in_bash("\n".join(lines)).splitlines()
    assert shown.startswith("complete -o default -F _regard_completion")
    assert [{*line.split()} for line in found] == list(COMPLETED.values())


def test_installing_writes_two_files_of_the_home_folder(in_bash):
    told = in_bash("regard --install-completion; true")  # `true`: bash stays the parent
    script = in_bash.home / ".bash_completions" / "regard.sh"
    assert str(script) in told.replace("\n", "")
    assert "_REGARD_COMPLETE=complete_bash" in script.read_text()
    assert str(script) in (in_bash.home / ".bashrc").read_text()
    assert in_bash("regard --show-completion; true").strip() == script.read_text().strip()


def test_help_fits_the_terminal(in_bash):
    width = 60
    shown = in_bash(f"COLUMNS={width} TERMINAL_WIDTH={width} regard --help").splitlines()
    assert max(map(len, shown)) <= width
    assert not any("…" in line for line in shown)
    assert sum("--install-completion" in line for line in shown) == 1
