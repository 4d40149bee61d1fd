"""The pytest plugin: `pytest --regard PATH:NAME`, and laws as parameters of a project's own tests.

    import pytest
    from regard_verify.plugin import laws

    @pytest.mark.parametrize("law", laws("my_attention.py:MultiHeadAttention"))
    def test_attention(law):
        law()

A law that a project accepts to break is listed with the reason, in its configuration of pytest:

    regard_accepted =
        masked_poison: padding is cut before attention
        my_attention.py:MultiHeadAttention zero_sizes: no batch is ever empty

It is not inside the package, because pytest imports its plugins at every start: this file imports
pytest alone, and the rest when laws are collected.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from regard_verify.report.report import Outcome, Report

JUDGED = "judged"  # the test that fails where a subject is partly judged
ACCEPTED = "regard_accepted"
ASKED = pytest.StashKey[dict[str, list[str]]]()
LINES = pytest.StashKey[list[tuple[str, str, str]]]()  # subject, law, reason


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--regard SUBJECT`, once for each subject, and the laws that a project accepts to break."""
    group = parser.getgroup("regard", "laws of attention")
    group.addoption(
        "--regard", action="append", default=[], metavar="PATH:NAME[::LAW]",
        help="check the laws of attention on this subject, a test for each law",
    )  # fmt: skip
    group.addoption("--regard-quick", action="store_true", help="fewer sizes, no compiler")
    parser.addini(
        ACCEPTED, type="linelist", default=[],
        help="laws that may be broken, a line each: [SUBJECT] LAW: REASON",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    """The marker of all tests of `--regard`: `-m "not regard"` leaves them out."""
    config.addinivalue_line("markers", "regard: a law of attention, from --regard")
    config.addinivalue_line("markers", "xdist_group(name): tests for one process of pytest-xdist")


class Laws(pytest.Collector):
    """The laws of one subject, or some of them."""

    reports: "Reports"
    only: Sequence[str]

    def collect(self) -> Iterator[pytest.Item]:
        """A test for each law."""
        for name in self.only or named():
            item: Law = Law.from_parent(self, name=name)
            item.reports = self.reports
            item.add_marker("regard")
            item.add_marker(pytest.mark.xdist_group(self.name))  # one process judges a subject
            yield item


class Law(pytest.Item):
    """One law."""

    reports: "Reports"

    def runtest(self) -> None:
        """Skip what does not apply; fail with the counter-example."""
        self.reports.require(self.name)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """The counter-example, without a traceback."""
        if isinstance(excinfo.value, LawBroken):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[str, int | None, str]:
        """The name of the test: its subject and its law."""
        return str(self.path), None, f"{self.parent.name if self.parent else ''}::{self.name}"


class LawBroken(AssertionError):
    """A law is broken; the text is the counter-example."""


class Reports:
    """The report on one subject, made when the first law is asked for.

    Args:
        subject: a name or an object, as `regard_verify.check` takes it.
        like: its conventions.
        quick: fewer sizes, no compiler.
        accepted: the laws that may be broken, and why.
    """

    def __init__(
        self,
        subject: Any,
        like: Mapping[str, Any] | None = None,
        *,
        quick: bool = False,
        accepted: Mapping[str, str] | None = None,
    ) -> None:
        self.subject, self.like, self.quick = subject, like, quick
        self.accepted = dict(accepted or {})
        self.only: list[str] | None = None
        self._report: Report | None = None
        self._refused = False

    def require(self, name: str) -> None:
        """Pass, skip or fail, by the outcome of one law.

        One cause is one failure: laws that follow from another are skipped, and of a subject that
        is not understood the first law fails and the others are skipped.

        Raises:
            LawBroken: if it is broken and not accepted, or accepted and kept.
        """
        from regard_verify.report.report import DECLARE

        if self._report is None:
            self._report = self._checked()
        if self._report.problem:
            self._refuse(self._report.problem)
        if name == JUDGED:
            broken = self._report.unjudged and f"{self._report.unjudged}\n{DECLARE}"
            status = "failed" if broken else "passed"
        else:
            outcome = self._report.named(name)
            broken, status = told(outcome), outcome.status
        reason = self.accepted.get(name)
        if status in ("not applicable", "undecided", "defect"):
            pytest.skip(broken)
        elif reason is not None and status == "passed":
            raise LawBroken(
                f"{name} is kept now, and was accepted to be broken ({reason}): remove it from "
                f"{ACCEPTED}"
            )
        elif reason is not None:
            pytest.xfail(f"accepted: {reason}")
        elif status == "follows":
            pytest.skip(broken)
        elif status == "failed":
            raise LawBroken(broken)

    def _refuse(self, problem: str) -> None:
        if self._refused:
            pytest.skip("the subject was not understood")
        self._refused = True
        raise LawBroken(f"{self.subject} was not understood: {problem}")

    def _checked(self) -> "Report":
        from regard_verify import check

        return check(self.subject, self.like, only=self.only, quick=self.quick)


def told(outcome: "Outcome") -> str:
    """Why a test of this outcome fails or is skipped."""
    if outcome.status == "follows":
        return f"follows from {outcome.because}"
    if outcome.status == "undecided":
        return f"not decided in time: {outcome.reason}"
    if outcome.status == "defect":
        return f"an error of regard-verify itself, please report it: {outcome.reason}"
    return "\n".join(outcome.sentences()) if outcome.status == "failed" else outcome.reason


def named() -> list[str]:
    """The names of all tests of one subject: a law each, and whether it could be judged."""
    from regard_verify import LAWS

    return [*LAWS, JUDGED]


def laws(
    subject: Any,
    like: Mapping[str, Any] | None = None,
    *,
    quick: bool = False,
    accepted: Mapping[str, str] | None = None,
) -> "list[Any]":
    """Parameters for `pytest.mark.parametrize`: functions that pass, skip or fail.

    There is one for each law, and one, `judged`, that fails if the subject is partly judged.

    Args:
        subject: a name or an object, as `regard_verify.check` takes it.
        like: its conventions.
        quick: fewer sizes, no compiler.
        accepted: laws that may be broken, and why: they are expected failures.

    Raises:
        ValueError: if no law has the name of an accepted one.

    Examples:
        >>> {"convexity", "judged"} <= {each.id for each in laws(lambda q, k, v: v)}
        True
    """
    for name in accepted or ():
        if name not in named():
            raise ValueError(_unknown("accepted", name))
    reports = Reports(subject, like, quick=quick, accepted=accepted)

    def law(name: str) -> Callable[[], None]:
        return lambda: reports.require(name)

    return [pytest.param(law(name), id=name) for name in named()]


def pytest_sessionstart(session: pytest.Session) -> None:
    """Read what is asked and what is accepted: errors there end the run before it begins."""
    config = session.config
    if config.getoption("--regard"):
        config.stash[ASKED] = _asked(config)
        config.stash[LINES] = list(_accepted(config))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:
    """The laws of the subjects on the command line are added after all other tests.

    This comes before pytest's own selection by `-k`, `-m` and `--deselect`, which so sees them.
    """
    for subject, chosen in config.stash.get(ASKED, {}).items():
        found: Laws = Laws.from_parent(session, name=subject, nodeid=subject)
        found.only = [] if "" in chosen else list(dict.fromkeys(chosen))
        lines = config.stash[LINES]
        found.reports = Reports(
            subject,
            quick=config.getoption("--regard-quick"),
            accepted={law: reason for of, law, reason in lines if of in ("", subject)},
        )
        items.extend(_collected(found))


def _asked(config: pytest.Config) -> dict[str, list[str]]:
    """The subjects of the command line, each with its laws; an empty name stands for all.

    Raises:
        pytest.UsageError: if a law does not exist.
    """
    subjects: dict[str, list[str]] = {}
    for given in config.getoption("--regard"):
        subject, some, law = given.partition("::")
        if some and law not in named():
            raise pytest.UsageError(_unknown(f"--regard {given}", law))
        subjects.setdefault(subject, []).append(law)
    return subjects


def _collected(found: Laws) -> list[pytest.Item]:
    """The tests, collected as pytest collects a file: so they are in its count."""
    found.ihook.pytest_collectstart(collector=found)
    report: pytest.CollectReport = found.ihook.pytest_make_collect_report(collector=found)
    found.ihook.pytest_collectreport(report=report)
    return [each for each in report.result if isinstance(each, pytest.Item)]


def _accepted(config: pytest.Config) -> Iterator[tuple[str, str, str]]:
    """Subject (or empty), law and reason of each line of the configuration.

    Raises:
        pytest.UsageError: if a line has no reason, or its law does not exist.
    """
    for line in config.getini(ACCEPTED):
        what, _, reason = line.partition(": ")
        *subject, law = what.split()
        if not reason.strip() or len(subject) > 1:
            raise pytest.UsageError(f"{ACCEPTED}: a line is '[SUBJECT] LAW: REASON', got {line!r}")
        if law not in named():
            raise pytest.UsageError(_unknown(ACCEPTED, law))
        yield "".join(subject), law, reason.strip()


def _unknown(where: str, law: str) -> str:
    return f"{where}: no law is called {law!r}; see regard-verify --list"


def pytest_collection_finish(session: pytest.Session) -> None:
    """Check only the selected laws of each subject."""
    selected: dict[Reports, list[str]] = {}
    for item in session.items:
        if isinstance(item, Law):
            selected.setdefault(item.reports, []).append(item.name)
    for reports, names in selected.items():
        every = JUDGED in names or set(names) >= set(named()) - {JUDGED}
        reports.only = None if every else names
