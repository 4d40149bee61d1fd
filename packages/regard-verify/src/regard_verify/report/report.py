"""The report on a subject: the outcomes of the laws, what was found out, a summary and a badge."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from regard_verify.law import Counterexample, Law

Status = Literal["passed", "failed", "follows", "advice", "undecided", "defect", "not applicable"]
DECLARE = (
    "Declare with --like NAME=VALUE, with check(subject, {NAME: VALUE}), or with "
    "regard_conventions = {NAME: VALUE} in its file."
)
LETTERS = (  # of the sizes of a case
    "B rows, H query heads, G key heads, L queries, S keys, D channels of a key, V of a value."
)
Verdict = Literal["kept", "broken", "not understood", "partly judged"]
EXIT_CODES: dict[Verdict, int] = {
    "kept": 0, "broken": 1, "not understood": 2, "partly judged": 3,
}  # fmt: skip
COLOURS: dict[Verdict, str] = {  # of badges
    "kept": "brightgreen", "broken": "red", "not understood": "red", "partly judged": "yellow",
}  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """The outcome of one law.

    Attributes:
        law: the name of the law.
        status: passed, failed, follows (broken as another law is, see `because`), advice (unwise,
            but not wrong), undecided (it took too long), defect (an error of this suite, which
            says nothing about the subject) or not applicable.
        statement: the law in one sentence.
        kind: exact, bounded, statistical or resource.
        reason: why it does not apply, is undecided, or which error this suite made.
        example: the counter-example.
        seconds: how long it took.
        because: of a law that follows, the broken law that explains it.
        line: the line of the subject, as `FILE:NUMBER: CODE`, where it can be told.

    Examples:
        >>> from regard_verify import Outcome, check
        >>> def attention(q, k, v):
        ...     return (q @ k.mT / k.shape[-1] ** 0.5).softmax(-1) @ v
        >>> outcome = check(attention, only=["convexity"]).named("convexity")
        >>> isinstance(outcome, Outcome), outcome.status
        (True, 'passed')
    """

    law: str
    status: Status
    statement: str
    kind: str
    reason: str = ""
    example: Counterexample | None = None
    seconds: float = 0.0
    because: str = ""
    line: str = ""

    def sentences(self, following: Sequence[str] = ()) -> list[str]:
        """The sentences on a broken law: law, smallest case, likely mistake, the subject's line.

        Args:
            following: names of the laws that are broken because of this one.
        """
        said, example = [self.statement], self.example
        if example is not None:
            where = " at ".join(filter(None, (example.shape, example.cell)))
            compared = f"expected {example.expected}, got {example.got}"
            said += [f"{where}: {compared}" if where else compared, example.cause]
        said += [f"line {self.line}"] if self.line else []
        said += [f"follows from {self.because}"] if self.because else []
        said += [f"also broken because of it: {', '.join(following)}"] if following else []
        return [sentence for sentence in said if sentence]


@dataclass(repr=False)
class Report:
    """The outcomes of all laws for one subject.

    Attributes:
        subject: its name.
        kind: what it is.
        inferred: what was found out by probing.
        declared: its conventions, declared or found out.
        notes: remarks.
        outcomes: of all laws, in their order.
        problem: why no law could be checked, if so.
        unjudged: what could not be judged, and what to declare so that it can be: then the subject
            is partly judged.
        seed: of the random inputs.
        seconds: in total.

    Examples:
        >>> from regard_verify import Outcome, Report
        >>> report = Report("mine", outcomes=[Outcome("convexity", "passed", "", "bounded")])
        >>> report.exit_code, report.verdict
        (0, 'kept')
        >>> print(report.badge().partition("]")[0])
        ![attention: none of 1 law broken
    """

    subject: str
    kind: str = ""
    inferred: dict[str, str] = field(default_factory=dict)
    declared: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    problem: str = ""
    unjudged: str = ""
    seed: int = 0
    seconds: float = 0.0

    def having(self, status: Status) -> list[Outcome]:
        """The outcomes of this status."""
        return [each for each in self.outcomes if each.status == status]

    def named(self, law: str) -> Outcome:
        """The outcome of this law.

        Raises:
            KeyError: if the report has none.
        """
        return {each.law: each for each in self.outcomes}[law]

    @property
    def failed(self) -> list[str]:
        """Names of the laws that are broken, for a cause of their own or because another is."""
        return [each.law for each in self.outcomes if each.status in ("failed", "follows")]

    @property
    def causes(self) -> list[Outcome]:
        """The broken laws that no other broken law explains."""
        return self.having("failed")

    @property
    def advice(self) -> list[str]:
        """Names of the recommendations that are not followed."""
        return [each.law for each in self.having("advice")]

    def following(self, cause: str) -> list[str]:
        """Names of the laws that are broken because this one is."""
        return [each.law for each in self.having("follows") if each.because == cause]

    def reasons(self, status: Status) -> dict[str, list[str]]:
        """The names of the laws with this status, by the reason."""
        found: dict[str, list[str]] = {}
        for each in self.having(status):
            found.setdefault(each.reason, []).append(each.law)
        return found

    @property
    def asked(self) -> list[Outcome]:
        """The outcomes of the laws that were asked: that apply, and that this suite could check.

        Laws that took too long are among them, so that their number does not depend on how busy
        the machine was.
        """
        return [each for each in self.outcomes if each.status not in ("not applicable", "defect")]

    @property
    def verdict(self) -> Verdict:
        """In two words: a report that asked no law at all is partly judged."""
        if self.problem:
            return "not understood"
        if self.failed:
            return "broken"
        return "partly judged" if self.unjudged or not self.asked else "kept"

    @property
    def exit_code(self) -> int:
        """The exit code of the command.

        0 if all is judged and no law is broken, 1 if one is, 2 if the subject could not be
        understood, 3 if no law is broken but not all could be judged.
        """
        return EXIT_CODES[self.verdict]

    def __bool__(self) -> bool:
        return self.exit_code == 0

    def __repr__(self) -> str:
        return f"<{self.summary()}>"

    def __str__(self) -> str:
        """The report as text: what is broken, with its smallest case; the verdict last.

        Examples:
            >>> case = Counterexample("L=2", "weight of key 1", "0", "0.3", "no causal mask")
            >>> late = "causal", "failed", "No later key has weight.", "exact", "", case
            >>> print(Report("mine", outcomes=[Outcome(*late)]))
            broken causal
              No later key has weight.
              L=2 at weight of key 1: expected 0, got 0.3
              no causal mask
            <BLANKLINE>
            mine: broken, for 1 cause. 1 of 1 law was asked, 1 is broken.
        """
        parts = [
            (f"broken {each.law}", *each.sentences(self.following(each.law)))
            for each in self.causes
        ]
        if self.unjudged:
            parts.append(("Not judged", self.unjudged, DECLARE))
        return "\n\n".join(["\n  ".join(part) for part in parts] + [self.summary()])

    def summary(self) -> str:
        """One line: the verdict, and how much was judged.

        Examples:
            >>> passed = Outcome("convexity", "passed", "", "bounded")
            >>> Report("mine", outcomes=[passed]).summary()
            'mine: right as far as it was judged. 1 of 1 law was asked, none is broken.'
        """
        if self.problem:
            return f"{self.subject}: not understood. {self.problem}"
        asked, broken, causes = len(self.asked), len(self.failed), len(self.causes)
        verdict = "right as far as it was judged"
        if broken:
            verdict = f"broken, for {count_of(causes, 'cause')}"
        if self.unjudged or not asked:
            verdict = f"{verdict}, and only partly judged" if broken else "partly judged"
        laws = f"{asked} of {count_of(len(self.outcomes), 'law')} {'was' if asked == 1 else 'were'}"
        more = f"asked, {broken or 'none'} {'are' if broken > 1 else 'is'} broken"
        return f"{self.subject}: {verdict}. {laws} {more}."

    def badge(self) -> str:
        """A line of Markdown for a README; green only where the exit code is 0."""
        text, colour = self.counts(), COLOURS[self.verdict]
        name = text.replace(" ", "_")
        return f"![attention: {text}](https://img.shields.io/badge/attention-{name}-{colour})"

    def counts(self) -> str:
        """How many of the laws that were asked are broken; else the verdict."""
        if self.verdict not in ("kept", "broken"):
            return self.verdict
        return f"{len(self.failed) or 'none'} of {count_of(len(self.asked), 'law')} broken"

    def to_json(self) -> str:
        """The report as JSON; `Report.from_json` reads it."""
        derived = {
            "exit_code": self.exit_code, "verdict": self.verdict, "summary": self.summary(),
            "badge": self.badge(),
        }  # fmt: skip
        return json.dumps({**asdict(self), **derived}, indent=2, allow_nan=False, default=str)

    @staticmethod
    def from_json(text: str) -> "Report":
        """The report that `to_json` wrote."""
        whole = json.loads(text)
        whole = {name: whole[name] for name in Report.__dataclass_fields__}
        whole["outcomes"] = [outcome_from(each) for each in whole["outcomes"]]
        return Report(**whole)


def count_of(number: int, noun: str) -> str:
    """A number and a noun, in the plural where it is not 1."""
    return f"{number} {noun}{'s' * (number != 1)}"


def outcome_from(given: Mapping[str, Any]) -> Outcome:
    """An outcome from JSON."""
    example = given.get("example")
    return Outcome(**{**given, "example": Counterexample(**example) if example else None})


def outcome(
    law: Law, status: Status, *, reason: str = "", example: Counterexample | None = None
) -> Outcome:
    """The outcome of a law; a broken recommendation is advice."""
    if status == "failed" and law.advised:
        status = "advice"
    return Outcome(law.name, status, law.statement, law.kind, reason, example)
