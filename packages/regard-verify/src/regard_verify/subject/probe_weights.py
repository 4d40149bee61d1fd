"""Probing the weights of a subject: their sign, rotation, scale, and the order of the heads."""

from collections.abc import Iterator

import torch
from torch import Tensor

from regard_verify.law import Sizes, Trial, worst
from regard_verify.mistakes import heads_of, mistakes
from regard_verify.oracle import key_heads, rotated
from regard_verify.subject.conventions import THETA
from regard_verify.subject.reach import ProjectedHeads
from regard_verify.subject.subject import Subject, SubjectError

TOKENS = 6
EVEN = 1e-3  # of the log weights: smaller differences are rounding, not positions
CLOSE = 2e-3  # share of the differences between log weights that a rotation may leave unexplained
THETAS = (THETA, 500_000.0, 1_000_000.0, 100_000.0, 1_000.0, 100.0, 5_000_000.0)


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
        roles = getattr(subject.attend, "roles", None)  # other channels of latent attention rotate
        none = own.theta is None or (roles is not None and roles.others > 0)
        subject.conventions = own.found(pairing="none" if none else "halves")
        return
    for pairing, theta in rotations(own.theta):
        if all(_explains(pairing, theta, *row) for row in rows):
            return _found(subject, pairing, theta)
    for pairing, theta in rotations(own.theta):
        if _mistaken(subject, pairing, theta, trial):
            return _found(subject, pairing, theta)
    subject.inferred["RoPE"] = "positions change the scores in a way that is not known"
    subject.has.unknown_positions = True


def _found(subject: Subject, pairing: str, theta: float) -> None:
    subject.conventions = subject.conventions.found(pairing=pairing, theta=theta)
    subject.inferred["RoPE"] = f"{pairing}, theta {theta:g}"


def rotations(theta: float | None) -> Iterator[tuple[str, float]]:
    """The declared base first."""
    for each in dict.fromkeys((theta or THETA, *THETAS)):
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


def probe_scores(subject: Subject, trial: Trial) -> None:
    """Rotation, scale, order of the heads, and the output of a fully masked query."""
    _probe_signs(subject, trial)
    if not subject.has.negative_weights:
        probe_rotation(subject, trial)
    if subject.conventions.pairing == "none" and not subject.has.unknown_positions:
        scale = read_scale(subject, trial)
        if scale is not None:
            dim = subject.fit(Sizes(D=4)).D
            subject.inferred["scale"] = f"{scale:.6g} where 1/sqrt(D) is {dim**-0.5:.6g}"
    if subject.conventions.scale is None and _is_unscaled(subject, trial):
        subject.conventions = subject.conventions.found(scale=1.0)
        subject.inferred["scale"] = "1, of queries and keys that are normalised"
    if subject.conventions.head_order is None and subject.has.gqa:
        groups, sizes = read_head_order(subject, trial), subject.fit(Sizes(1, 6, 2))
        grouped = groups == key_heads(sizes.H, sizes.G)
        order = "neighbours share a key head" if grouped else f"reads key heads {groups}"
        subject.inferred["head order"] = order
    if subject.conventions.fully_masked is None and subject.has.padding:
        _probe_fully_masked(subject, trial)


def _probe_signs(subject: Subject, trial: Trial) -> None:
    """Whether weights are negative and have one sum, as in differential attention."""
    sizes = subject.fit(Sizes(2, 2, 2, 6, 6, 4, 6))
    q, k, _ = subject.inputs(sizes, trial, peak=3.0)
    weights = subject.read_weights(q, k).double()
    sums = weights.sum(-1)
    if float(weights.min()) < -1e-3 and float(sums.max() - sums.min()) < 1e-4:
        subject.has.negative_weights, subject.total = True, float(sums.mean())
        form = "a difference of two, as in differential attention, so that they sum to"
        subject.inferred["weights"] = f"{form} {subject.total:.4g}"


def _is_unscaled(subject: Subject, trial: Trial) -> bool:
    """Whether a module normalises queries and keys, and their scores have no scale."""
    q, k, v = subject.inputs(subject.fit(Sizes(1, 2, 2, 5, 5, 8, 8)), trial)
    if not isinstance(subject.attend, ProjectedHeads):
        return False
    one, other = (subject.run(n * q, n * k, v, bare=False) for n in (1.0, 3.0))
    if not torch.allclose(one, other, atol=1e-3):
        return False  # three times larger queries and keys change the output
    return worst(subject.run(q, k, v), subject.expected(q, k, v, scale=1.0).out)[1] < 1e-4


def learned_in_scores(subject: Subject, trial: Trial) -> list[str]:
    """The parameters of a module, beside projections and sinks, on which its output depends."""
    given = subject.inputs(subject.fit(Sizes(1, 1, 1, 3, 3, 4, 4)), trial)
    names = subject.attend.learned(*given) if isinstance(subject.attend, ProjectedHeads) else []
    return [name for name in names if not name.endswith("sinks")]


def read_scale(subject: Subject, trial: Trial, dim: int = 4) -> float | None:
    """The scale, from the odds of two keys whose scores differ by 1; None if one is hidden."""
    sizes = subject.fit(Sizes(1, 1, 1, 2, 2, dim, 2))
    q, k, _ = subject.inputs(sizes, trial)
    q, k = torch.zeros_like(q), torch.zeros_like(k)
    q[..., 0], k[:, :, 1, 0] = 1.0, 1.0
    row = subject.read_weights(q, k).double()[0, 0, 1, :2]
    if not bool((row > 0).all()):
        return None
    return float(torch.log(row[1] / row[0]))


def read_head_order(subject: Subject, trial: Trial) -> list[int]:
    """The key head that each query head reads: the values of each key head are its index."""
    sizes = subject.fit(Sizes(1, 6, 2, 3, 3, 4, 4))
    q, k, v = subject.inputs(sizes, trial)
    for group in range(sizes.G):
        v[:, group] = float(group)
    read = subject.run(q, k, v)[0, :, -1, 0]
    return [int(x) for x in read.nan_to_num(-1.0).round()]


def _probe_fully_masked(subject: Subject, trial: Trial) -> None:
    """Whether a fully masked query gives zeros, the mean of all values, or NaN."""
    sizes = subject.fit(Sizes(1, 1, 1, 3, 3, 2, 2))
    q, k, v = subject.inputs(sizes, trial)
    try:
        out = subject.run(q, k, v, keep=sizes.mask(*range(sizes.S))).double()
    except SubjectError:
        return
    mean = subject.total * v.double().mean(2, keepdim=True)[:, :1]
    if not bool(out.isfinite().all()):
        gives = "NaN"
    elif float((out[:, :1] - mean).abs().max()) < 1e-3:
        subject.conventions = subject.conventions.found(fully_masked="mean")
        gives = "the mean of all values"
    else:
        gives = "zeros"
    subject.inferred["a fully masked query"] = f"gives {gives}"
