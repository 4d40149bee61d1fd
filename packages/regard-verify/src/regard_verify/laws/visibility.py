"""Laws of visibility: which keys each query attends to."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from regard_verify.law import Broken, NotApplicable, Sizes, Trial, fail, law, require
from regard_verify.laws.cases import causal_call, random_mask, sizes_for
from regard_verify.subject.conventions import pattern_length
from regard_verify.subject.subject import Call, Subject, SubjectError
from regard_verify.visibility import differs, read_dependence


def same_visibility(
    shape: object, expected: Tensor, got: Tensor, mask: Tensor | None = None
) -> None:
    """Raise for the first row and head [L, S] whose visibility is wrong.

    `mask` is what a mask alone leaves visible: where it is all that is obeyed, that is the cause.
    """
    expected = expected.expand_as(got)
    if torch.equal(expected, got):
        return
    b, h = (int(x) for x in (expected != got).any(-1).any(-1).nonzero()[0])
    found = differs(shape, expected[b, h], got[b, h])
    if mask is not None and torch.equal(mask.expand_as(got), got):
        later = bool((expected | ~got | torch.ones_like(got).triu(1)).all())
        rule = "the causal rule" if later else "its own pattern"
        raise Broken(replace(found, cause=f"A mask switches {rule} off: only the mask is obeyed."))
    if (b, h) == (0, 0):
        raise Broken(found)
    where = f"row {b} of the batch, head {h}, {found.cell}"
    others = (expected == got[b, h]).all(-1).all(-1).nonzero()
    cause = found.cause
    if len(others):
        row, head = others[0].tolist()
        cause = f"the visible keys are those of row {row} of the batch and head {head}"
    raise Broken(replace(found, cell=where, cause=cause))


def layer_visibility(subject: Subject, label: str, x: Tensor, **options: Any) -> None:
    """Raise if the outputs of the layer depend on other tokens than pattern and mask allow."""
    length, causal = x.shape[1], bool(options.get("causal"))
    keep = options["keep"][:1, :1] if "keep" in options else torch.tensor(True)
    depends = read_dependence(partial(subject.run_layer, **options), x)[None, None]
    # An output always depends on its own token, and that of padding may depend on anything.
    free = torch.eye(length, dtype=torch.bool)
    free = free | subject.declared_padding(options.get("keep"), subject.layer_form)[:1]
    expected = subject.visible(length, length, causal=causal) & keep | free
    mask = keep | free if "keep" in options else None
    same_visibility(f"L={length}{label}", expected, depends | free, mask)


@law("exact", "heads|layer")
def causality_exact(subject: Subject, trial: Trial) -> None:
    """Changes to later tokens never change an earlier output, not even its last bit."""
    calls = []
    for batch, length in ((1, 2), (1, 3), (2, 6)):
        calls += _causal_calls(subject, trial, batch, length)
    if not calls:
        raise NotApplicable("it is not causal, and cannot be called so")
    for call in calls:
        base = call()
        for at in range(1, base.shape[-2]):
            later = {
                name: torch.cat([x[..., :at, :], 2 - x[..., at:, :]], -2)
                for name, x in call.given.items()
                if name != "q"
            }
            got, right = call(**later)[..., :at, :], base[..., :at, :]
            cause = (
                f"tokens {at} and later were changed, and an earlier output changed: it attends to "
                "the future"
            )
            require(call.label, got, right, 0.0, cause)


def _causal_calls(subject: Subject, trial: Trial, batch: int, length: int) -> list[Call]:
    found = []
    options = causal_call(subject, length, length)
    if options is None:
        return []
    if subject.attend is not None:
        sizes = subject.fit(Sizes(batch, 1, 1, length, length, 4, 4))
        heads = dict(zip("qkv", subject.inputs(sizes, trial), strict=True))
        found.append(Call(str(sizes), partial(subject.attend, **options), heads))
    if subject.layer is not None:
        x = subject.tokens(batch, length, trial)
        found.append(Call(f"B={batch} L={length}", partial(subject.layer, **options), {"x": x}))
    return found


@law("exact", "heads|layer")
def self_visible(subject: Subject, trial: Trial) -> None:
    """A query attends to its own token."""
    if subject.attend is None:
        if not subject.conventions.causal:
            raise NotApplicable("it is not causal, and its heads were not reached")
        return first_attends(subject, "causal", subject.tokens(2, 4, trial))
    sizes = subject.fit(Sizes(1, 1, 1, 5, 5, 4, 5))
    attended = subject.attended(sizes, trial, **(causal_call(subject, sizes.L, sizes.S) or {}))
    same_visibility(sizes, attended | torch.eye(sizes.L, dtype=torch.bool), attended)
    return None


def first_attends(subject: Subject, label: str, x: Tensor) -> None:
    """Raise unless the first output of a causal layer depends on its token, its only key."""
    base, got = subject.run_layer(x), subject.run_layer(2.0 - 3.0 * x)
    cause = "the causal rule hides each query's own key: the first query has none"
    if not bool(base[:, 0].isfinite().all()):
        fail(f"L={x.shape[1]}, {label}", "query 0", "finite values", "NaN", cause)
    if torch.equal(base[:, 0], got[:, 0]):
        fail(f"L={x.shape[1]}, {label}", "query 0", "another output for another token",
             "the same", cause)  # fmt: skip


@law("exact", "cross")
def alignment_probe(subject: Subject, trial: Trial) -> None:
    """Where queries and keys differ in number, the causal rule is counted from the declared
    corner.
    """
    options = subject.causal_options()
    if options is None:
        raise NotApplicable("it has no causal rule of its own")
    fewer = () if subject.module else ((7, 3),)  # a causal layer never has fewer keys than queries
    for queries, keys in ((3, 7), (1, 5), *fewer):  # one query cannot tell a corner from no rule
        sizes = subject.fit(Sizes(1, 1, 1, queries, keys, 4, keys))
        try:
            got = subject.attended(sizes, trial, **options)
        except SubjectError as error:
            subject.notes.append(f"Causal with {queries} queries and {keys} keys: {error}.")
            continue
        expected = subject.visible(sizes.L, sizes.S, **options)
        masked = ~expected.any(-1, keepdim=True)  # other laws test the output of such a query
        same_visibility(sizes, expected | masked, got | masked)


@law("exact", "heads|layer")
def visible_set_probe(subject: Subject, trial: Trial) -> None:
    """The keys with a weight above 0 are exactly those that pattern and mask leave visible."""
    longest = pattern_length(subject.conventions)
    if subject.attend is None:
        for length in (2, 3, 6, longest):
            x = subject.tokens(2, length, trial)
            layer_visibility(subject, "", x)
            if subject.has.mask:
                keep = trial.rand(1, 1, x.shape[1], x.shape[1]) < 0.6
                keep |= torch.eye(x.shape[1], dtype=torch.bool)
                layer_visibility(subject, ", a mask", x, keep=keep)
        return
    most = subject.fit(Sizes(1, 1, 1, longest, longest, 4, longest))
    for sizes in [*sizes_for(subject, trial, most=8), most]:
        visible_under(subject, sizes, trial)
        if subject.has.padding:
            keep = random_mask(subject, sizes, trial)
            visible_under(subject, sizes, trial, ", a mask", keep=keep)


def visible_under(
    subject: Subject, sizes: Sizes, trial: Trial, label: str = "", **options: Any
) -> None:
    """Raise if keys are attended to that pattern and mask hide, or the other way round."""
    visible = subject.visible(sizes.L, sizes.S, causal="causal" in options)
    keep = options.get("keep")
    free = ~visible.any(-1, keepdim=True) | subject.declared_padding(keep)
    expected = visible if keep is None else visible & keep
    attended = subject.attended(sizes, trial, **options)
    mask = None if keep is None else keep | free
    same_visibility(f"{sizes}{label}", expected | free, attended | free, mask)


@law("exact", "heads")
def window_edges(subject: Subject, trial: Trial) -> None:
    """Under a window of W, min(i + 1, W) keys are visible to query i, its own included."""
    sizes = subject.fit(Sizes(1, 1, 1, 6, 6, 4, 6))
    length = sizes.L
    if not subject.has.window or subject.module:
        if not subject.conventions.window:
            raise NotApplicable("it has no window")
        expected = subject.visible(length, length)
        return same_visibility(sizes, expected, subject.attended(sizes, trial))
    causal = subject.causal_options() or {}
    for window in (1, 2, 3, length - 1, length, length + 1):
        attended = subject.attended(sizes, trial, window=window, **causal)
        expected = subject.visible(length, length, causal=True, window=window)
        same_visibility(f"{sizes} window={window}", expected, attended)
    return None
