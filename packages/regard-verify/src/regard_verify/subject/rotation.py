"""Finding out whether positions change the scores, and by which rotation (RoPE, arXiv:2104.09864).

Every query is one vector and every key another, so that only positions tell the weights apart. The
logarithms of the weights are then the scores up to a constant; a rotation is found whatever the
scale is, so that a wrong scale is still reported as one.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from regard_verify.law import Sizes, Trial, worst
from regard_verify.mistakes import heads_of, mistakes
from regard_verify.oracle import rotated
from regard_verify.subject.subject import Subject, SubjectError

TOKENS = 6
EVEN = 1e-3  # of the log weights: smaller differences are rounding, not positions
CLOSE = 2e-3  # share of the differences between log weights that a rotation may leave unexplained
THETAS = (10_000.0, 500_000.0, 1_000_000.0, 100_000.0, 1_000.0, 100.0, 5_000_000.0)


def probe_rotation(subject: Subject, trial: Trial) -> None:
    """Whether positions change the scores, and which channels are rotated together."""
    own = subject.conventions
    if own.pairing is not None:
        return
    try:
        rows = [_log_weights(subject, trial) for _ in range(2)]
        turning = _queries_turn(subject, trial)
    except SubjectError:
        return
    if not turning and all(_spread(scores) < EVEN for _, _, scores in rows):
        subject.conventions = own.found(pairing="none")
        return
    for pairing, theta in _rotations(own.theta):
        if all(_explains(pairing, theta, *row) for row in rows):
            return _found(subject, pairing, theta)
    for pairing, theta in _rotations(own.theta):
        if _mistaken(subject, pairing, theta, trial):
            return _found(subject, pairing, theta)
    subject.inferred["RoPE"] = "positions change the scores in a way that is not known"
    subject.has.unknown_positions = True


def _found(subject: Subject, pairing: str, theta: float) -> None:
    subject.conventions = replace(subject.conventions.found(pairing=pairing), theta=theta)
    subject.inferred["RoPE"] = f"{pairing}, theta {theta:g}"


def _rotations(theta: float) -> Iterator[tuple[str, float]]:
    """The declared base first."""
    for each in dict.fromkeys((theta, *THETAS)):
        for pairing in ("halves", "pairs"):
            yield pairing, each


def _log_weights(subject: Subject, trial: Trial) -> tuple[Tensor, Tensor, Tensor]:
    """The query, the key [D], and the log weights of the last query, NaN where a key is hidden.

    They are the same in all heads, so that heads in the wrong order change nothing.
    """
    sizes = subject.fit(Sizes(1, 1, 1, TOKENS, TOKENS, 8, TOKENS))
    q, k, _ = (x[:, :1] for x in subject.inputs(sizes._replace(L=1, S=1), trial, peak=2.0))
    tokens = (q.expand(-1, sizes.H, sizes.L, -1), k.expand(-1, sizes.G, sizes.S, -1))
    row = subject.read_weights(*tokens).double()[0, 0, -1]
    return q[0, 0, 0], k[0, 0, 0], torch.where(row > 0, row.log(), float("nan"))


def _queries_turn(subject: Subject, trial: Trial) -> bool:
    """Whether one query, at each token, has other odds of the same two keys."""
    sizes = subject.fit(Sizes(1, 1, 1, TOKENS, TOKENS, 8, TOKENS))
    q, k, _ = subject.inputs(sizes, trial)
    weights = subject.read_weights(q[:, :, :1].expand(-1, -1, sizes.L, -1), k).double()[0, 0]
    both = weights[(weights[:, :2] > 0).all(-1), :2].log()
    return len(both) > 1 and _spread(both[:, 0] - both[:, 1]) > EVEN


def _spread(scores: Tensor) -> float:
    seen = scores[~scores.isnan()]
    return float(seen.max() - seen.min()) if len(seen) else 0.0


def _explains(pairing: str, theta: float, q: Tensor, k: Tensor, scores: Tensor) -> bool:
    """Whether the log weights are a constant plus a positive multiple of the rotated products."""
    if len(q) % 2:
        return False
    positions = torch.arange(len(scores))
    queries = rotated(q.expand(1, 1, len(scores), -1), positions, pairing, theta)[0, 0, -1]
    keys = rotated(k.expand(1, 1, len(scores), -1), positions, pairing, theta)[0, 0]
    seen = ~scores.isnan()
    products = (keys @ queries)[seen]
    products, given = products - products.mean(), scores[seen] - scores[seen].mean()
    if len(given) < 3 or _spread(scores) < EVEN:
        return False  # of rounding alone, a multiple of anything may explain it
    factor = float((products @ given) / (products @ products).clamp(min=1e-30))
    rest = float((given - factor * products).abs().max())
    return factor > 0 and rest < CLOSE * float(given.abs().max()) + 1e-6


def _mistaken(subject: Subject, pairing: str, theta: float, trial: Trial) -> bool:
    """Whether a mistake of rotation gives the values of the subject."""
    sizes = subject.fit(Sizes(1, 2, 2, TOKENS, TOKENS, 8, 8))
    if sizes.D % 2 or sizes.D != sizes.V:
        return False
    q, k, v = subject.inputs(sizes, trial)
    try:
        out = subject.run(q, k, v).double()
    except SubjectError:
        return False
    own = subject.conventions
    scale = sizes.D**-0.5 if own.scale is None else own.scale
    plain = heads_of(q, k, v, subject.visible(sizes.L, sizes.S), scale)
    return any(worst(out, would)[1] < 1e-4 for _, would in mistakes(plain, pairing, theta))
