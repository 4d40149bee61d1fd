"""Running a subject in a separate process: it may crash, hang, print or use up memory.

If the process ends early, the current law has failed; if it takes too long, that law is undecided.
A new process then checks the rest.
"""

import faulthandler
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch

from regard_verify.law import Counterexample
from regard_verify.laws import LAWS
from regard_verify.report.report import outcome
from regard_verify.run.in_process import Request, Run, events
from regard_verify.subject.conventions import conventions_from

LOADING = 240.0  # seconds to import and probe a subject: large libraries are slow to import
DEATHS = 3  # processes that may end early or hang; after that the remaining laws are left out
SHORT = 10.0  # seconds for a law, at most, once another has hung
PATIENCE = 4.0  # a limit of processor time is so many times longer in wall-clock time
ANSWERS, PRINTED = "answers.jsonl", "printed.txt"  # the files of one process


class Process(NamedTuple):
    """A separate process: `code` is its exit code, None until it ends."""

    code: Callable[[], int | None]
    kill: Callable[[], None]
    wait: Callable[[], object]


Start = Callable[[Request, Path], Process]


def new_python(request: Request, folder: Path) -> Process:
    """Start a new Python that judges: it has imported none of the caller's modules."""
    command = [sys.executable, "-m", __name__, json.dumps(asdict(request)), str(folder)]
    with (folder / PRINTED).open("wb") as printed:
        made = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=printed, stderr=printed,
            env={**os.environ, **_variables()},
        )  # fmt: skip
    return Process(made.poll, made.kill, made.wait)


def forked(request: Request, folder: Path) -> Process:
    """Fork this process, which has imported torch: a new Python takes 2 s to do that again."""
    context = multiprocessing.get_context("fork")
    made = context.Process(target=_work_forked, args=(request, folder))
    made.start()
    return Process(lambda: made.exitcode, made.kill, made.join)


def of_command(request: Request, folder: Path) -> Process:
    """The process of the command: a fork, or a new Python if several threads may hold locks."""
    threads = Path("/proc/self/task")  # of Linux
    alone = threads.is_dir() and len(list(threads.iterdir())) == 1
    return (forked if alone else new_python)(request, folder)


def _variables() -> dict[str, str]:
    """Variables of the environment: one thread, and imports from the same folders as here."""
    path = os.pathsep.join(each for each in sys.path if each)
    return {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "0", "PYTHONPATH": path}


def run_separately(request: Request, run: Run, start: Start) -> None:
    """Judge a named subject in processes that `start` begins; `run` is changed."""
    while not run.finished and run.deaths < DEATHS and not run.report.problem:
        request.skip = sorted(run.done)
        if run.deaths:
            request.limit = min(request.limit, SHORT)
        _one_process(run, request, start)
    if run.deaths >= DEATHS:
        reason = f"not checked: the subject hung or ended its process in {DEATHS} laws before"
        for law in run.wanted:
            if law.name not in run.done:
                run.end_law(outcome(law, "undecided", reason=reason))


def _one_process(run: Run, request: Request, start: Start) -> None:
    run.current = ""
    with tempfile.TemporaryDirectory(prefix="regard-verify-") as name:
        folder = Path(name)
        (folder / ANSWERS).touch()
        process = start(request, folder)
        try:
            too_long = _follow(run, process, folder / ANSWERS, request.limit)
        finally:
            with suppress(OSError):
                process.kill()
            process.wait()
        if not run.finished and not run.report.problem:
            _check_room(folder)  # or the other process ended since it could not answer
            text = (folder / PRINTED).read_text(encoding="utf-8", errors="replace")
            _ended(run, process.code() or 0, too_long, text.strip())


def _check_room(folder: Path) -> None:
    """Raise an `OSError` if the disk is full, which is no mistake of the subject."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(1 << 20))
    except OSError as error:
        raise OSError(
            f"{folder} cannot be written: {error.strerror}; set TMPDIR to a folder on a disk with "
            "room"
        ) from error


def _follow(run: Run, process: Process, answers: Path, limit: float) -> str:
    """Read events until the process ends or takes too long: then what it took, in words.

    The worker ends itself by SIGPROF when a law has used `limit` seconds of processor time, which
    do not depend on what else the machine does. A worker that waits is ended after `PATIENCE` times
    as long.
    """
    count, latest = 0, time.monotonic()
    while True:
        over = process.code() is not None
        lines = answers.read_text(encoding="utf-8").split("\n")[:-1]  # the last may be incomplete
        for line in lines[count:]:
            run.record(json.loads(line))
            latest = time.monotonic()
        count, allowed = len(lines), PATIENCE * limit if run.current else LOADING
        if over and not run.finished and process.code() == -signal.SIGPROF:
            return f"{limit:g} s of processor time"
        if over or run.finished:
            return ""
        if time.monotonic() - latest > allowed:
            return f"{allowed:g} s"
        time.sleep(0.02)


def _ended(run: Run, code: int, too_long: str, printed: str) -> None:
    """Record the early end of the process as the outcome of the current law."""
    if too_long:
        cause = f"it did not come back within {too_long}"
    else:
        how = "ended the program with exit code" if code >= 0 else "was ended by signal"
        last = f"; the last line it printed: {printed.splitlines()[-1][:200]}" if printed else ""
        cause = f"it {how} {abs(code)}{last}"
    law = LAWS.get(run.current)
    if law is not None:
        example = Counterexample("", "", "an output", "none", cause)
        failed = outcome(law, "failed", example=example)
        run.end_law(outcome(law, "undecided", reason=cause) if too_long else failed)
        run.deaths += 1
    else:
        run.report.problem = f"while it was loaded and probed, {cause}"


def work(request: Request, folder: Path) -> None:
    """Be the separate process: judge, and append each event to a file at once.

    If the subject ends the process, the lines written so far stay.
    """
    torch.set_num_threads(1)
    with suppress(ImportError, OSError):  # where the system can limit the address space
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])  # in use now
        most = pages * resource.getpagesize() + int(request.memory * (1 << 30))
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))
    with (folder / ANSWERS).open("a", encoding="utf-8") as out:
        for event in events(request):
            if event["event"] == "law" and hasattr(signal, "setitimer"):  # not on Windows
                signal.setitimer(signal.ITIMER_PROF, request.limit)  # ends this process by SIGPROF
            out.write(json.dumps(event, default=str) + "\n")
            out.flush()


def _work_forked(request: Request, folder: Path) -> None:
    """Work in a fork: print to a file, as a new Python does."""
    faulthandler.disable()  # the caller's would print where the caller prints
    printed = (folder / PRINTED).open("w", encoding="utf-8")
    for descriptor in (1, 2):
        os.dup2(printed.fileno(), descriptor)
    sys.stdout = sys.stderr = printed
    os.environ.update(_variables())
    work(request, folder)


if __name__ == "__main__":  # in a new Python
    given = json.loads(sys.argv[1])
    given["conventions"] = conventions_from(given["conventions"])
    work(Request(**given), Path(sys.argv[2]))
