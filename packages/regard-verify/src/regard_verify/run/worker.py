"""The separate process: finds the subject, checks it, and writes each outcome at once.

`python -m regard_verify.run.worker REQUEST ANSWERS` reads one JSON file and appends lines of JSON
to another. If the subject ends the process, the lines written so far stay.
"""

import json
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO


def main(request: str, answers: str) -> None:
    """One run, as requested."""
    asked = json.loads(Path(request).read_text(encoding="utf-8"))
    with Path(answers).open("a", encoding="utf-8") as out:
        _write(out, "started")
        import torch

        from regard_verify.laws import LAWS
        from regard_verify.run.in_process import (
            crash,
            describe,
            problem_of,
            run_laws,
            undisturbed,
        )
        from regard_verify.subject.conventions import conventions_from
        from regard_verify.subject.understand import understand

        torch.set_num_threads(1)
        limit_memory(asked["memory"])
        own = conventions_from(asked["conventions"])
        try:
            with undisturbed(asked["seed"]):
                subject = understand(asked["subject"], own, seed=asked["seed"])
        except Exception as error:
            found = crash(error)
            crashed = None if found is None else asdict(found)
            _write(out, "problem", text=problem_of(error), crash=crashed, only=asked["only"])
            return
        _write(out, "subject", report=asdict(describe(subject, asked["seed"])))
        options = {name: asked[name] for name in ("only", "skip", "quick", "seed")}
        for law, outcome in run_laws(subject, **options):
            if outcome is None:
                limit_time(asked["limit"])
                _write(out, "law", law=law.name, total=len(LAWS))
            else:
                _write(out, "outcome", outcome=asdict(outcome))
        _write(out, "done", notes=subject.notes)


def limit_time(seconds: float) -> None:
    """End this process by SIGPROF when it has used so much processor time from now on."""
    if hasattr(signal, "setitimer"):  # not on Windows
        signal.setitimer(signal.ITIMER_PROF, seconds)


def limit_memory(gibibytes: float) -> None:
    """Limit the address space to the memory in use now plus `gibibytes`, where the system can."""
    try:
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (ImportError, OSError):
        return
    most = pages * resource.getpagesize() + int(gibibytes * (1 << 30))
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _write(out: TextIO, event: str, **what: Any) -> None:
    out.write(json.dumps({"event": event, **what}, default=str) + "\n")
    out.flush()


if __name__ == "__main__":
    main(*sys.argv[1:3])
