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
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from regard_verify.laws import LAWS
from regard_verify.report.report import Report, ended, outcome, outcome_from
from regard_verify.run.in_process import end_early

LOADING = 240.0  # seconds to import and probe a subject: large libraries are slow to import
DEATHS = 3  # processes that may end early or hang; after that the remaining laws are left out
SHORT = 10.0  # seconds for a law, at most, once another has hung
PATIENCE = 4.0  # a limit of processor time is so many times longer in wall-clock time

Progress = Callable[[str, int, int], None]  # the law, how many are done, how many there are


@dataclass
class Request:
    """A request to the worker.

    Attributes:
        conventions: declared ones.
        skip: laws that already have an outcome.
        memory: GiB that it may take beyond what torch takes.
        limit: seconds of processor time for one law.
    """

    subject: str
    conventions: dict[str, Any]
    only: Sequence[str] | None
    quick: bool
    seed: int
    skip: list[str] = field(default_factory=list)
    memory: float = 4.0
    limit: float = 30.0


@dataclass
class Run:
    """The results on one subject so far, over all its processes."""

    report: Report
    done: set[str] = field(default_factory=set)
    current: str = ""
    finished: bool = False
    deaths: int = 0


def run_separately(request: Request, progress: Progress) -> Report:
    """The report on a named subject; `progress` is called with each law."""
    start = time.perf_counter()
    run = Run(Report(request.subject, declared=request.conventions, seed=request.seed))
    while not run.finished and run.deaths < DEATHS and not run.report.problem:
        request.skip = sorted(run.done)
        if run.deaths:
            request.limit = min(request.limit, SHORT)
        _one_process(run, request, progress)
    if run.deaths >= DEATHS:
        reason = f"not checked: the subject hung or ended its process in {DEATHS} laws before"
        for law in LAWS.values():
            if law.name not in run.done and (request.only is None or law.name in request.only):
                run.report.outcomes.append(outcome(law, "undecided", reason=reason))
    run.report.seconds = round(time.perf_counter() - start, 2)
    return run.report


def _one_process(run: Run, request: Request, progress: Progress) -> None:
    run.current = ""
    with tempfile.TemporaryDirectory(prefix="regard-verify-") as folder:
        requested, answers = Path(folder, "request.json"), Path(folder, "answers.jsonl")
        _check_room(Path(folder))
        requested.write_text(json.dumps(asdict(request)), encoding="utf-8")
        answers.touch()
        command = [sys.executable, "-m", "regard_verify.run.worker", str(requested), str(answers)]
        with Path(folder, "printed.txt").open("wb") as printed:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=printed, stderr=printed, env=_variables()
            )
            try:
                too_long = _follow(run, process, answers, request.limit, progress)
            finally:
                with suppress(OSError):
                    process.kill()
                process.wait()
        if not run.finished and not run.report.problem:
            _check_room(Path(folder))  # or the other process ended since it could not answer
            _ended(run, process.wait(), too_long, _last_line(Path(folder, "printed.txt")))


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


def _variables() -> dict[str, str]:
    """The environment of the other process, which can import what this one can."""
    path = os.pathsep.join(p for p in sys.path if p)
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "0"}


def _follow(
    run: Run, process: "subprocess.Popen[bytes]", answers: Path, limit: float, progress: Progress
) -> str:
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
            _record(run, line, progress)
            latest = time.monotonic()
        count, allowed = len(lines), PATIENCE * limit if run.current else LOADING
        if over and not run.finished and process.poll() == -signal.SIGPROF:
            return f"{limit:g} s of processor time"
        if over or run.finished:
            return ""
        if time.monotonic() - latest > allowed:
            return f"{allowed:g} s"
        time.sleep(0.02)


def _record(run: Run, line: str, progress: Progress) -> None:
    event = json.loads(line)
    if event["event"] == "problem":
        crash = event["crash"]
        crash = None if crash is None else outcome_from(crash)
        end_early(run.report, crash, event["text"], event["only"])
        run.finished = True
    elif event["event"] == "subject" and not run.report.kind:
        for name in ("subject", "kind", "inferred", "declared", "notes"):
            setattr(run.report, name, event["report"][name])
    elif event["event"] == "law":
        run.current = event["law"]
        progress(event["law"], len(run.done), event["total"])
    elif event["event"] == "outcome":
        run.report.outcomes.append(outcome_from(event["outcome"]))
        run.done.add(event["outcome"]["law"])
    elif event["event"] == "done":
        run.report.notes = list(dict.fromkeys([*run.report.notes, *event["notes"]]))
        run.finished = True


def _ended(run: Run, code: int, too_long: str, last_line: str) -> None:
    """Record the early end of the process as the outcome of the current law."""
    if too_long:
        cause = f"it did not come back within {too_long}"
    elif code < 0:
        cause = f"it was ended by signal {-code}{last_line}"
    else:
        cause = f"it ended the program with exit code {code}{last_line}"
    law = LAWS.get(run.current)
    if law is not None:
        found = outcome(law, "undecided", reason=cause) if too_long else ended(law, cause)
        run.report.outcomes.append(found)
        run.done.add(law.name)
        run.deaths += 1
    else:
        run.report.problem = f"while it was loaded and probed, {cause}"


def _last_line(printed: Path) -> str:
    lines = printed.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f"; the last line it printed: {lines[-1][:200]}" if lines else ""
