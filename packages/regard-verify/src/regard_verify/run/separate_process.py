"""Running a subject in a separate process: it may crash, hang, print or use up memory.

If the process ends early, the current law has failed; if it takes too long, that law is undecided.
A new process then checks the rest.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

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


def run_separately(request: Request, run: Run) -> None:
    """Judge a named subject; `run` is changed."""
    while not run.finished and run.deaths < DEATHS and not run.report.problem:
        request.skip = sorted(run.done)
        if run.deaths:
            request.limit = min(request.limit, SHORT)
        _one_process(run, request)
    if run.deaths >= DEATHS:
        reason = f"not checked: the subject hung or ended its process in {DEATHS} laws before"
        for law in run.wanted:
            if law.name not in run.done:
                run.end_law(outcome(law, "undecided", reason=reason))


def _one_process(run: Run, request: Request) -> None:
    run.current = ""
    with tempfile.TemporaryDirectory(prefix="regard-verify-") as folder:
        requested, answers = Path(folder, "request.json"), Path(folder, "answers.jsonl")
        _check_room(Path(folder))
        requested.write_text(json.dumps(asdict(request)), encoding="utf-8")
        answers.touch()
        command = [sys.executable, "-m", __name__, str(requested), str(answers)]
        variables = {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "0"}
        variables["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)  # it imports the same
        variables = {**os.environ, **variables}
        with Path(folder, "printed.txt").open("wb") as printed:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=printed, stderr=printed, env=variables
            )
            try:
                too_long = _follow(run, process, answers, request.limit)
            finally:
                with suppress(OSError):
                    process.kill()
                process.wait()
        if not run.finished and not run.report.problem:
            _check_room(Path(folder))  # or the other process ended since it could not answer
            text = Path(folder, "printed.txt").read_text(encoding="utf-8", errors="replace")
            _ended(run, process.wait(), too_long, text.strip())


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


def _follow(run: Run, process: "subprocess.Popen[bytes]", answers: Path, limit: float) -> str:
    """Read events until the process ends or takes too long: then what it took, in words.

    The worker ends itself by SIGPROF when a law has used `limit` seconds of processor time, which
    do not depend on what else the machine does. A worker that waits is ended after `PATIENCE` times
    as long.
    """
    count, latest = 0, time.monotonic()
    while True:
        over = process.poll() is not None
        lines = answers.read_text(encoding="utf-8").split("\n")[:-1]  # the last may be incomplete
        for line in lines[count:]:
            run.record(json.loads(line))
            latest = time.monotonic()
        count, allowed = len(lines), PATIENCE * limit if run.current else LOADING
        if over and not run.finished and process.poll() == -signal.SIGPROF:
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


def work(request: str, answers: str) -> None:
    """Be the separate process: read a request, and append each event to a file at once.

    If the subject ends the process, the lines written so far stay.
    """
    asked = Request(**json.loads(Path(request).read_text(encoding="utf-8")))
    torch.set_num_threads(1)
    with suppress(ImportError, OSError):  # where the system can limit the address space
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])  # in use now
        most = pages * resource.getpagesize() + int(asked.memory * (1 << 30))
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))
    with Path(answers).open("a", encoding="utf-8") as out:
        for event in events(asked, conventions_from(asked.conventions)):
            if event["event"] == "law" and hasattr(signal, "setitimer"):  # not on Windows
                signal.setitimer(signal.ITIMER_PROF, asked.limit)  # ends this process by SIGPROF
            out.write(json.dumps(event, default=str) + "\n")
            out.flush()


if __name__ == "__main__":
    work(*sys.argv[1:3])
