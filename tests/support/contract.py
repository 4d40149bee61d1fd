"""Outputs against the definition, within the numeric contract; the worst error is recorded."""

import torch

from cases import Case, bound
from session import worst


def assert_within(judged_error: float, allowed: float, case: Case, what: str) -> None:
    """The error is no more than the contract allows; the worst share is recorded."""
    kind = f"{what} {str(case.q.dtype).removeprefix('torch.')}"
    share = judged_error / allowed if allowed else float(judged_error > 0)
    worst[kind] = max(worst.get(kind, 0.0), share)
    assert judged_error <= allowed, f"{what}: {share:.2f} times the bound\n{case}"


def compare(out: torch.Tensor, case: Case, *, what: str, sinks: bool = True) -> None:
    """`out` is the output of the loops, within the contract."""
    judged = case.judge(sinks=sinks)
    expected = torch.tensor(judged.out, dtype=torch.float64).reshape(out.shape)
    assert torch.isfinite(out).all(), f"{what}: not finite\n{case}"
    error = (out.double() - expected).abs().max().item()
    vmax = case.v.double().abs().max().item()
    assert_within(error, bound(case.q.dtype, vmax, judged.largest), case, what)
