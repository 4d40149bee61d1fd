"""Laws of rotary positions, of a function (x [B, H, L, D], positions [L])."""

import torch
from torch import Tensor

from regard_verify.law import NotApplicable, Trial, fail, law, require
from regard_verify.oracle import rotated
from regard_verify.subject.subject import Subject, SubjectError, called

DIM = 8


def rotate(subject: Subject, x: Tensor, positions: Tensor) -> Tensor:
    """x [B, H, L, D], rotated by the subject."""
    with torch.no_grad():
        out = called(subject.thing, x.clone(), positions.clone())
    if not isinstance(out, Tensor) or out.shape != x.shape:
        raise SubjectError("it returned no tensor of the shape of x")
    return out


def _mixed_with_channel_0(subject: Subject) -> list[int]:
    """The channels that a vector with channel 0 alone has after rotation."""
    x = torch.zeros(1, 1, 2, DIM)
    x[..., 0] = 1.0
    out = rotate(subject, x, torch.tensor([0, 1]))[0, 0, 1]
    return [i for i in range(DIM) if abs(float(out[i])) > 1e-6]


PAIRINGS = {"pairs": [0, 1], "halves": [0, DIM // 2]}  # what channel 0 is mixed with


def pairing_of(subject: Subject) -> str | None:
    """The pairing of the rotated channels, a key of `PAIRINGS`; None for another."""
    channels = _mixed_with_channel_0(subject)
    return next((name for name, found in PAIRINGS.items() if found == channels), None)


@law("exact", "rotation")
def rope_layout(subject: Subject, trial: Trial) -> None:
    """Channels are rotated in the declared pairs, (i, i + D/2) or (2i, 2i + 1), by decreasing
    frequencies.
    """
    declared = subject.conventions.pairing
    if subject.kind != "rope":
        return  # probing has matched its scores to one of the two
    found = pairing_of(subject)
    if found is None or (declared not in (None, found)):
        right = PAIRINGS.get(declared or "halves")
        channels = _mixed_with_channel_0(subject)
        fail(f"D={DIM}", "channels that are rotated with channel 0", right, channels,
             f"the pairing is {found or 'neither halves nor pairs'}")  # fmt: skip
    x, positions = trial.randn(1, 2, 5, DIM), torch.arange(5)
    theta = subject.conventions.theta
    expected = rotated(x, positions, found, theta)
    causes = {
        "it rotates in the other direction": rotated(x, -positions, found, theta),
        "position 0 is counted as 1": rotated(x, positions + 1, found, theta),
        f"theta is not {theta:g}": rotated(x, positions, found, 500_000.0),
    }
    require(f"L=5 D={DIM}", rotate(subject, x, positions), expected, 1e-4, causes)


@law("bounded", "rotation")
def rope_norm_and_long(subject: Subject, trial: Trial) -> None:
    """Rotation keeps norms, and is right at positions up to a million, in half precision too."""
    pairing = pairing_of(subject)
    if pairing is None:
        raise NotApplicable("its pairing is not known")
    for at in (0, 1_000, 70_000, 1_000_000):
        positions = torch.arange(at, at + 3)
        for dtype in (torch.float32, torch.bfloat16):
            x = trial.randn(1, 1, 3, DIM, dtype=dtype)
            try:
                got = rotate(subject, x, positions).double()
            except SubjectError:
                if at >= 1_000:
                    continue  # refused beyond its table
                raise
            label = f"positions from {at}, {dtype}"
            size, step = float(x.double().abs().max()), torch.finfo(dtype).eps
            norms = [y.double().square().sum(-1).sqrt() for y in (x, got)]
            allowed = 8 * step * (1 + size) + 1e-5
            require(label, norms[1], norms[0], allowed, "rotation changes lengths")
            expected = rotated(x, positions, pairing, subject.conventions.theta)
            allowed = (4 * step + 2.0**-23 * (8 + at)) * (1 + size)
            cause = "angles are computed or stored with too little precision"
            require(label, got, expected, allowed, cause)


@law("exact", "rotation")
def rope_autocast(subject: Subject, trial: Trial) -> None:
    """Positions are not rounded under autocast."""
    x, positions = trial.randn(1, 1, 3, DIM), torch.arange(70_000, 70_003)
    try:
        base = rotate(subject, x, positions)
    except SubjectError as error:
        raise NotApplicable(f"large positions are refused: {error}") from error
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = rotate(subject, x, positions)
    cause = "angles are rounded to bfloat16 under autocast"
    require("positions from 70000, autocast", got.double(), base.double(), 1e-6, cause)
