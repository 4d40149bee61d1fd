"""Laws of sight: who may look at whom. All are exact: a key is seen or it is not."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from regard.verify.law import (
    Broken,
    Counterexample,
    NotApplicable,
    Sizes,
    Trial,
    compare,
    fail,
    insist,
    law,
)
from regard.verify.laws.cases import (
    causal_call,
    causal_layer_call,
    sizes_for,
    some_keep,
    weights_width,
)
from regard.verify.oracle import bound
from regard.verify.subject.subject import Subject, SubjectError
from regard.verify.visibility import differs, read_sight, read_weights


def sight_of(subject: Subject, sizes: Sizes, trial: Trial, **asked: Any) -> Tensor:
    """Which key [B, H, L, S] has a weight above 0."""
    q, k, _ = subject.inputs(sizes, trial)
    call = partial(subject.run, **asked)
    return read_weights(call, q, k, width=weights_width(subject, sizes)) != 0


def same_sight(sizes: object, expected: Tensor, got: Tensor) -> Counterexample | None:
    """The first row and head whose sight is wrong."""
    expected = expected.expand_as(got)
    if torch.equal(expected, got):
        return None
    b, h = (int(x) for x in (expected != got).any(-1).any(-1).nonzero()[0])
    found = differs(sizes, expected[b, h], got[b, h])
    if found is None or (b, h) == (0, 0):
        return found
    where = f"row {b} of the batch, head {h}, {found.cell}"
    cause = _whose(expected, got[b, h]) or found.cause
    return replace(found, cell=where, cause=cause)


def _whose(expected: Tensor, got: Tensor) -> str:
    """Whether this is what another row or head should see."""
    for b in range(expected.shape[0]):
        for h in range(expected.shape[1]):
            if torch.equal(expected[b, h], got):
                return f"it sees what row {b} of the batch should see with head {h}"
    return ""


def _no_heads(subject: Subject) -> bool:
    return subject.attend is None


@law(
    "What a later token says never changes an earlier output, to the last bit.",
    "exact",
    "a look into the future: a mask upside down, off by one, or skipped",
    "heads|layer",
)
def causality_exact(subject: Subject, trial: Trial) -> None:
    asked = [
        ask(subject, trial, batch, length)
        for batch, length in ((1, 2), (1, 3), (2, 6))
        for ask in (_heads_and_future, _layer_and_future)
    ]
    if not any(asked):
        raise NotApplicable("it is not causal, and cannot be asked to be")


def _heads_and_future(subject: Subject, trial: Trial, batch: int, length: int) -> bool:
    """Whether it could be asked; raises where it sees the future."""
    asked = causal_call(subject, length, length)
    if subject.attend is None or asked is None:
        return False
    sizes = subject.fit(Sizes(batch, 1, 1, length, length, 4, 4))
    q, k, v = subject.inputs(sizes, trial)
    base = subject.run(q, k, v, **asked)
    for at in range(1, length):
        later = [torch.cat([x[:, :, :at], 2 - x[:, :, at:]], 2) for x in (k, v)]
        got = subject.run(q, *later, **asked)
        _unmoved(sizes, got[:, :, :at], base[:, :, :at], at)
    return True


def _layer_and_future(subject: Subject, trial: Trial, batch: int, length: int) -> bool:
    """The same of a layer."""
    asked = causal_layer_call(subject, length)
    if subject.layer is None or asked is None:
        return False
    x = subject.tokens(batch, length, trial)
    base = subject.through(x, **asked)
    for at in range(1, length):
        other = torch.cat([x[:, :at], 2 - x[:, at:]], 1)
        got = subject.through(other, **asked)
        _unmoved(f"B={batch} L={length}", got[:, :at], base[:, :at], at)
    return True


def _unmoved(shape: object, got: Tensor, base: Tensor, at: int) -> None:
    cause = f"tokens {at} and later were changed, and an earlier output moved: it saw the future"
    same = torch.where(base.isnan() & got.isnan(), 0.0, got - base)
    if not bool((same == 0).all()):
        insist(compare(shape, got, base, 0.0, cause))


@law(
    "A query sees its own token.",
    "exact",
    "a causal mask that excludes the diagonal",
    "heads",
)
def self_visible(subject: Subject, trial: Trial) -> None:
    sizes = subject.fit(Sizes(1, 1, 1, 5, 5, 4, 5))
    asked = causal_call(subject, sizes.L, sizes.S)
    seen = sight_of(subject, sizes, trial, **(asked or {}))
    expected = seen | torch.eye(sizes.L, dtype=torch.bool)
    insist(same_sight(sizes, expected, seen))


@law(
    "Where queries and keys differ in number, causality counts from the declared corner.",
    "exact",
    "top-left for bottom-right: a decoding step that sees only the first key",
    "cross",
)
def alignment_probe(subject: Subject, trial: Trial) -> None:
    asked: dict[str, Any] = {} if subject.conventions.causal else {"causal": True}
    if not subject.conventions.causal and ("causal" not in subject.has or subject.module):
        raise NotApplicable("it has no causal rule of its own")
    for queries, keys in ((1, 5), (3, 7), (7, 3)):
        sizes = subject.fit(Sizes(1, 1, 1, queries, keys, 4, keys))
        try:
            got = sight_of(subject, sizes, trial, **asked)
        except SubjectError as error:
            subject.notes.append(f"Causal with {queries} queries and {keys} keys: {error}.")
            continue
        expected = subject.visible(queries, keys, **asked)
        blind = ~expected.any(-1)  # what a blind query reads is another law's business
        insist(same_sight(sizes, expected | blind[:, None], got | blind[:, None]))


@law(
    "The keys with a weight are exactly those that pattern and mask show.",
    "exact",
    "any wrong mask: a window off by one, a wrong axis, one cell too many",
    "heads|layer",
)
def visible_set_probe(subject: Subject, trial: Trial) -> None:
    if _no_heads(subject):
        return _layer_sight(subject, trial)
    for sizes in sizes_for(subject, trial, most=8):
        expected = subject.visible(sizes.L, sizes.S)[None, None]
        blind = ~expected.any(-1, keepdim=True)
        insist(same_sight(sizes, expected | blind, sight_of(subject, sizes, trial) | blind))
        if subject.has & {"mask", "padding"}:
            keep = some_keep(subject, sizes, trial)
            got = sight_of(subject, sizes, trial, keep=keep)
            insist(same_sight(f"{sizes}, a mask", expected & keep | blind, got | blind))
    return None


def _layer_sight(subject: Subject, trial: Trial) -> None:
    for length in (2, 3, 6):
        x = subject.tokens(2, length, trial)
        eye = torch.eye(length, dtype=torch.bool)
        expected = subject.visible(length, length) | eye
        insist(differs(f"L={length}", expected, read_sight(subject.through, x)))
        if "mask" in subject.has:
            keep = trial.rand(1, 1, length, length) < 0.6
            keep |= eye
            got = read_sight(partial(subject.through, keep=keep), x)
            insist(differs(f"L={length}, a mask", expected & keep[0, 0] | eye, got))


@law(
    "A window of W shows min(i + 1, W) keys to query i, its own counted; none at all is refused.",
    "exact",
    "a window off by one, a window that is ignored or hides everything",
    "heads",
)
def window_edges(subject: Subject, trial: Trial) -> None:
    length = 6
    sizes = subject.fit(Sizes(1, 1, 1, length, length, 4, length))
    if "window" not in subject.has or subject.module:
        if not subject.conventions.window:
            raise NotApplicable("it has no window")
        expected = subject.visible(length, length)
        return insist(same_sight(sizes, expected, sight_of(subject, sizes, trial)))
    also = {"causal": True} if "causal" in subject.has and not subject.conventions.causal else {}
    for window in (1, 2, 3, length - 1, length, length + 1):
        seen = sight_of(subject, sizes, trial, window=window, **also)
        expected = subject.visible(length, length, causal=True, window=window)
        insist(same_sight(f"{sizes} window={window}", expected, seen))
    return None


@law(
    "Hiding one key hides that key, and only that.",
    "exact",
    "a mask read the wrong way round, a mask that is added instead of obeyed, or ignored",
    "mask|padding|unusable mask",
)
def mask_polarity(subject: Subject, trial: Trial) -> None:
    if not subject.has & {"mask", "padding"}:
        said = subject.inferred.get("mask", "")
        fail("B=1 L=4 S=4", "key 1", "hidden", "visible, or others are hidden with it", said)
    if _no_heads(subject):
        return _layer_polarity(subject, trial)
    sizes = subject.fit(Sizes(1, 1, 1, 4, 4, 4, 4))
    for key in range(1, sizes.S):
        keep = torch.ones(sizes.B, 1, sizes.L, sizes.S, dtype=torch.bool)
        keep[..., key] = False
        expected = subject.visible(sizes.L, sizes.S) & keep
        seen = sight_of(subject, sizes, trial, keep=keep)
        insist(same_sight(f"{sizes}, key {key} hidden", expected, seen))
    return None


def _layer_polarity(subject: Subject, trial: Trial) -> None:
    length = 4
    x, eye = subject.tokens(2, length, trial), torch.eye(4, dtype=torch.bool)
    for key in range(1, length):
        keep = torch.ones(1, 1, length, length, dtype=torch.bool)
        keep[..., key] = False
        expected = subject.visible(length, length) & keep[0, 0] | eye
        seen = read_sight(partial(subject.through, keep=keep), x)
        insist(differs(f"L={length}, key {key} hidden", expected, seen))


@law(
    "A mask of truth values and a mask of 0 and -inf, or of the least number, say the same.",
    "bounded",
    "conversions: a fill too small, a sum of two fills that overflows",
    "mask",
)
def mask_float_bool_agree(subject: Subject, trial: Trial) -> None:
    if _no_heads(subject) or subject.form.polarity != "additive":
        other = _also_additive(subject, trial)
    else:
        other = True
    if not other:
        raise NotApplicable("it takes one kind of mask")
    for _ in range(4):
        _same_by_numbers(subject, subject.fit(Sizes(1, 2, 2, 5, 5, 4, 4)), trial)


def _same_by_numbers(subject: Subject, sizes: Sizes, trial: Trial) -> None:
    keep = some_keep(subject, sizes, trial)
    q, k, v = subject.inputs(sizes, trial)
    k = k * 1024.0  # large scores: a hidden one must not come back
    expected = subject.judge(q, k, v, keep=keep)
    allowed = bound(expected, v, torch.float32)
    form = subject.form._replace(polarity="additive", dtype="float")
    for low in (float("-inf"), torch.finfo(torch.float32).min, -1e9):
        mask = form.encode(keep, (sizes.B, sizes.H), torch.float32)
        mask = mask.masked_fill(mask < 0, low)
        got = subject.run(q, k, v, raw=mask).double()
        cause = f"a mask of 0 and {low:g} does not hide what a mask of truth values hides"
        insist(compare(f"{sizes}, fill {low:g}", got, expected.out, allowed, cause))


def _also_additive(subject: Subject, trial: Trial) -> bool:
    """Whether a boolean function takes additive masks too: key 1 is hidden by -inf."""
    if _no_heads(subject) or "int" in (subject.form.dtype,):
        return False
    sizes = subject.fit(Sizes(1, 1, 1, 4, 4, 4, 4))
    keep = torch.ones(sizes.B, 1, 4, 4, dtype=torch.bool)
    keep[..., 1] = False
    form = subject.form._replace(polarity="additive", dtype="float")
    mask = form.encode(keep, (sizes.B, sizes.H), torch.float32)
    try:
        seen = sight_of(subject, sizes, trial, raw=mask)
    except SubjectError:
        return False
    return bool((seen == (subject.visible(4, 4) & keep)).all())


@law(
    "A mask of another type is obeyed or refused, never read as something else.",
    "exact",
    "0 and 1 added to scores, a float32 mask reinterpreted beside half queries",
    "mask|padding",
    advised=True,
)
def mask_dtype(subject: Subject, trial: Trial) -> None:
    if _no_heads(subject):
        raise NotApplicable("its heads were not reached")
    sizes = subject.fit(Sizes(1, 1, 1, 4, 4, 4, 4))
    keep = torch.ones(sizes.B, 1, sizes.L, sizes.S, dtype=torch.bool)
    keep[..., 1] = False
    mask = subject.form.encode(keep, (sizes.B, sizes.H), torch.float32)
    expected = subject.visible(sizes.L, sizes.S) & keep
    others = [torch.float64, torch.float32, torch.float16]
    if subject.form.polarity != "additive":
        others = [torch.bool, torch.uint8, torch.int64]
    for dtype in others:
        given = mask.to(dtype)
        try:
            seen = sight_of(subject, sizes, trial, raw=given)
        except SubjectError:
            continue
        try:
            insist(same_sight(f"{sizes}, a mask of {dtype}", expected, seen))
        except Broken as broken:
            said = f"a mask of {dtype} is neither obeyed nor refused. {broken.example.cause}"
            raise Broken(replace(broken.example, cause=said)) from broken


@law(
    "A mask means the same by whatever axes it is broadcast, each row of the batch its own.",
    "exact",
    "a mask on the wrong axis, tiled where it should be interleaved, a neighbour's mask",
    "mask|padding",
)
def mask_broadcast(subject: Subject, trial: Trial) -> None:
    if _no_heads(subject):
        return _layer_rows(subject, trial)
    for sizes in (Sizes(2, 2, 2, 3, 3, 4, 4), Sizes(4, 4, 4, 4, 4, 4, 4), Sizes(3, 2, 2, 5, 4, 4)):
        sizes = subject.fit(sizes)
        keep = some_keep(subject, sizes, trial)
        blind = ~subject.visible(sizes.L, sizes.S).any(-1, keepdim=True)
        expected = subject.visible(sizes.L, sizes.S) & keep
        got = sight_of(subject, sizes, trial, keep=keep)
        insist(same_sight(f"{sizes}, a mask for each row", expected | blind, got | blind))
        if subject.form.shape == "BHLS":
            each = trial.rand(sizes.B, sizes.H, sizes.L, sizes.S) < 0.6
            each |= keep
            got = sight_of(subject, sizes, trial, keep=each)
            expected = subject.visible(sizes.L, sizes.S) & each
            insist(same_sight(f"{sizes}, a mask for each head", expected | blind, got | blind))
    return None


def _layer_rows(subject: Subject, trial: Trial) -> None:
    """Each row of a batch with its own mask is as it is alone."""
    batch, length = 4, 4
    x = subject.tokens(batch, length, trial)
    keep = trial.rand(batch, 1, 1, length) < 0.6
    keep[..., 0] = True
    keep = keep.expand(-1, -1, length, -1)
    whole = subject.through(x, keep=keep).double()
    for row in range(batch):
        alone = subject.through(x[row : row + 1], keep=keep[row : row + 1]).double()
        cause = f"row {row} of the batch is not masked by its own mask"
        alone = torch.where(alone.isnan(), whole[row : row + 1], alone)
        insist(compare(f"B={batch} L={length}", whole[row : row + 1], alone, 1e-4, cause))


@law(
    "A mask and causality together hide what either hides, or are refused.",
    "exact",
    "one of the two is silently ignored",
    "heads",
)
def mask_and_causal(subject: Subject, trial: Trial) -> None:
    if not subject.has & {"mask", "padding"}:
        raise NotApplicable("it takes no mask")
    asked: dict[str, Any] = {}
    if not subject.conventions.causal:
        if "causal" not in subject.has:
            raise NotApplicable("it has no causal rule of its own")
        asked = {subject.other.get("causal", "causal") if subject.module else "causal": True}
    sizes = subject.fit(Sizes(2, 2, 2, 5, 5, 4, 5))
    keep = some_keep(subject, sizes, trial)
    keep[..., 0] = True
    expected = subject.visible(sizes.L, sizes.S, causal=True) & keep
    try:
        seen = sight_of(subject, sizes, trial, keep=keep, **asked)
    except SubjectError:
        return  # refused
    insist(same_sight(f"{sizes}, a mask and causal", expected, seen))


LAWS = (
    causality_exact,
    self_visible,
    alignment_probe,
    visible_set_probe,
    window_edges,
    mask_polarity,
    mask_float_bool_agree,
    mask_dtype,
    mask_broadcast,
    mask_and_causal,
)
