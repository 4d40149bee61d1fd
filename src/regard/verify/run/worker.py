"""The other process: finds the subject, asks it, and writes down each outcome as it comes.

`python -m regard.verify.run.worker REQUEST ANSWERS` reads one JSON file and appends lines of JSON
to another. What the subject prints goes elsewhere; if it dies, what was written stays.
"""

import json
import sys
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO


def main(request: str, answers: str) -> None:
    """One run, as requested."""
    asked = json.loads(Path(request).read_text(encoding="utf-8"))
    with Path(answers).open("a", encoding="utf-8") as out:
        _say(out, "started")
        import torch

        from regard.verify.laws import LAWS
        from regard.verify.run.in_process import describe, judge, pictures_of, undisturbed
        from regard.verify.subject.conventions import conventions_from
        from regard.verify.subject.subject import SubjectError
        from regard.verify.subject.understand import understand

        torch.set_num_threads(1)
        limit_memory(asked["memory"])
        try:
            with undisturbed(asked["seed"]):
                own = conventions_from(asked["conventions"])
                subject = understand(asked["subject"], own, seed=asked["seed"])
        except (SubjectError, ValueError, ImportError, OSError) as error:
            _say(out, "problem", said=" ".join(str(error).split()))
            return
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            said = f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
            _say(out, "problem", said=f"it could not be probed: {said}")
            return
        _say(out, "subject", report=asdict(describe(subject, asked["seed"])))
        wanted = {"only": asked["only"], "skip": asked["skip"]}
        for law, outcome in judge(subject, quick=asked["quick"], seed=asked["seed"], **wanted):
            if outcome is None:
                _say(out, "asking", law=law.name, total=len(LAWS))
            else:
                _say(out, "outcome", outcome=asdict(outcome))
        _say(out, "asking", law="pictures", total=len(LAWS))
        _say(out, "done", pictures=[asdict(each) for each in pictures_of(subject)],
             notes=subject.notes)  # fmt: skip


def limit_memory(gibibytes: float) -> None:
    """No more address space than is in use now, and so much; where the system can."""
    try:
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (ImportError, OSError):
        return
    most = pages * resource.getpagesize() + int(gibibytes * (1 << 30))
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _say(out: TextIO, event: str, **what: Any) -> None:
    out.write(json.dumps({"event": event, **what}, default=str) + "\n")
    out.flush()


if __name__ == "__main__":
    main(*sys.argv[1:3])
