"""Judging a subject in this process: it is understood, and every law that applies is checked."""

import contextlib
import io
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from regard_verify.blame import files_of, line_about, line_of, own_error, said
from regard_verify.law import Broken, Counterexample, Law, NotApplicable, Trial
from regard_verify.laws import LAWS
from regard_verify.report.report import Outcome, Report, outcome, outcome_from
from regard_verify.subject.conventions import Conventions
from regard_verify.subject.subject import Subject, SubjectError
from regard_verify.subject.understand import understand

LACKS = {  # why a law does not apply, by the ability that it needs
    "heads": "its heads were not reached",
    "layer": "it is not a layer from x to output",
    "several_heads": "it has one head, or its heads were not reached",
    "gqa": "it has as many key heads as query heads",
    "cross": "it needs as many queries as keys",
    "mask": "it takes no mask of queries by keys",
    "padding": "it takes no mask",
    "dropout": "it has no dropout",
    "cache": "no cache of it was found",
    "context": "it reads no other sequence",
    "documents": "it takes no documents that are packed in a row",
    "module": "it is not a module",
    "weights": "it returns no weights",
    "scale": "its calls take no scale, softcap or bias",
    "reference": "no reference is declared",
}
FIRST = "eval_determinism"
LAST = "default_dtype"  # a subject may keep tables that it computed under another default


def run_laws(
    subject: Subject,
    *,
    only: Iterable[str] | None = None,
    skip: Iterable[str] = (),
    quick: bool = False,
    seed: int = 0,
) -> Iterator[tuple[Law, Outcome | None]]:
    """Yield each law with None before it is checked, and again with its outcome.

    They run from `FIRST` to `LAST`. If `FIRST` is broken no other law is asked: a subject whose
    calls differ breaks them all.
    """
    wanted = set(LAWS if only is None else only) - set(skip)
    differs = False
    for law in sorted(LAWS.values(), key=lambda each: (each.name != FIRST, each.name == LAST)):
        if law.name not in wanted:
            continue
        yield law, None
        if differs:
            found = outcome(law, "not applicable", reason="not asked: two calls of it differ")
        else:
            found = run_law(law, subject, quick=quick, seed=seed)
        differs = differs or (law.name == FIRST and found.status == "failed")
        yield law, found


def run_law(law: Law, subject: Subject, *, quick: bool = False, seed: int = 0) -> Outcome:
    """The outcome of one law."""
    lacking = [need for need in law.needs if not subject.has.any_of(need)]
    if lacking or (quick and not law.quick):
        reasons = [LACKS[name] for each in lacking for name in each.split("|") if name in LACKS]
        reason = next(iter(reasons), "left out by --quick")
        return outcome(law, "not applicable", reason=reason)
    start = time.perf_counter()
    found = _outcome(law, subject, Trial(law.name, seed=seed, quick=quick), seed)
    if subject.module is not None:  # as it was: in eval mode, without gradients
        with contextlib.suppress(Exception):
            subject.module.eval()
            subject.module.zero_grad(set_to_none=True)
    return replace(found, seconds=round(time.perf_counter() - start, 4))


def _outcome(law: Law, subject: Subject, trial: Trial, seed: int) -> Outcome:
    try:
        with undisturbed(seed):
            law.run(subject, trial)
        return outcome(law, "passed")
    except NotApplicable as error:
        return outcome(law, "not applicable", reason=str(error))
    except Broken as error:
        found = outcome(law, "failed", example=error.example)
        forgot = subject.forgot_super if law.name == "super_init" else ""
        return replace(found, line=forgot or line_about(law.name, subject.thing))
    except Exception as error:
        return _of_an_error(law, subject, error)


def _of_an_error(law: Law, subject: Subject, error: Exception) -> Outcome:
    """The outcome of a law that ended in an error: of the subject, or of this suite."""
    files = files_of(subject.thing, subject.module)
    if defect := defect_in(error, files):
        return outcome(law, "defect", reason=defect)
    if isinstance(error, SubjectError):
        lacks = "no autograd formula" in str(error)  # an operator without a backward pass
        if lacks or isinstance(error.__cause__, NotImplementedError):
            return outcome(law, "not applicable", reason=f"it refuses: {error}")
        cause = str(error)
    else:
        cause = f"the call ended in {said(error, line_of(error, files))}"
    example = Counterexample("", "", "an output", "an error", cause)
    told = error.line if isinstance(error, SubjectError) else ""
    found = outcome(law, "failed", example=example)
    return replace(found, line=told or line_of(error, files))


def defect_in(error: BaseException, files: Collection[str] = ()) -> str:
    """An error of this suite, in words; "" if the subject raised it or caused it."""
    raised = error.__cause__ if isinstance(error, SubjectError) else error
    if raised is None or isinstance(raised, SyntaxError):  # of its file: it has no frame of its own
        return ""
    return own_error(raised, files)


