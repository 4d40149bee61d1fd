"""Laws of order: of keys, of queries, of heads."""

from typing import Any

import torch

from regard.verify.law import (
    Counterexample,
    NotApplicable,
    Sizes,
    Trial,
    compare,
    insist,
    law,
    smallest,
)
from regard.verify.laws.cases import sizes_for, some_keep
from regard.verify.subject.subject import Subject


def _refuse_positions(subject: Subject) -> None:
    if subject.conventions.causal or subject.conventions.window:
        raise NotApplicable("it hides keys by their position")
    if subject.conventions.pairing != "none":
        raise NotApplicable("it knows positions")


@law(
    "The order of the keys does not matter, if values and mask move with them.",
    "bounded",
    "a dropped tail, positions that leak, a loop over blocks that forgets one",
    "heads",
)
def key_permutation(subject: Subject, trial: Trial) -> None:
    _refuse_positions(subject)

    def broken(sizes: Sizes) -> Counterexample | None:
        q, k, v = subject.inputs(sizes, trial)
        order = torch.randperm(sizes.S, generator=trial.dice)
        asked: dict[str, Any] = {}
        moved: dict[str, Any] = {}
        if subject.has & {"mask", "padding"}:
            keep = some_keep(subject, sizes, trial)
            asked, moved = {"keep": keep}, {"keep": keep[..., order]}
        expected = subject.run(q, k, v, **asked).double()
        got = subject.run(q, k[:, :, order], v[:, :, order], **moved).double()
        return compare(sizes, got, expected, 1e-4 * float(1 + v.abs().max()),
                       f"with keys in the order {order.tolist()} the output changes")  # fmt: skip

    insist(smallest(sizes_for(subject, trial), broken))


@law(
    "Each query is answered for itself: queries in another order give outputs in that order.",
    "bounded",
    "rows that mix, a softmax over the queries",
    "heads",
)
def query_permutation(subject: Subject, trial: Trial) -> None:
    _refuse_positions(subject)

    def broken(sizes: Sizes) -> Counterexample | None:
        q, k, v = subject.inputs(sizes, trial)
        order = torch.randperm(sizes.L, generator=trial.dice)
        expected = subject.run(q, k, v).double()[:, :, order]
        got = subject.run(q[:, :, order], k, v).double()
        cause = "what a query reads depends on the other queries"
        return compare(sizes, got, expected, 1e-4 * float(1 + v.abs().max()), cause)

    insist(smallest(sizes_for(subject, trial), broken))


@law(
    "Heads keep to themselves: heads in another order give outputs in that order.",
    "bounded",
    "heads split or merged by the wrong reshape, heads that mix",
    "several heads",
)
def head_permutation(subject: Subject, trial: Trial) -> None:
    def broken(sizes: Sizes) -> Counterexample | None:
        if sizes.G < 2 or sizes.H % sizes.G:
            return None
        q, k, v = subject.inputs(sizes, trial)
        order = torch.roll(torch.arange(sizes.G), 1)
        queries = (
            order[:, None] * (sizes.H // sizes.G) + torch.arange(sizes.H // sizes.G)
        ).flatten()
        if subject.conventions.head_order == "tiled":
            queries = torch.cat([order + start for start in range(0, sizes.H, sizes.G)])
        expected = subject.run(q, k, v)[:, queries].double()
        got = subject.run(q[:, queries], k[:, order], v[:, order]).double()
        expected = torch.where(expected.isfinite(), expected, got)
        allowed = 1e-4 * float(1 + v.abs().max())
        cause = (
            "a head's output depends on its place among the heads: they were split, merged "
            "or shared by the wrong axis"
        )
        return compare(sizes, got, expected, allowed, cause)

    if subject.sinks is not None:
        raise NotApplicable("each head has a sink of its own")
    insist(smallest(sizes_for(subject, trial), broken))


LAWS = (
    key_permutation,
    query_permutation,
    head_permutation,
)
