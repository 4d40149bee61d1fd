"""The report on a subject: the outcomes of the laws, what was found out, a summary and a badge."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from regard.verify.law import Counterexample, Law

Status = Literal["passed", "failed", "advice", "not applicable"]
NOT_UNDERSTOOD = 2


@dataclass(frozen=True)
class Outcome:
    """The outcome of one law.

    Attributes:
        law: the name of the law.
        status: passed, failed, advice (unwise, but not wrong) or not applicable.
        statement: the law in one sentence.
        kind: exact, bounded, statistical or resource.
        catches: the mistakes that break it.
        reason: why it does not apply.
        example: the counter-example.
        known: where the same defect is reported.
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
    """Which keys each query attends to [L, S]: expected and measured."""

    title: str
    expected: list[list[bool]]
    actual: list[list[bool]]


@dataclass
class Report:
    """The outcomes of all laws for one subject.

    Attributes:
        subject: its name.
        kind: what it is.
        inferred: what was found out by probing.
        declared: its conventions, declared or found out.
        notes: remarks.
        outcomes: of all laws, in their order.
        pictures: of the visible keys.
        problem: why no law could be checked, if so.
        seed: of the random inputs.
        seconds: in total.

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
        """Names of the recommendations that are not followed."""
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
        advice = len(self.advice)
        parts = [f"{passed} law{'s' * (passed != 1)} kept", f"{failed} broken"]
        if advice:
            parts.append(f"{advice} piece{'s' * (advice != 1)} of advice")
        parts.append(f"{len(self.having('not applicable'))} not applicable")
        return f"{self.subject}: {', '.join(parts)}"

    def badge(self) -> str:
        """A line of Markdown for a README."""
        passed = len(self.having("passed"))
        applied = passed + len(self.failed)
        colour = "red" if self.failed or self.problem else "brightgreen"
        text = f"{passed} of {applied} laws" if not self.problem else "not understood"
        name = text.replace(" ", "_")
        return f"![attention: {text}](https://img.shields.io/badge/attention-{name}-{colour})"

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
    """The outcome of a law; a broken recommendation is advice."""
    if status == "failed" and law.advised:
        status = "advice"
    return Outcome(
        law.name, status, law.statement, law.kind, law.catches, reason, example, known, seconds
    )


def ended(law: Law, cause: str) -> Outcome:
    """The outcome of a law during which the subject ended its process."""
    example = Counterexample("", "", "an output", "none", cause)
    return outcome(law, "failed", example=example)
