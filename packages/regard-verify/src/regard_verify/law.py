"""A law: one sentence about attention, and a function that looks for a counter-example to it.

The functions below make counter-examples: they compare tensors, name the likely cause, and shrink
the case to the smallest that still breaks the law.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, NoReturn

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

    def mask(self, *hidden: int) -> Tensor:
        """A mask [B, 1, L, S] that hides these keys from every query; True means "may attend"."""
        keep = torch.ones(self.B, 1, self.L, self.S, dtype=torch.bool)
        keep[..., list(hidden)] = False
        return keep


@dataclass(frozen=True)
class Counterexample:
    """The smallest case found that breaks a law.

    Attributes:
        shape: the sizes and options of the case, as text.
        cell: the place in the output.
        expected: what the law requires there.
        got: what the subject returned there.
        cause: the likely mistake, in words.
        expected_grid: visibility [L, S] that the law requires, for laws of masks.
        actual_grid: visibility [L, S] that was measured.

    Examples:
        >>> from regard_verify import Counterexample
        >>> cell, cause = "[0, 0, 1, 0]", "The scores are not scaled."
        >>> print(Counterexample("L=3 S=3", cell, "0.5", "1", cause))
        L=3 S=3 at [0, 0, 1, 0]: expected 0.5, got 1. The scores are not scaled.
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
    """The law does not apply to this subject; carries the reason."""


class Trial:
    """One run of one law: its own random numbers, and whether it should be quick."""

    def __init__(self, name: str, *, seed: int = 0, quick: bool = False) -> None:
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        self.seed = int.from_bytes(digest[:6], "big")
        self.quick = quick
        self.generator = torch.Generator().manual_seed(self.seed)

    def randn(self, *shape: int, dtype: torch.dtype = torch.float32, times: float = 1.0) -> Tensor:
        """Normal values, drawn in float64: the same in every dtype, up to rounding."""
        drawn = torch.randn(*shape, generator=self.generator, dtype=torch.float64)
        return (drawn * times).to(dtype)

    def rand(self, *shape: int) -> Tensor:
        """Uniform values from 0 to 1, in float64."""
        return torch.rand(*shape, generator=self.generator, dtype=torch.float64)


LawFunction = Callable[[Any, Trial], None]


@dataclass(frozen=True)
class Law:
    """A named law, and the function that checks it on a subject.

    Attributes:
        name: the name of the function.
        statement: the law in one sentence.
        kind: exact (bitwise, or by counting), bounded (up to rounding), statistical, or resource
            (bytes, compilations).
        needs: abilities that the subject must have; an entry may list alternatives, as in
            `"heads|layer"`.
        run: raises `Broken` with a counter-example, or `NotApplicable`.
        advised: a recommendation: a counter-example is reported as advice, not as a failure.
        quick: whether `--quick` runs it.

    Examples:
        >>> from regard_verify import LAWS, Law
        >>> law = LAWS["scale_closed_form"]
        >>> isinstance(law, Law), law.name, law.kind
        (True, 'scale_closed_form', 'bounded')
    """

    name: str
    statement: str
    kind: LawKind
    needs: tuple[str, ...]
    run: LawFunction = field(repr=False)
    advised: bool = False
    quick: bool = True


def law(
    kind: LawKind, *needs: str, advised: bool = False, quick: bool = True
) -> Callable[[LawFunction], Law]:
    """A decorator: the function below becomes a `Law` of the same name.

    The first paragraph of its docstring is the law in one sentence.
    """

    def made(run: LawFunction) -> Law:
        statement = " ".join((run.__doc__ or run.__name__).split("\n\n")[0].split())
        return Law(run.__name__, statement, kind, needs, run, advised, quick)

    return made


UNKNOWN = "None of the usual mistakes gives these values."


def smallest(cases: Iterable[Sizes], attempt: Callable[[Sizes], None]) -> None:
    """Run `attempt` on each case, and raise the first counter-example, shrunk.

    Each size is then made as small as still breaks the law. The cause that was named first is kept:
    the smaller the case, the more mistakes give the same values.
    """
    for sizes in cases:
        try:
            attempt(sizes)
        except Broken as found:
            raise Broken(_shrunk(sizes, found.example, attempt)) from None


def _shrunk(
    sizes: Sizes, example: Counterexample, attempt: Callable[[Sizes], None]
) -> Counterexample:
    first = example.cause
    for name in ("B", "S", "L", "H", "G", "V", "D"):
        for size in range(1, getattr(sizes, name)):
            smaller = sizes._replace(**{name: size})
            if smaller.H % smaller.G:
                continue
            try:
                attempt(smaller)
            except Broken as found:
                sizes, example = smaller, found.example
                break
            except Exception:
                continue  # a case that cannot be run is no counter-example
    return example if UNKNOWN in first else replace(example, cause=first)


def fail(shape: Any, cell: str, expected: Any, got: Any, cause: str) -> NoReturn:
    """Raise this counter-example."""
    raise Broken(Counterexample(str(shape), cell, str(expected), str(got), cause))


def worst(got: Tensor, expected: Tensor) -> tuple[tuple[int, ...], float]:
    """The index of the largest error, and that error; NaN counts as infinite, if it is in one."""
    error = (got.double() - expected.double()).abs()
    error = torch.where(error.isnan(), float("inf"), error)
    error = torch.where(got.isnan() & expected.isnan(), 0.0, error)
    most = error.max()  # torch.unravel_index would import sympy: half a second
    return tuple((error == most).nonzero()[0].tolist()), float(most)


def tolerance(expected: Tensor, share: float = 1e-4) -> float:
    """An allowed error: `share` of one plus the largest expected value."""
    return share * float(1 + expected.abs().max())


def where_finite(expected: Tensor, got: Tensor) -> Tensor:
    """`expected`, with the entries of `got` where it is not finite: other laws report those."""
    return torch.where(expected.isfinite(), expected, got)


def require(
    shape: Any, got: Tensor, expected: Tensor, allowed: float, cause: str | Mapping[str, Tensor]
) -> None:
    """Raise a counter-example if `got` is further from `expected` than `allowed`.

    `cause` is a sentence, or a mapping from sentences to what each mistake would have given.
    """
    if got.shape != expected.shape:
        fail(shape, "", f"shape {list(expected.shape)}", f"shape {list(got.shape)}",
             "the output has another shape")  # fmt: skip
    if got.numel() == 0:
        return
    cell, error = worst(got, expected)
    if error <= allowed:
        return
    why = cause if isinstance(cause, str) else UNKNOWN
    for sentence, would in {} if isinstance(cause, str) else cause.items():
        if would.shape == got.shape and worst(got, would)[1] <= 4 * allowed:
            why = f"{sentence[0].upper()}{sentence[1:]}: that gives these values."
            break
    if not bool(got.isfinite().all()):
        why = f"{int((~got.isfinite()).sum())} values are not finite. {why}".strip()
    fail(shape, f"{list(cell)}", f"{float(expected[cell]):.6g}", f"{float(got[cell]):.6g}",
         f"{why} (off by {error:.2g}, rounding explains {allowed:.2g})")  # fmt: skip