@contextlib.contextmanager
def undisturbed(seed: int = 0) -> Iterator[None]:
    """One thread, float32 without autocast, a seeded generator, no warnings and no prints.

    All settings are restored.
    """
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    grad = torch.is_grad_enabled()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)  # for building a subject; some laws set others
    try:
        with (
            torch.autocast("cpu", enabled=False),
            torch.random.fork_rng(devices=[]),
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(grad)


def problem_of(error: Exception) -> str:
    """Why a subject could not be understood, by the error in which that ended."""
    if defect := defect_in(error):
        return (
            f"this is an error of regard-verify, which says nothing about the subject: {defect}; "
            "declare its conventions, so that less is found out by probing, and report the error"
        )
    if isinstance(error, SubjectError):
        text = " ".join(str(error).split())
    elif isinstance(error, (ValueError, ImportError, OSError)):
        text = " ".join(str(error).split()) or said(error)
    else:
        text = f"it raised {said(error)}"
    line = line_of(error)
    return text if not line or line in text else f"{text} ({line})"


def crash(error: Exception) -> Outcome | None:
    """The broken law `runs`, if the subject's code fails on every input; None if that is not
    known.
    """
    if not isinstance(error, SubjectError) or not error.crashes:
        return None
    cause = error.__cause__  # a line of the subject raised it, and it is no refusal
    kinds = (NameError, AttributeError, TypeError, RuntimeError)
    accident = isinstance(cause, kinds) and not isinstance(cause, NotImplementedError)
    if cause is None or not accident or "NoneType" in str(cause) or not error.line:
        return None
    text = f"it raised {said(cause)}"
    example = Counterexample("", "", "an output", "an error, as for all other shapes", text)
    return replace(outcome(LAWS["runs"], "failed", example=example), line=error.line)


Progress = Callable[[str, int, int], None]  # the law, how many are done, how many there are


@dataclass
class Request:
    """A request to judge a subject.

    Attributes:
        subject: its name, or the object itself.
        conventions: its conventions.
        only: names of laws; all if None.
        skip: laws that already have an outcome.
        memory: GiB that a separate process may take beyond what torch takes.
        limit: seconds of processor time for one law there.
    """

    subject: Any
    conventions: Conventions
    only: Sequence[str] | None
    quick: bool
    seed: int
    skip: Sequence[str] = ()
    memory: float = 4.0
    limit: float = 30.0


def events(request: Request) -> Iterator[dict[str, Any]]:
    """Judge a subject under its conventions: yields each step as a dictionary for JSON."""
    seed = request.seed
    try:
        with undisturbed(seed):
            subject = understand(request.subject, request.conventions, seed=seed)
    except Exception as error:
        found = crash(error)
        told = None if found is None else asdict(found)
        yield {"event": "problem", "text": problem_of(error), "crash": told}
        return
    known = {"subject": subject.name, "kind": subject.kind, "inferred": dict(subject.inferred)}
    declared = subject.conventions.declared()
    yield {"event": "subject", **known, "declared": declared, "notes": list(subject.notes)}
    laws = run_laws(subject, only=request.only, skip=request.skip, quick=request.quick, seed=seed)
    for law, done in laws:
        if done is None:
            yield {"event": "law", "law": law.name}
        else:
            yield {"event": "outcome", "outcome": asdict(done)}
    yield {"event": "done", "notes": list(subject.notes)}


@dataclass
class Run:
    """The results on one subject so far, over all its processes."""

    report: Report
    only: Sequence[str] | None
    progress: Progress
    done: set[str] = field(default_factory=set)
    current: str = ""
    finished: bool = False
    deaths: int = 0

    @property
    def wanted(self) -> list[Law]:
        """The laws that are asked for."""
        return [law for law in LAWS.values() if self.only is None or law.name in self.only]

    def record(self, event: Mapping[str, Any]) -> None:
        """Put one step into the report."""
        report = self.report
        if event["event"] == "problem":
            self._end_early(event["text"], event["crash"])
        elif event["event"] == "subject" and not report.kind:
            for name in ("subject", "kind", "inferred", "declared", "notes"):
                setattr(report, name, event[name])
        elif event["event"] == "law":
            self.current = event["law"]
            self.progress(event["law"], len(self.done), len(self.wanted))
        elif event["event"] == "outcome":
            self.end_law(outcome_from(event["outcome"]))
        elif event["event"] == "done":
            report.notes = list(dict.fromkeys([*report.notes, *event["notes"]]))
            self.finished = True

    def end_law(self, found: Outcome) -> None:
        """Add the outcome of a law."""
        self.report.outcomes.append(found)
        self.done.add(found.law)

    def _end_early(self, problem: str, crash: Mapping[str, Any] | None) -> None:
        """Complete the report on a subject that was not understood, or does not run at all."""
        self.finished = True
        if crash is None:
            self.report.problem = problem
            return
        first = outcome_from(crash)
        reason = "not asked: it raises an error for every input"
        others = [law for law in self.wanted if law.name != first.law]
        left = [outcome(law, "not applicable", reason=reason) for law in others]
        self.report.outcomes = [first, *left]
