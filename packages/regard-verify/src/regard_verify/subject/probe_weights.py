"""Probing the weights of a subject: their sign, rotation, scale, and the order of the heads."""

import torch

from regard_verify.law import Sizes, Trial, worst
from regard_verify.oracle import key_heads
from regard_verify.subject.projected_heads import ProjectedHeads
from regard_verify.subject.rotation import probe_rotation
from regard_verify.subject.subject import Subject, SubjectError


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
    attend = subject.attend
    if not (isinstance(attend, ProjectedHeads) and attend.normalizes(q, k, v)):
        return False
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
