"""Laws of rotary positions: of a function (x [B, H, L, D], positions [L]), or of an attention."""

from typing import Any

import torch
from torch import Tensor

from regard.verify.law import NotApplicable, Sizes, Trial, compare, fail, insist, law
from regard.verify.laws.cases import weights_width
from regard.verify.oracle import rotated
from regard.verify.subject.subject import Subject, SubjectError, called
from regard.verify.visibility import read_weights

DIM = 8


def turn(subject: Subject, x: Tensor, positions: Tensor) -> Tensor:
    """What the subject makes of x [B, H, L, D] at these positions."""
    with torch.no_grad():
        out = called(subject.thing, x.clone(), positions.clone())
    if not isinstance(out, Tensor) or out.shape != x.shape:
        raise SubjectError("it did not give back x, turned, in its own shape")
    return out


def pairing_of(subject: Subject, trial: Trial) -> str | None:
    """Which channels move together, from one-hot channels."""
    moved = [i for i, _ in _partner(subject, 0)]
    return "pairs" if moved == [0, 1] else "halves" if moved == [0, DIM // 2] else None


def _partner(subject: Subject, channel: int) -> list[tuple[int, float]]:
    x = torch.zeros(1, 1, 2, DIM)
    x[..., channel] = 1.0
    out = turn(subject, x, torch.tensor([0, 1]))[0, 0, 1]
    return [(i, float(out[i])) for i in range(DIM) if abs(float(out[i])) > 1e-6]


@law(
    "Scores of turned queries and keys depend on the distance alone, near and far.",
    "bounded",
    "absolute positions that leak, wrong tables, values that are turned too",
    "rope|rotation",
)
def rope_relative(subject: Subject, trial: Trial) -> None:
    if subject.kind != "rope":
        return _toeplitz(subject, trial)
    q, k = (trial.randn(1, 1, 1, DIM).expand(1, 1, 6, DIM) for _ in "qk")
    base: Tensor | None = None
    for shift in (0, 1, 1_000, 100_000):
        positions = torch.arange(6) + shift
        scores = turn(subject, q, positions).double() @ turn(subject, k, positions).double().mT
        base = scores if base is None else base
        allowed = 2e-6 * (10 + shift) ** 0.75 * float(1 + base.abs().max())
        insist(compare(f"L=6, positions from {shift}", scores, base, max(allowed, 2e-5),
                       "scores depend on where, not only on how far"))  # fmt: skip
    for distance in range(1, 5):
        row = base[0, 0].diagonal(-distance) if base is not None else torch.zeros(1)
        insist(compare(f"L=6, distance {distance}", row, row[:1].expand_as(row), 1e-4,
                       "equal distances give unequal scores"))  # fmt: skip
    return None


def _toeplitz(subject: Subject, trial: Trial) -> None:
    length = 8
    sizes = subject.fit(Sizes(1, 1, 1, length, length, 8, length))
    q, k, _ = subject.inputs(sizes._replace(L=1, S=1), trial)
    q, k = q.expand(-1, -1, length, -1), k.expand(-1, -1, length, -1)
    weights = read_weights(subject.run, q, k, width=weights_width(subject, sizes)).double()
    odds = torch.log(weights[0, 0] / weights[0, 0].diagonal()[:, None])
    for distance in range(1, length - 1):
        row = odds.diagonal(-distance)
        row = row[row.isfinite()]
        if len(row) > 1:
            insist(compare(f"{sizes}, distance {distance}", row, row[:1].expand_as(row), 1e-3,
                           "equal distances give unequal scores"))  # fmt: skip


@law(
    "Channels are turned in the declared pairs: (i, i + D/2) or (2i, 2i + 1), by falling "
    "frequencies.",
    "exact",
    "halves mixed up with pairs, frequencies in another order",
    "rotation|rope",
)
def rope_layout(subject: Subject, trial: Trial) -> None:
    declared = subject.conventions.pairing
    if subject.kind != "rope":
        return  # probing matched its scores to one of the two
    found = pairing_of(subject, trial)
    if found is None or (declared not in (None, found)):
        moved = [i for i, _ in _partner(subject, 0)]
        right = {"pairs": [0, 1], "halves": [0, DIM // 2]}.get(declared or "halves")
        fail(f"D={DIM}", "channels that move with channel 0", right, moved,
             f"the pairing is {found or 'neither halves nor pairs'}")  # fmt: skip
    assert found is not None
    x, positions = trial.randn(1, 2, 5, DIM), torch.arange(5)
    theta = subject.conventions.theta
    expected = rotated(x, positions, found, theta)
    causes = {
        "it turns the other way round": rotated(x, -positions, found, theta),
        "position 0 is counted as 1": rotated(x, positions + 1, found, theta),
        f"theta is not {theta:g}": rotated(x, positions, found, 500_000.0),
    }
    insist(compare(f"L=5 D={DIM}", turn(subject, x, positions), expected, 1e-4, causes))


@law(
    "Rotation keeps lengths, and is right at positions up to a million, in half precision too.",
    "bounded",
    "tables in half precision, positions that overflow or run past a table",
    "rotation",
)
def rope_norm_and_long(subject: Subject, trial: Trial) -> None:
    pairing = pairing_of(subject, trial)
    if pairing is None:
        raise NotApplicable("its pairing is not known")
    for at in (0, 1_000, 70_000, 1_000_000):
        positions = torch.arange(at, at + 3)
        for dtype in (torch.float32, torch.bfloat16):
            _long(subject, trial, positions, dtype, pairing)


def _long(
    subject: Subject, trial: Trial, positions: Tensor, dtype: torch.dtype, pairing: str
) -> None:
    x = trial.randn(1, 1, len(positions), DIM, dtype=dtype)
    try:
        got = turn(subject, x, positions).double()
    except SubjectError:
        if int(positions.max()) > 1_000:
            return  # refused beyond its table
        raise
    at, size = int(positions[0]), float(x.double().abs().max())
    norms = [y.double().square().sum(-1).sqrt() for y in (x, got)]
    step = torch.finfo(dtype).eps
    most = 8 * step * (1 + size) + 1e-5
    insist(compare(f"positions from {at}, {dtype}", norms[1], norms[0], most,
                   "rotation changes lengths"))  # fmt: skip
    expected = rotated(x, positions, pairing, subject.conventions.theta)
    allowed = (4 * step + 2.0**-23 * (8 + at)) * (1 + size)
    insist(compare(f"positions from {at}, {dtype}", got, expected, allowed,
                   "angles are computed or kept too coarsely"))  # fmt: skip


@law(
    "Positions are not rounded under autocast.",
    "exact",
    "angles computed in half precision because autocast is on",
    "rotation",
)
def rope_autocast(subject: Subject, trial: Trial) -> None:
    x, positions = trial.randn(1, 1, 3, DIM), torch.arange(70_000, 70_003)
    try:
        base = turn(subject, x, positions)
    except SubjectError as error:
        raise NotApplicable(f"far positions are refused: {error}") from error
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got: Any = turn(subject, x, positions)
    insist(compare("positions from 70000, autocast", got.double(), base.double(), 1e-6,
                   "angles are rounded to bfloat16 under autocast"))  # fmt: skip


LAWS = (
    rope_relative,
    rope_layout,
    rope_norm_and_long,
    rope_autocast,
)
