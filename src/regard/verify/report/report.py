"""What was found: every law's outcome, what was inferred, and one line that says it all."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from regard.verify.law import Counterexample, Law
from regard.words import counted

Status = Literal["passed", "failed", "advice", "not applicable"]
NOT_UNDERSTOOD = 2


@dataclass(frozen=True)
class Outcome:
    """What one law said.

    Attributes:
        law: the name of the law.
        status: passed, failed, advice (unwise, not wrong) or not applicable.
        statement: the law in one sentence.
        kind: exact, bounded, statistical or resource.
        catches: the mistake it is there for.
        reason: why it does not apply.
        example: the counter-example.
        known: where others have reported the same defect.
        seconds: how long it took.
    """

    law: str
    status: Status
    statement: str
    kind: str
    catches: str
    reason: str = ""
    example: Counterexample | None = None
    known: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Picture:
    """Who sees whom, as it should be and as it is."""

    title: str
    expected: list[list[bool]]
    actual: list[list[bool]]


@dataclass
class Report:
    """A subject before the laws.

    Attributes:
        subject: how it was called.
        kind: what it is.
        inferred: what was found out by probing, in words.
        declared: what was declared.
        notes: remarks.
        outcomes: of every law, in order.
        pictures: of who sees whom.
        problem: why nothing could be asked, if so.
        seed: of all dice.
        seconds: altogether.

    >>> report = Report("mine", outcomes=[Outcome("convexity", "passed", "", "bounded", "")])
    >>> report.exit_code, report.badge()
    (0, '![attention: 1 of 1 laws](https://img.shields.io/badge/attention-1_of_1_laws-brightgreen)')
    """

    subject: str
    kind: str = ""
    inferred: dict[str, str] = field(default_factory=dict)
    declared: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)
    problem: str = ""
    seed: int = 0
    seconds: float = 0.0

    def having(self, status: Status) -> list[Outcome]:
        """The outcomes of this status."""
        return [each for each in self.outcomes if each.status == status]

    @property
    def failed(self) -> list[str]:
        """Names of the laws that are broken."""
        return [each.law for each in self.having("failed")]

    @property
    def advice(self) -> list[str]:
        """Names of what would be wise."""
        return [each.law for each in self.having("advice")]

    @property
    def exit_code(self) -> int:
        """0 if no law is broken, 1 if one is, 2 if the subject could not be understood."""
        return NOT_UNDERSTOOD if self.problem else int(bool(self.failed))

    def __bool__(self) -> bool:
        return self.exit_code == 0

    def summary(self) -> str:
        """One line."""
        if self.problem:
            return f"{self.subject}: not understood. {self.problem}"
        passed, failed = len(self.having("passed")), len(self.failed)
        advice = counted(len(self.advice), "piece of advice", "pieces of advice")
        also = f", {advice}" if self.advice else ""
        aside = len(self.having("not applicable"))
        kept = counted(passed, "law")
        return f"{self.subject}: {kept} kept, {failed} broken{also}, {aside} not applicable"

    def badge(self) -> str:
        """A line of Markdown for a README."""
        passed = len(self.having("passed"))
        asked = passed + len(self.failed)
        colour = "red" if self.failed or self.problem else "brightgreen"
        said = f"{passed}_of_{asked}_laws" if not self.problem else "not_understood"
        text = said.replace("_", " ")
        return f"![attention: {text}](https://img.shields.io/badge/attention-{said}-{colour})"

    def to_json(self) -> str:
        """The report as JSON; `Report.from_json` reads it."""
        whole = {**asdict(self), "exit_code": self.exit_code, "badge": self.badge()}
        return json.dumps(whole, indent=2, allow_nan=False, default=str)

    @staticmethod
    def from_json(text: str) -> "Report":
        """The report that `to_json` wrote."""
        whole = json.loads(text)
        whole = {name: whole[name] for name in Report.__dataclass_fields__}
        whole["outcomes"] = [outcome_from(each) for each in whole["outcomes"]]
        whole["pictures"] = [Picture(**each) for each in whole["pictures"]]
        return Report(**whole)


def outcome_from(given: Mapping[str, Any]) -> Outcome:
    """An outcome from JSON."""
    example = given.get("example")
    return Outcome(**{**given, "example": Counterexample(**example) if example else None})


def outcome(
    law: Law,
    status: Status,
    *,
    reason: str = "",
    example: Counterexample | None = None,
    known: str = "",
    seconds: float = 0.0,
) -> Outcome:
    """What a check said; a broken law that is no law is advice."""
    if status == "failed" and law.advised:
        status = "advice"
    return Outcome(
        law.name, status, law.statement, law.kind, law.catches, reason, example, known, seconds
    )


def ended(law: Law, cause: str) -> Outcome:
    """The outcome of a check that the subject did not survive."""
    example = Counterexample("", "", "an answer", "none", cause)
    return outcome(law, "failed", example=example)


def sorted_as(outcomes: Iterable[Outcome], order: Iterable[str]) -> list[Outcome]:
    """The outcomes in the order of the table of checks."""
    place = {name: at for at, name in enumerate(order)}
    return sorted(outcomes, key=lambda each: place.get(each.law, len(place)))
