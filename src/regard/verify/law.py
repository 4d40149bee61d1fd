"""What a check is: a law in a sentence, a function, and what it says when the law is broken."""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

LawKind = Literal["exact", "bounded", "statistical", "resource"]


class Sizes(NamedTuple):
    """B rows, H query and G key heads, L queries, S keys, channels D of keys and V of values."""

    B: int = 1
    H: int = 1
    G: int = 1
    L: int = 3
    S: int = 3
    D: int = 2
    V: int = 2

    def __str__(self) -> str:
        return " ".join(f"{name}={size}" for name, size in self._asdict().items())


@dataclass(frozen=True)
class Counterexample:
    """The smallest case found that breaks the law.

    Attributes:
        shape: sizes of the case, as text.
        cell: where in the output.
        expected: what the law says should be there.
        got: what was there.
        cause: the likely mistake, in words.
        expected_grid: which key each query may see, where that is the matter.
        actual_grid: which key each query does see.
    """

    shape: str
    cell: str
    expected: str
    got: str
    cause: str
    expected_grid: list[list[bool]] | None = None
    actual_grid: list[list[bool]] | None = None

    def __str__(self) -> str:
        where = f" at {self.cell}" if self.cell else ""
        return f"{self.shape}{where}: expected {self.expected}, got {self.got}. {self.cause}"


class Broken(Exception):
    """The law is broken; carries the counter-example."""

    def __init__(self, example: Counterexample) -> None:
        super().__init__(str(example))
        self.example = example


class NotApplicable(Exception):
    """The law says nothing about this subject; carries the reason."""


class Trial:
    """One run of one check: its own dice, and whether it is to be quick."""

    def __init__(self, name: str, *, seed: int = 0, quick: bool = False) -> None:
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        self.seed = int.from_bytes(digest[:6], "big")
        self.quick = quick
        self.dice = torch.Generator().manual_seed(self.seed)

    def randn(self, *shape: int, dtype: torch.dtype = torch.float32, times: float = 1.0) -> Tensor:
        """Normal numbers; the same ones in every dtype, but for rounding."""
        return (torch.randn(*shape, generator=self.dice, dtype=torch.float64) * times).to(dtype)

    def rand(self, *shape: int) -> Tensor:
        """Uniform numbers in float64."""
        return torch.rand(*shape, generator=self.dice, dtype=torch.float64)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """Integers from `low` up to but not including `high`."""
        return torch.randint(low, high, shape, generator=self.dice)

    def again(self) -> None:
        """Throw the same numbers anew."""
        self.dice.manual_seed(self.seed)


@dataclass(frozen=True)
class Law:
    """A named law, and the function that checks it on a subject.

    Attributes:
        name: the name of the function below the decorator.
        statement: the law in one sentence.
        kind: exact (bitwise, or by counting), bounded (up to rounding), statistical, or resource
            (bytes, compilations).
        catches: the mistakes it is written for.
        needs: abilities that the subject must have; each entry lists alternatives, as in
            `"heads|layer"`.
        run: raises `Broken` with a counter-example, or `NotApplicable`.
        advised: a recommendation only: a counter-example is reported as advice, not as a failure.
        quick: whether `--quick` runs it.
    """

    name: str
    statement: str
    kind: LawKind
    catches: str
    needs: tuple[str, ...]
    run: Callable[[Any, "Trial"], None] = field(repr=False)
    advised: bool = False
    quick: bool = True


UNKNOWN = "None of the usual mistakes gives these numbers."


def law(
    statement: str,
    kind: LawKind,
    catches: str,
    *needs: str,
    advised: bool = False,
    quick: bool = True,
) -> Callable[[Callable[[Any, "Trial"], None]], Law]:
    """Make the function below a `Law` of the same name."""

    def made(run: Callable[[Any, "Trial"], None]) -> Law:
        return Law(run.__name__, statement, kind, catches, needs, run, advised, quick)

    return made


def smallest(
    cases: Iterable[Sizes], broken: Callable[[Sizes], Counterexample | None]
) -> Counterexample | None:
    """The first case that breaks the law, each of its sizes then made as small as still does."""
    for sizes in cases:
        example = broken(sizes)
        if example is not None:
            return _shrunk(sizes, example, broken)
    return None


def _shrunk(
    sizes: Sizes, example: Counterexample, broken: Callable[[Sizes], Counterexample | None]
) -> Counterexample:
    first = example.cause
    for name in ("B", "S", "L", "H", "G", "V", "D"):
        for size in range(1, getattr(sizes, name)):
            trial = sizes._replace(**{name: size})
            if trial.H % trial.G:
                continue
            found = _harmless(broken, trial)
            if found is not None:
                sizes, example = trial, found
                break
    if UNKNOWN not in first:  # the smaller the case, the more mistakes look alike
        return replace(example, cause=first)
    return example


def _harmless(
    broken: Callable[[Sizes], Counterexample | None], sizes: Sizes
) -> Counterexample | None:
    """What a smaller case says; one that cannot be run says nothing."""
    try:
        return broken(sizes)
    except Exception:
        return None


def insist(example: Counterexample | None) -> None:
    """Raise if there is a counter-example."""
    if example is not None:
        raise Broken(example)


def fail(shape: Any, cell: str, expected: Any, got: Any, cause: str, **grids: Any) -> None:
    """Raise a counter-example made of these."""
    raise Broken(Counterexample(str(shape), cell, str(expected), str(got), cause, **grids))


def worst(got: Tensor, expected: Tensor) -> tuple[tuple[int, ...], float]:
    """The cell furthest off, and by how much; NaN is infinitely far."""
    error = (got.double() - expected.double()).abs()
    error = torch.where(error.isnan(), float("inf"), error)
    at = rest = int(error.argmax())
    cell: list[int] = []
    for size in error.shape[::-1]:
        rest, index = divmod(rest, size)
        cell.insert(0, index)
    return tuple(cell), float(error.flatten()[at])


def number(x: Tensor, at: tuple[int, ...]) -> str:
    """One number, in few digits."""
    return f"{float(x[at]):.6g}"


def compare(
    shape: Any, got: Tensor, expected: Tensor, allowed: float, cause: str | Mapping[str, Tensor]
) -> Counterexample | None:
    """A counter-example if `got` is further from `expected` than `allowed`.

    `cause` is a sentence, or sentences with what each would have given.
    """
    if got.shape != expected.shape:
        return Counterexample(
            str(shape), "", f"shape {list(expected.shape)}", f"shape {list(got.shape)}",
            "the output has another shape",
        )  # fmt: skip
    if got.numel() == 0:
        return None
    cell, error = worst(got, expected)
    if error <= allowed:
        return None
    said = cause if isinstance(cause, str) else _likeliest(got, cause, allowed)
    if not bool(got.isfinite().all()):
        said = f"{int((~got.isfinite()).sum())} numbers are not finite. {said}".strip()
    return Counterexample(
        str(shape), f"{list(cell)}", number(expected, cell), number(got, cell),
        f"{said} (off by {error:.2g}, rounding explains {allowed:.2g})",
    )  # fmt: skip


def _likeliest(got: Tensor, causes: Mapping[str, Tensor], allowed: float) -> str:
    for said, would in causes.items():
        if would.shape == got.shape and worst(got, would)[1] <= 4 * allowed:
            return f"{said[0].upper()}{said[1:]}: that gives these numbers."
    return UNKNOWN
