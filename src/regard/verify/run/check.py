"""The one function: a subject and what it is like go in, a report comes out."""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from regard.verify.laws import LAWS
from regard.verify.report.report import Report
from regard.verify.run.in_process import Progress, describe, judge, pictures_of, undisturbed
from regard.verify.run.separate_process import check_isolated, names
from regard.verify.subject.conventions import Conventions, conventions_from
from regard.verify.subject.subject import SubjectError
from regard.verify.subject.understand import understand


def check(
    subject: Any,
    like: Conventions | Mapping[str, Any] | None = None,
    *,
    only: Sequence[str] | None = None,
    quick: bool = False,
    seed: int = 0,
    limit: float = 30.0,
    memory: float = 4.0,
    progress: Progress = lambda what, done, total: None,
) -> Report:
    """Judge somebody's attention.

    Args:
        subject: a name (`"PATH.py:NAME"`, `"package.module:NAME"`, a folder with a transformers
            model), which is judged in a process of its own; or an object (a function of q, k and v,
            an `nn.Module` from x to output, a class), which is judged here.
        like: its conventions; what is left out is found out.
        only: names of the checks to run; all if None.
        quick: fewer sizes and no compiler.
        seed: of all dice: the same seed, the same report.
        limit: seconds for one check, in a process of its own.
        memory: GiB it may take there.
        progress: is told what is being asked, how many checks are done, and how many there are.

    Raises:
        ValueError: for conventions or checks that do not exist.

    >>> def attention(q, k, v):
    ...     return (q @ k.mT).softmax(-1) @ v
    >>> report = check(attention, only=["scale_closed_form", "convexity"])
    >>> report.failed
    ['scale_closed_form']
    >>> print(report.having("failed")[0].example)
    D=4 at log odds of two keys: expected 0.5, got 1. the scores are not scaled
    """
    own = like if isinstance(like, Conventions) else conventions_from(like or {})
    only = None if only is None else list(names(only))
    if isinstance(subject, str):
        _check_plain(own)
        return check_isolated(
            subject,
            own,
            only=only,
            quick=quick,
            seed=seed,
            limit=limit,
            memory=memory,
            progress=progress,
        )
    return _here(subject, own, only=only, quick=quick, seed=seed, progress=progress)


def _check_plain(own: Conventions) -> None:
    """Conventions travel to another process as JSON."""
    try:
        json.dumps(own.declared())
    except TypeError as error:
        raise ValueError(
            f"a named subject's conventions are numbers and texts, and {error}; give the object "
            "itself, or name a function that builds it"
        ) from error


def _here(
    subject: Any,
    own: Conventions,
    *,
    only: Sequence[str] | None,
    quick: bool,
    seed: int,
    progress: Progress,
) -> Report:
    start = time.perf_counter()
    try:
        with undisturbed(seed):
            understood = understand(subject, own, seed=seed)
    except SubjectError as error:
        name = getattr(subject, "__name__", type(subject).__name__)
        return Report(name, declared=own.declared(), problem=str(error), seed=seed)
    report = describe(understood, seed)
    total = len(LAWS if only is None else only)
    for each, outcome in judge(understood, only=only, quick=quick, seed=seed):
        if outcome is None:
            progress(each.name, len(report.outcomes), total)
        else:
            report.outcomes.append(outcome)
    report.pictures = pictures_of(understood) if only is None else []
    report.notes = list(understood.notes)
    report.seconds = round(time.perf_counter() - start, 2)
    return report
