"""The public function: a subject and its conventions in, a report out."""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from regard_verify.laws import LAWS
from regard_verify.report.report import Report
from regard_verify.run.causes import settled
from regard_verify.run.in_process import Progress, Request, Run, events
from regard_verify.run.separate_process import Start, new_python, run_separately
from regard_verify.subject.caches import UNFOUND
from regard_verify.subject.conventions import Conventions, conventions_from

REFERENCE = (  # what to declare where the definition cannot be asked
    "Name the function of (q, k, v) inside it, or declare reference=NAME, a function or module in "
    "its file that returns the right output"
)
NEW_CACHE = "Declare new_cache, a function or class that makes one, or cache= (nothing) for none"


def check(
    subject: Any,
    like: Conventions | Mapping[str, Any] | None = None,
    *,
    only: Sequence[str] | None = None,
    quick: bool = False,
    seed: int = 0,
    limit: float = 30.0,
    memory: float = 4.0,
    progress: Progress = lambda law, done, total: None,
) -> Report:
    """Check the laws of attention on a subject.

    Args:
        subject: a name (`"PATH.py:NAME"`, `"package.module:NAME"`), which is run in a separate
            process; or an object (a function of q, k and v, an `nn.Module` from x to output, a
            class, a function without arguments that builds one), which is run in this one.
        like: its conventions; those that are left out are found out.
        only: names of laws; all if None.
        quick: fewer sizes and no compiler.
        seed: of the random inputs: the same seed gives the same report.
        limit: seconds for one law, in a separate process.
        memory: GiB of memory there.
        progress: called with the law that is checked, how many are done, and how many there are.

    Returns:
        The report; it is true if no law is broken and all could be judged.

    Raises:
        ValueError: for conventions or laws that do not exist, and a seed of more than 64 bits.
        OSError: if the disk of temporary files, by which a separate process answers, is full.

    Examples:
        >>> from regard_verify import check
        >>> def attention(q, k, v):
        ...     return (q @ k.mT).softmax(-1) @ v
        >>> report = check(attention, only=["scale_closed_form", "convexity"])
        >>> report.failed
        ['scale_closed_form']
        >>> print(report.having("failed")[0].example)
        D=4 at log odds of two keys: expected 0.5, got 1. the scores are not scaled
    """
    own = like if isinstance(like, Conventions) else conventions_from(like or {})
    request = Request(subject, own, only, quick, seed, memory=memory, limit=limit)
    return judge(request, progress, new_python)


def judge(request: Request, progress: Progress, start: Start) -> Report:
    """The report on a request; `start` begins the process of a named subject."""
    subject, only, began = request.subject, request.only, time.perf_counter()
    for each in only or ():
        if each not in LAWS:
            raise ValueError(f"no law is called {each!r}; see regard-verify --list")
    if not -(2**63) <= request.seed < 2**64:  # as torch takes it
        raise ValueError(f"a seed is a number of 64 bits; got {request.seed}")
    if not request.limit + request.memory < 1e9:  # NaN is not, either
        raise ValueError("limit and memory are numbers below a billion")
    declared = request.conventions.declared()
    name = str(getattr(subject, "__name__", type(subject).__name__))
    name = subject if isinstance(subject, str) else name
    run = Run(Report(name, declared=declared, seed=request.seed), only, progress)
    if isinstance(subject, str):
        try:
            json.dumps(declared)
        except TypeError as error:
            raise ValueError(
                f"a named subject's conventions are numbers and texts, and {error}; give the "
                "object itself, or name a function that builds it"
            ) from error
        run_separately(request, run, start)
    else:
        for event in events(request):
            run.record(event)
    run.report.seconds = round(time.perf_counter() - began, 2)
    return _completed(run.report, only)


def _completed(report: Report, only: Sequence[str] | None) -> Report:
    """The report with its outcomes in order, causes first, and what could not be judged."""
    place = {name: at for at, name in enumerate(LAWS)}
    report.outcomes.sort(key=lambda each: place[each.law])
    report.outcomes = settled(report.outcomes)
    report.unjudged = unjudged(report) if only is None else ""
    return report


def unjudged(report: Report) -> str:
    """The part of an attention that was not judged, and what to declare; empty without such.

    Examples:
        >>> from regard_verify import Outcome
        >>> asked = Outcome("oracle_forward", "not applicable", "", "", reason="no heads")
        >>> unjudged(Report("mine", "module", outcomes=[asked]))[:52]
        'Its values and its scale were not judged: no heads. '
    """
    if report.problem or report.kind not in ("function", "module"):
        return ""
    status = {each.law: each for each in report.outcomes}
    asked = status.get("oracle_forward")  # the law of the values, and with them of the scale
    judged_by_reference = status.get("reference_parity")
    cache, found = report.inferred.get("cache", ""), []
    by_reference = judged_by_reference is not None and judged_by_reference.status == "passed"
    if asked is not None and asked.status in ("not applicable", "defect") and not by_reference:
        found.append(f"Its values and its scale were not judged: {asked.reason}. {REFERENCE}.")
    if cache.startswith(UNFOUND):
        found.append(f"Its steps with a cache were not judged: {cache}. {NEW_CACHE}.")
    return " ".join(found)
