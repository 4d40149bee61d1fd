"""A subject in a process of its own: it may crash, hang, print or eat memory; the report goes on.

What it dies of is the outcome of the law that was being asked; a new process asks the rest.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from regard.verify.laws import LAWS
from regard.verify.report.report import Picture, Report, ended, outcome, outcome_from, sorted_as
from regard.verify.run.in_process import Progress
from regard.verify.subject.conventions import Conventions

LOADING = 120.0  # seconds until a subject is understood: big libraries are slow to import
DEATHS = 3  # after that many, the rest is not asked


@dataclass
class Run:
    """What was heard so far from one subject, over all its processes."""

    report: Report
    done: set[str] = field(default_factory=set)
    asking: str = ""
    finished: bool = False
    deaths: int = 0


def check_isolated(
    subject: str,
    own: Conventions,
    *,
    only: Sequence[str] | None = None,
    quick: bool = False,
    seed: int = 0,
    limit: float = 30.0,
    memory: float = 4.0,
    progress: Progress = lambda what, done, total: None,
) -> Report:
    """Judge a named subject in another process.

    Args:
        limit: seconds for one law.
        memory: GiB it may take beyond what torch takes.
    """
    start = time.perf_counter()
    run = Run(Report(subject, declared=own.declared(), seed=seed))
    while not run.finished and run.deaths < DEATHS and not run.report.problem:
        request = {
            "subject": subject, "conventions": own.declared(), "only": only, "quick": quick,
            "seed": seed, "skip": sorted(run.done), "memory": memory,
        }  # fmt: skip
        _one_process(run, request, limit if run.deaths == 0 else min(limit, 10.0), progress)
    if run.deaths >= DEATHS:
        _give_up(run, only)
    run.report.outcomes = sorted_as(run.report.outcomes, LAWS)
    run.report.seconds = round(time.perf_counter() - start, 2)
    return run.report


def _give_up(run: Run, only: Sequence[str] | None) -> None:
    reason = f"not asked: the subject did not survive {DEATHS} laws before"
    for law in LAWS.values():
        if law.name not in run.done and (only is None or law.name in only):
            run.report.outcomes.append(outcome(law, "not applicable", reason=reason))


def _one_process(run: Run, request: dict[str, Any], limit: float, progress: Progress) -> None:
    run.asking = ""
    with tempfile.TemporaryDirectory(prefix="regard-verify-") as folder:
        asked, answers = Path(folder, "request.json"), Path(folder, "answers.jsonl")
        asked.write_text(json.dumps(request), encoding="utf-8")
        answers.touch()
        with Path(folder, "printed.txt").open("wb") as printed:
            command = [sys.executable, "-m", "regard.verify.run.worker", str(asked), str(answers)]
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=printed, stderr=printed, env=_variables()
            )
            try:
                hung = _listen(run, process, answers, limit, progress)
            finally:
                with suppress(OSError):
                    process.kill()
                process.wait()
        if not run.finished and not run.report.problem:
            limit = limit if run.asking else LOADING
            _died(run, process.returncode, hung, limit, _last_words(Path(folder, "printed.txt")))


def _variables() -> dict[str, str]:
    """This process's variables, and its path: what it can import, the other can."""
    path = os.pathsep.join(p for p in sys.path if p)
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "0"}


def _listen(
    run: Run, process: "subprocess.Popen[bytes]", answers: Path, limit: float, progress: Progress
) -> bool:
    """Hear events until it ends; whether it had to be ended."""
    heard, last = 0, time.monotonic()
    while True:
        over = process.poll() is not None
        lines = answers.read_text(encoding="utf-8").split("\n")[:-1]  # the last is not whole yet
        for line in lines[heard:]:
            _hear(run, line, progress)
            last = time.monotonic()
        heard = len(lines)
        if over or run.finished:
            return False
        patience = limit if run.asking else LOADING
        if time.monotonic() - last > patience:
            return True
        time.sleep(0.02)


def _hear(run: Run, line: str, progress: Progress) -> None:
    event = json.loads(line)
    if event["event"] == "problem":
        run.report.problem = event["said"]
    elif event["event"] == "subject" and not run.report.kind:
        found = event["report"]
        for name in ("subject", "kind", "inferred", "declared", "notes"):
            setattr(run.report, name, found[name])
    elif event["event"] == "asking":
        run.asking = event["law"]
        progress(event["law"], len(run.done), event["total"])
    elif event["event"] == "outcome":
        run.report.outcomes.append(outcome_from(event["outcome"]))
        run.done.add(event["outcome"]["law"])
    elif event["event"] == "done":
        run.report.pictures = [Picture(**each) for each in event["pictures"]]
        run.report.notes = list(dict.fromkeys([*run.report.notes, *event["notes"]]))
        run.finished = True


def _died(run: Run, code: int, hung: bool, limit: float, words: str) -> None:
    cause = _cause(code, hung, limit, words)
    law = LAWS.get(run.asking)
    if law is None and run.asking == "pictures":
        run.finished = True
    elif law is None:
        run.report.problem = f"while it was loaded and probed, {cause}"
    else:
        run.report.outcomes.append(ended(law, cause))
        run.done.add(law.name)
        run.deaths += 1


def _cause(code: int, hung: bool, limit: float, words: str) -> str:
    if hung:
        return f"it did not come back within {limit:g} s"
    if code < 0:
        return f"it was ended by signal {-code}{words}"
    return f"it ended the program with exit code {code}{words}"


def _last_words(printed: Path) -> str:
    lines = printed.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f"; its last words: {lines[-1][:200]}" if lines else ""


def names(laws: Sequence[str] | None) -> Iterator[str]:
    """The laws that exist; unknown names are an error.

    Raises:
        ValueError: for a name that no law has.
    """
    for name in laws or ():
        if name not in LAWS:
            raise ValueError(f"no law is called {name!r}; see regard verify --list")
        yield name
