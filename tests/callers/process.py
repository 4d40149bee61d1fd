"""Starts the processes that cells run in, and describes how one of them died."""

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from callers.runner import POOL, WITHOUT, WRONG

TESTS = Path(__file__).parents[1]
SOURCES = TESTS.parent / "src"
PATIENCE = 300  # seconds for one cell, on a machine that is busy
RECENT = 5  # cells to name beside the one that died: heaps break before they are seen to be
PERTURBED = {"MALLOC_PERTURB_": "1"}  # memory is never zero by luck: glibc fills it, if it is there
USUAL = {"OMP_NUM_THREADS": "1", "REGARD_SPEED": "default", **PERTURBED}


class Process:
    """A process that runs cells, started when it is needed and again after it died."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.folder = tempfile.TemporaryDirectory(prefix="regard-callers-")
        self.child: subprocess.Popen[str] | None = None
        self.errors = Path(self.folder.name) / "errors"
        self.ran: list[str] = []

    def run(self, caller: str, call: str) -> dict[str, str]:
        """The verdict on a cell; a death is a verdict too."""
        if self.child is None:
            self._start()
        assert self.child is not None and self.child.stdin is not None
        self.ran = [*self.ran[-RECENT:], f"{caller} / {call}"]
        try:
            self.child.stdin.write(json.dumps([caller, call]) + "\n")
            self.child.stdin.flush()
            return self._answer()
        except (BrokenPipeError, json.JSONDecodeError, TimeoutError) as error:
            return {"kind": "wrong", "words": self._death(error)}

    def _start(self) -> None:
        options, added = flags(self.kind, Path(self.folder.name))
        paths = [added.pop("SOURCES", str(SOURCES)), str(TESTS), str(TESTS / "support")]
        with self.errors.open("w") as errors:
            self.child = subprocess.Popen(
                [sys.executable, *options, str(Path(__file__).with_name("runner.py"))],
                env={**os.environ, **USUAL, "PYTHONPATH": os.pathsep.join(paths), **added},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self.ran = []
        try:
            self._answer()
        except (json.JSONDecodeError, TimeoutError) as error:
            raise RuntimeError(self._death(error)) from error

    def _answer(self) -> dict[str, str]:
        assert self.child is not None and self.child.stdout is not None
        ready, _, _ = select.select([self.child.stdout], [], [], PATIENCE)
        if not ready:
            raise TimeoutError(f"no answer in {PATIENCE} s")
        answer: dict[str, str] = json.loads(self.child.stdout.readline())
        return answer

    def _death(self, error: Exception) -> str:
        """How the process ended, what it printed and what it ran."""
        assert self.child is not None
        if isinstance(error, TimeoutError):
            self.child.kill()
        code = self._end(self.child)
        how = signal.Signals(-code).name if code < 0 else f"status {code}"
        printed = self.errors.read_text()[-3000:]
        return f"the process died: {error}, {how}\nafter {self.ran}\n{printed}"

    def _end(self, child: "subprocess.Popen[str]") -> int:
        """Its status, once its pipes are closed; it then has nothing left to do."""
        self.child = None
        for pipe in (child.stdin, child.stdout):
            with contextlib.suppress(BrokenPipeError):
                assert pipe is not None
                pipe.close()
        return child.wait(timeout=PATIENCE)

    def close(self) -> None:
        if self.child is not None:
            self._end(self.child)
        self.folder.cleanup()


def flags(kind: str, folder: Path) -> tuple[list[str], dict[str, str]]:
    """Python's flags and the environment of a kind of process."""
    match kind:
        case "python -OO":
            return ["-OO"], {}
        case "narrow vectors":
            return [], {"ATEN_CPU_CAPABILITY": "default"}
        case "without numba":
            return [], {WITHOUT: "numba"}
        case "no threads of GNU":
            return [], {POOL: "1"}
        case "wrong":
            return [], {WRONG: "1"}
        case "read-only disk":
            return [], unwritable(folder)
    assert kind == "usual", kind
    return [], {}


def unwritable(folder: Path) -> dict[str, str]:
    """No place for a compiler's cache: not beside the sources, not at home. Also for root, whom
    permissions do not stop: a file stands where each folder would have to be made."""
    sources = folder / "src"
    shutil.copytree(SOURCES, sources, ignore=shutil.ignore_patterns("__pycache__"))
    for package in [*sources.rglob("__init__.py")]:
        package.with_name("__pycache__").write_text("no folder\n")
    home = folder / "home"
    home.write_text("no folder\n")
    none = {"HOME": str(home), "XDG_CACHE_HOME": str(home), "PYTHONDONTWRITEBYTECODE": "1"}
    return {"SOURCES": str(sources), **none}
