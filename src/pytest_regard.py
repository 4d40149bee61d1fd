"""The pytest plugin: `pytest --regard PATH:NAME`, and laws as parameters of a project's own tests.

    import pytest
    from pytest_regard import laws

    @pytest.mark.parametrize("law", laws("my_attention.py:MultiHeadAttention"))
    def test_attention(law):
        law()

It is not inside the package, because pytest imports its plugins at every start: this file imports
pytest alone, and the rest when a law is checked.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from regard.verify.report.report import Outcome, Report


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--regard SUBJECT`, once for each subject."""
    group = parser.getgroup("regard", "laws of attention")
    group.addoption(
        "--regard", action="append", default=[], metavar="PATH:NAME",
        help="check the laws of attention on this subject, a test for each law",
    )  # fmt: skip
    group.addoption("--regard-quick", action="store_true", help="fewer sizes, no compiler")


class Laws(pytest.Collector):
    """The laws of one subject."""

    subject: str
    quick: bool

    def collect(self) -> Iterator[pytest.Item]:
        """A test for each law."""
        from regard.verify import LAWS

        reports = Reports(self.subject, quick=self.quick)
        for name in LAWS:
            item: Law = Law.from_parent(self, name=name)
            item.reports = reports
            yield item


class Law(pytest.Item):
    """One law."""

    reports: "Reports"

    def runtest(self) -> None:
        """Skip what does not apply; fail with the counter-example."""
        assert_kept(self.reports.outcome(self.name))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> str:
        """The counter-example, without a traceback."""
        return str(excinfo.value)

    def reportinfo(self) -> tuple[str, int | None, str]:
        """The subject and the law."""
        return str(self.path), None, f"{self.parent.name if self.parent else ''}::{self.name}"


class LawBroken(AssertionError):
    """A law is broken; the text is the counter-example."""


class Reports:
    """The report on one subject, made at the first law."""

    def __init__(
        self, subject: Any, like: Mapping[str, Any] | None = None, *, quick: bool = False
    ) -> None:
        self.subject, self.like, self.quick = subject, like, quick
        self._report: Report | None = None

    def outcome(self, name: str) -> "Outcome":
        """The outcome of one law.

        Raises:
            LawBroken: if the subject could not be understood.
        """
        from regard.verify import check

        if self._report is None:
            self._report = check(self.subject, self.like, quick=self.quick)
        if self._report.problem:
            raise LawBroken(f"{self.subject} was not understood: {self._report.problem}")
        return next(each for each in self._report.outcomes if each.law == name)


def assert_kept(outcome: "Outcome") -> None:
    """Pass, skip or fail, by the outcome."""
    if outcome.status == "not applicable":
        pytest.skip(outcome.reason)
    if outcome.status == "failed":
        raise LawBroken(f"{outcome.statement}\n{outcome.example}")


def laws(
    subject: Any, like: Mapping[str, Any] | None = None, *, quick: bool = False
) -> "list[Any]":
    """Parameters for `pytest.mark.parametrize`: functions that pass, skip or fail.

    Args:
        subject: a name or an object, as `regard.verify.check` takes it.
        like: its conventions.
        quick: fewer sizes, no compiler.

    >>> from regard.verify import LAWS
    >>> len(laws(lambda q, k, v: v)) == len(LAWS)
    True
    """
    from regard.verify import LAWS

    reports = Reports(subject, like, quick=quick)

    def law(name: str) -> Callable[[], None]:
        return lambda: assert_kept(reports.outcome(name))

    return [pytest.param(law(name), id=name) for name in LAWS]


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """The laws of the subjects on the command line are added after all other tests."""
    yield
    for subject in session.config.getoption("--regard"):
        found: Laws = Laws.from_parent(session, name=subject, nodeid=subject)
        found.subject, found.quick = subject, session.config.getoption("--regard-quick")
        session.items.extend(found.collect())
    session.testscollected = len(session.items)
