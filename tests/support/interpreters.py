"""Python in a process of its own, without the seconds that importing torch takes.

`run_python` stands for `subprocess.run([sys.executable, ...])` where a test wants another process,
and does not care how it began: one that traces, that ends early, that changes its modules. A
process that has imported torch waits for each worker of pytest, and forks for each program. Tests
of what is imported, of Python's flags and of variables that are read at a start need a new Python.
"""

import atexit
import contextlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from pathlib import Path

_waiting: list["subprocess.Popen[str]"] = []


def run_python(
    *arguments: object, cwd: Path | str | None = None, **environment: str
) -> "subprocess.CompletedProcess[str]":
    """Run a script, `-c` code or `-m` module, with arguments, and with further variables.

    Its own folders come first in `sys.path` if `PYTHONPATH` is among the variables.
    """
    given = [str(each) for each in arguments]
    with tempfile.TemporaryDirectory() as folder:
        files = [str(Path(folder, name)) for name in ("out", "err")]
        request = {
            "arguments": given,
            "cwd": str(cwd or Path.cwd()),
            "environment": {**os.environ, **environment},
            "path": environment.get("PYTHONPATH", "").split(os.pathsep),
            "files": files,
        }
        code = _answer(json.dumps(request))
        out, err = (Path(name).read_text() for name in files)
    return subprocess.CompletedProcess(given, code, out, err)


def _answer(request: str) -> int:
    if not _waiting or _waiting[0].poll() is not None:
        _waiting[:] = [_start()]
    process = _waiting[0]
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(request + "\n")
    process.stdin.flush()
    return int(process.stdout.readline())


def _start() -> "subprocess.Popen[str]":
    paths = os.pathsep.join(filter(None, sys.path))
    process = subprocess.Popen(
        [sys.executable, __file__],
        env={**os.environ, "PYTHONPATH": paths},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(_end, process)
    return process


def _end(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.communicate()  # closes the pipes


def main() -> None:
    """Fork for each line of JSON, and answer with the exit code."""
    with contextlib.suppress(ImportError):
        import torch._dynamo  # noqa: F401

        import regard.hf  # noqa: F401
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _become(json.loads(line))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)


def _become(request: dict) -> None:
    """Run the program as Python would, and end."""
    for descriptor, name in ((0, os.devnull), *zip((1, 2), request["files"], strict=True)):
        opened = os.open(name, os.O_RDWR | os.O_CREAT)
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.stdin = open(0)  # noqa: SIM115
    sys.stdout, sys.stderr = (os.fdopen(os.dup(n), "w") for n in (1, 2))
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.path[:0] = filter(None, request["path"])
    code = 1
    try:
        _run(*request["arguments"])
        code = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            threading._shutdown()
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _run(first: str, *rest: str) -> None:
    sys.argv = [first, *rest]
    if first == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        module = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), vars(module))
    elif first == "-m":
        sys.argv = list(rest)
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(first).resolve().parent))
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    main()
