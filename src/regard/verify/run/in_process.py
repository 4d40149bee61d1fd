"""Asking a subject about every law that applies to it, in this process."""

import contextlib
import io
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch

from regard.verify.law import Broken, Counterexample, Law, NotApplicable, Sizes, Trial
from regard.verify.laws import LAWS
from regard.verify.laws.cases import weights_width
from regard.verify.report.report import Outcome, Picture, Report, outcome
from regard.verify.subject.subject import Subject, SubjectError
from regard.verify.visibility import read_sight, read_weights

Progress = Callable[[str, int, int], None]

LACKS = {
    "heads": "its heads were not reached",
    "layer": "it is not a layer from x to output",
    "several heads": "it has one head, or its heads were not reached",
    "gqa": "its key heads are as many as its query heads",
    "cross": "queries and keys must be equally many",
    "mask": "it takes no mask of queries by keys",
    "padding": "it takes no mask",
    "dropout": "it drops nothing",
    "cache": "it has no past that was found",
    "context": "it reads no other sequence",
    "module": "it is not a module",
    "weights": "it gives no weights",
    "scale": "a call can ask for no scale, softcap or bias",
    "rope": "nothing is rotated",
    "reference": "no reference is declared",
}
THINGS = ("store", "paged", "allocator", "prefix", "rotation")
NAMES = {
    "cache": "cache",
    "paged": "paged attention",
    "allocator": "block allocator",
    "prefix": "prefix cache",
    "rope": "rotation",
}
KNOWN = {  # defects of others, with the place where they are reported
    ("MultiheadAttention", "fully_masked_forward"): "pytorch#41508",
    ("MultiheadAttention", "fully_masked_backward"): "pytorch#41508",
    ("MultiheadAttention", "mask_and_causal"): "pytorch#99282",
    ("MultiheadAttention", "needs_weights_agree"): "pytorch#99282",
    ("scaled_dot_product_attention", "masked_poison"): "pytorch#103963",
}


def lacking(law: Law, subject: Subject) -> str | None:
    """Why a law does not apply; None if it does."""
    options = _options(law)
    if subject.kind not in ("function", "module"):
        if subject.has & options & set(THINGS):
            return None
        return f"it is not about a {NAMES[subject.kind]}"
    if options <= set(THINGS):
        return "it is about caches, pages, allocators, prefixes or rotations alone"
    for need in law.needs:
        either = need.split("|")
        if not subject.has & set(either):
            return next(LACKS[option] for option in either if option in LACKS)
    return None


def _options(law: Law) -> set[str]:
    return {option for need in law.needs for option in need.split("|")}


def judge(
    subject: Subject,
    *,
    only: Iterable[str] | None = None,
    skip: Iterable[str] = (),
    quick: bool = False,
    seed: int = 0,
) -> Iterator[tuple[Law, Outcome | None]]:
    """Each law, first without and then with its outcome."""
    wanted = set(LAWS) if only is None else set(only)
    for law in LAWS.values():
        if law.name in wanted and law.name not in skip:
            yield law, None
            yield law, ask(law, subject, quick=quick, seed=seed)


def ask(law: Law, subject: Subject, *, quick: bool = False, seed: int = 0) -> Outcome:
    """What one law says of the subject."""
    reason = lacking(law, subject)
    if reason is None and quick and not law.quick:
        reason = "left out by --quick"
    if reason is not None:
        return outcome(law, "not applicable", reason=reason)
    start = time.perf_counter()
    said = partial(outcome, law)
    try:
        with undisturbed(seed):
            law.run(subject, Trial(law.name, seed=seed, quick=quick))
        made = said("passed")
    except NotApplicable as error:
        made = said("not applicable", reason=str(error))
    except Broken as error:
        made = said("failed", example=error.example, known=_known(subject, law))
    except SubjectError as error:
        example = Counterexample("", "", "an output", "an error", str(error))
        refused = isinstance(error.__cause__, NotImplementedError)
        made = (
            said("not applicable", reason=f"it refuses: {error}")
            if refused
            else said("failed", example=example)
        )
    except Exception as error:
        cause = f"the call ended in {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        made = said("failed", example=Counterexample("", "", "an output", "an error", cause))
    finally:
        _as_it_was(subject)
    return Outcome(**{**vars(made), "seconds": round(time.perf_counter() - start, 4)})


