"""The pytest plugin: `pytest --regard PATH:NAME`, and laws as parameters of a project's own tests.

    import pytest
    from regard_verify.plugin import laws

    @pytest.mark.parametrize("law", laws("my_attention.py:MultiHeadAttention"))
    def test_attention(law):
        law()

A law that a project accepts to break is listed with the reason, in its configuration of pytest:

    regard_accepted =
        masked_poison: padding is cut before attention
        my_attention.py:MultiHeadAttention fully_masked_forward: no sequence is empty

It is not inside the package, because pytest imports its plugins at every start: this file imports
pytest alone, and the rest when laws are collected.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from regard_verify.report.report import Report

JUDGED = "judged"  # the test that fails where a subject is partly judged
ACCEPTED = "regard_accepted"
ASKED = pytest.StashKey[list["Laws"]]()  # of each subject on the command line


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

    def reportinfo(self) -> tuple[str, int | None, str]:
        """The name of the test: its subject and its law."""
        return str(self.path), None, f"{self.parent.name if self.parent else ''}::{self.name}"


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
        is not understood the first law fails and the others are skipped. A law that is accepted is
        expected to fail, and fails the test if it is kept.
        """
        from regard_verify import check

        if self._report is None:
            self._report = check(self.subject, self.like, only=self.only, quick=self.quick)
        if self._report.problem and self._refused:
            pytest.skip("the subject was not understood")
        if self._report.problem:
            self._refused = True
            said = f"{self.subject} was not understood: {self._report.problem}"
            pytest.fail(said, pytrace=False)
        status, text = _told(self._report, name)
        reason = self.accepted.get(name)
        if status in ("not applicable", "undecided", "defect"):
            pytest.skip(text)
        elif reason is not None and status == "passed":
            said = f"{name} is kept now, and was accepted to be broken ({reason})"
            pytest.fail(f"{said}: remove it from {ACCEPTED}", pytrace=False)
        elif reason is not None:
            pytest.xfail(f"accepted: {reason}")
        elif status == "follows":
            pytest.skip(text)
        elif status == "failed":
            pytest.fail(text, pytrace=False)


def _told(report: "Report", name: str) -> tuple[str, str]:
    """The status of a law, or of `judged`, and why its test fails or is skipped."""
    from regard_verify.report.report import DECLARE

    if name == JUDGED:
        return "failed" if report.unjudged else "passed", f"{report.unjudged}\n{DECLARE}"
    outcome = report.named(name)
    texts = {
        "follows": f"follows from {outcome.because}",
        "undecided": f"not decided in time: {outcome.reason}",
        "defect": f"an error of regard-verify itself, please report it: {outcome.reason}",
        "failed": "\n".join(outcome.sentences()),
    }
    return outcome.status, texts.get(outcome.status, outcome.reason)


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
    """Read the subjects of the command line and the laws that are accepted to be broken.

    Raises:
        pytest.UsageError: before the run begins, if a law does not exist or has no reason.
    """
    config = session.config
    chosen: dict[str, list[str]] = {}
    for given in config.getoption("--regard"):
        subject, some, law = given.partition("::")
        if some and law not in named():
            raise pytest.UsageError(_unknown(f"--regard {given}", law))
        chosen.setdefault(subject, []).append(law)
    lines = list(_accepted(config)) if chosen else []
    config.stash[ASKED] = []
    for subject, laws in chosen.items():
        found: Laws = Laws.from_parent(session, name=subject, nodeid=subject)
        found.only = [] if "" in laws else list(dict.fromkeys(laws))
        accepted = {law: reason for of, law, reason in lines if of in ("", subject)}
        quick = config.getoption("--regard-quick")
        found.reports = Reports(subject, quick=quick, accepted=accepted)
        config.stash[ASKED].append(found)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:
    """The laws of the subjects on the command line are added after all other tests.

    This comes before pytest's own selection by `-k`, `-m` and `--deselect`, which so sees them.
    They are collected as pytest collects a file: so they are in its count.
    """
    for found in config.stash.get(ASKED, []):
        found.ihook.pytest_collectstart(collector=found)
        report: pytest.CollectReport = found.ihook.pytest_make_collect_report(collector=found)
        found.ihook.pytest_collectreport(report=report)
        items.extend(each for each in report.result if isinstance(each, pytest.Item))


def _accepted(config: pytest.Config) -> Iterator[tuple[str, str, str]]:
    """Subject (or empty), law and reason of each line of the configuration."""
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
