"""Laws of order: what happens when keys, queries or heads are permuted."""

from typing import Any

import torch

from regard_verify.law import NotApplicable, Sizes, Trial, law, require, tolerance, where_finite
from regard_verify.laws.cases import on_sizes, random_mask
from regard_verify.oracle import key_heads
from regard_verify.subject.subject import Subject


def _needs_no_positions(subject: Subject) -> None:
    own = subject.conventions
    if own.causal or own.window or own.after is not None or own.block:
        raise NotApplicable("it hides keys by their position")
    if subject.conventions.pairing != "none":
        raise NotApplicable("its scores depend on positions")


@law("bounded", "heads")
def key_permutation(subject: Subject, trial: Trial) -> None:
    """The order of the keys does not matter, if values and mask are permuted with them."""
    _needs_no_positions(subject)

    def attempt(sizes: Sizes) -> None:
        q, k, v = subject.inputs(sizes, trial)
        order = trial.permutation(sizes.S)
        options: dict[str, Any] = {}
        permuted: dict[str, Any] = {}
        if subject.has.padding:
            keep = random_mask(subject, sizes, trial)
            options, permuted = {"keep": keep}, {"keep": keep[..., order]}
        expected = subject.run(q, k, v, **options).double()
        got = subject.run(q, k[:, :, order], v[:, :, order], **permuted).double()
        cause = f"with keys in the order {order.tolist()} the output changes"
        require(sizes, got, expected, tolerance(v), cause)

    on_sizes(subject, trial, attempt)


@law("bounded", "heads")
def query_permutation(subject: Subject, trial: Trial) -> None:
    """Queries are independent of each other: permuted queries give permuted outputs."""
    _needs_no_positions(subject)

    def attempt(sizes: Sizes) -> None:
        q, k, v = subject.inputs(sizes, trial)
        order = trial.permutation(sizes.L)
        expected = subject.run(q, k, v).double()[:, :, order]
        got = subject.run(q[:, :, order], k, v).double()
        cause = "the output of a query depends on the other queries"
        require(sizes, got, expected, tolerance(v), cause)

    on_sizes(subject, trial, attempt)


@law("bounded", "several_heads")
def head_permutation(subject: Subject, trial: Trial) -> None:
    """Heads do not mix: permuted heads give permuted outputs, and no head reads another's
    values.
    """

    def attempt(sizes: Sizes) -> None:
        if sizes.G < 2 or sizes.H % sizes.G:
            return
        q, k, v = subject.inputs(sizes, trial)
        order = torch.roll(torch.arange(sizes.G), 1)
        many = sizes.H // sizes.G
        queries = (order[:, None] * many + torch.arange(many)).flatten()
        if subject.conventions.head_order == "tiled":
            queries = torch.cat([order + start for start in range(0, sizes.H, sizes.G)])
        expected = subject.run(q, k, v)[:, queries].double()
        got = subject.run(q[:, queries], k[:, order], v[:, order]).double()
        cause = (
            "the output of a head depends on its place among the heads: they were split, merged "
            "or shared by the wrong axis"
        )
        require(sizes, got, where_finite(expected, got), tolerance(v), cause)

    def apart(sizes: Sizes) -> None:
        """Other values of one key head change only the query heads that read it."""
        if sizes.G < 2 or sizes.H % sizes.G:
            return
        q, k, v = subject.inputs(sizes, trial)
        expected = subject.run(q, k, v)
        tiled = subject.conventions.head_order == "tiled"
        reads = torch.tensor(key_heads(sizes.H, sizes.G, tiled))
        for group in range(sizes.G):
            other = v.clone()
            other[:, group] = 1.0 - other[:, group]
            got, others = subject.run(q, k, other), reads != group
            cause = f"other values of key head {group} change a query head that does not read it"
            right = where_finite(expected, got)[:, others]
            require(sizes, got[:, others].double(), right.double(), tolerance(v), cause)

    # sinks, and biases by position, may be another for each head: permuted heads then differ
    by_head = subject.sinks is not None or subject.has.unknown_positions
    on_sizes(subject, trial, apart if by_head else attempt)