def _known(subject: Subject, law: Law) -> str:
    inner = type(subject.module).__name__ if subject.module is not None else ""
    names = (inner, getattr(subject.thing, "__name__", ""))
    return next((KNOWN[n, law.name] for n in names if (n, law.name) in KNOWN), "")


def _as_it_was(subject: Subject) -> None:
    """In eval mode and without gradients, whatever a law did to it."""
    if subject.module is not None:
        with contextlib.suppress(Exception):
            subject.module.eval()
            subject.module.zero_grad(set_to_none=True)


@contextlib.contextmanager
def undisturbed(seed: int = 0) -> Iterator[None]:
    """One thread, known dice, no warnings and no prints of the subject's; and all as it was."""
    threads, dtype, grad = (
        torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled(),
    )  # fmt: skip
    torch.set_num_threads(1)
    try:
        with (
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


def describe(subject: Subject, seed: int) -> Report:
    """A report that has no outcomes yet."""
    return Report(
        subject.name,
        subject.kind,
        inferred=dict(subject.inferred),
        declared=subject.conventions.declared(),
        notes=list(subject.notes),
        seed=seed,
    )


def pictures_of(subject: Subject) -> list[Picture]:
    """Who sees whom: plainly, with fewer queries than keys, and behind a mask."""
    found: list[Picture] = []
    trial = Trial("picture")
    with contextlib.suppress(SubjectError), undisturbed():
        if subject.attend is not None:
            _heads_pictures(subject, trial, found)
        elif subject.layer is not None:
            seen = read_sight(subject.through, subject.tokens(1, 6, trial))
            expected = subject.visible(6, 6) | torch.eye(6, dtype=torch.bool)
            found.append(Picture("no mask", expected.tolist(), seen.tolist()))
    return found


def _heads_pictures(subject: Subject, trial: Trial, found: list[Picture]) -> None:
    asked: dict[str, Any] = {}
    shapes = [(6, 6), (3, 6)] if "cross" in subject.has else [(6, 6)]
    if "causal" in subject.has and not subject.module and not subject.conventions.causal:
        asked = {"causal": True}
    for queries, keys in shapes:
        _picture(subject, trial, found, "no mask", queries, keys, {})
        if asked:
            _picture(subject, trial, found, "causal", queries, keys, asked)
    if "mask" in subject.has:
        keep = torch.rand(1, 1, 6, 6, generator=trial.dice) < 0.6
        keep |= torch.eye(6, dtype=torch.bool)
        _picture(subject, trial, found, "a mask", 6, 6, {"keep": keep})


def _picture(
    subject: Subject,
    trial: Trial,
    found: list[Picture],
    title: str,
    queries: int,
    keys: int,
    asked: dict[str, Any],
) -> None:
    sizes = subject.fit(Sizes(1, 1, 1, queries, keys, 4, keys))
    q, k, _ = subject.inputs(sizes, trial)
    call = partial(subject.run, **asked)
    seen = (read_weights(call, q, k, width=weights_width(subject, sizes)) != 0)[0, 0]
    expected = subject.visible(queries, keys, causal=bool(asked.get("causal")))
    if "keep" in asked:
        expected = expected & asked["keep"][0, 0]
    found.append(Picture(f"{title}, {queries} queries, {keys} keys", expected.tolist(),
                         seen.tolist()))  # fmt: skip


def quiet_imports() -> None:
    """transformers says many things while it is imported: on stderr, and not here."""
    if "transformers" in sys.modules:
        sys.modules["transformers"].logging.set_verbosity_error()
