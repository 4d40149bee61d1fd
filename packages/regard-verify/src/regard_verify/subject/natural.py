"""Layouts that are usual, tried where the heads of a module cannot be found by what they change.

That is so where a mistake mixes heads or tokens. A layout is taken if the definition, or one of the
common mistakes, gives the module's own values with it: then the laws know what they judge.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from regard_verify.law import Trial
from regard_verify.mistakes import Heads, heads_of, mistakes, turned
from regard_verify.oracle import pattern
from regard_verify.subject.channels import Roles, Run
from regard_verify.subject.layouts import usual_layouts

LENGTH = 4
CLOSE = 1e-4  # of the largest value: the error of float32 against the definition in float64


class Natural(NamedTuple):
    """A usual layout with which the definition or a mistake gives the module's own values."""

    roles: Roles
    causal: bool
    pairing: str


def natural_roles(
    run: Run, parts: list[list[int]], channels: int, declared: int | None, trial: Trial
) -> Natural | None:
    """The first usual layout with which the definition or a mistake gives what `run` gives.

    Args:
        run: values of all channels [B, L, C] to merged heads [B, L, O].
        parts: the channels of each projection that attention reads.
        channels: C.
        declared: the number of heads that the module names.
    """
    values = trial.randn(1, LENGTH, channels)
    unread = torch.ones(channels, dtype=torch.bool)
    unread[[c for part in parts for c in part]] = False
    values[..., unread] = 0.0
    got = run(values).double()
    for roles in usual_layouts(parts, got.shape[-1], declared):
        found = _matching(got, values, roles)
        if found is not None:
            return found
    return None


def _matching(got: Tensor, values: Tensor, roles: Roles) -> Natural | None:
    """The layout, if the definition or a mistake gives `got` with it."""
    allowed = CLOSE * (1 + float(got.abs().max()))
    for causal, pairing, out in _outputs(values, roles):
        if out.shape[-1] != len(roles.outputs[0]):
            continue  # keys of another size, used as values
        merged = torch.zeros_like(got)
        order = [c for head in roles.outputs for c in head]
        merged[..., order] = out.transpose(1, 2).flatten(-2)
        if float((merged - got).abs().max()) <= allowed:
            return Natural(roles, causal, pairing)
    return None


def _outputs(values: Tensor, roles: Roles) -> Iterator[tuple[bool, str, Tensor]]:
    """Whether it is causal, its rotation, and the output of the definition and of each mistake."""
    q, k, v = (
        torch.stack([values[..., head] for head in part], 1)
        for part in (roles.queries, roles.keys, roles.values)
    )
    dim = q.shape[-1]
    scale = (dim + roles.others) ** -0.5
    for causal in (False, True):
        keep = pattern(LENGTH, LENGTH, causal=causal)
        for tiled in (False, True) if k.shape[1] not in (1, q.shape[1]) else (False,):
            heads = heads_of(q, k, v, keep, scale, tiled=tiled)
            for pairing in ("none", "halves", "pairs") if dim % 2 == 0 else ("none",):
                for out in _with_mistakes(heads, pairing):
                    yield causal, pairing, out


def _with_mistakes(heads: Heads, pairing: str) -> Iterator[Tensor]:
    yield turned(heads, pairing).out()
    yield from (out for _, out in mistakes(heads, pairing))
