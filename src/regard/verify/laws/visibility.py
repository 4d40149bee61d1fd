"""Laws of visibility: which keys each query attends to."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from regard.verify.law import (
    Broken,
    NotApplicable,
    Sizes,
    Trial,
    fail,
    insist,
    law,
    require,
)
from regard.verify.laws.cases import (
    FOUR,
    causal_call,
    causal_layer_call,
    needs_heads,
    random_mask,
    sizes_for,
)
from regard.verify.oracle import bound
from regard.verify.subject.subject import Call, Subject, SubjectError
from regard.verify.visibility import differs, read_dependence


def same_visibility(shape: object, expected: Tensor, got: Tensor) -> None:
    """Raise for the first row and head [L, S] whose visibility is wrong."""
    expected = expected.expand_as(got)
    if torch.equal(expected, got):
        return
    b, h = (int(x) for x in (expected != got).any(-1).any(-1).nonzero()[0])
    found = differs(shape, expected[b, h], got[b, h])
    if found is None or (b, h) == (0, 0):
        return insist(found)
    where = f"row {b} of the batch, head {h}, {found.cell}"
    others = (expected == got[b, h]).all(-1).all(-1).nonzero()
    cause = found.cause
    if len(others):
        row, head = others[0].tolist()
        cause = f"the visible keys are those of row {row} of the batch and head {head}"
    raise Broken(replace(found, cell=where, cause=cause))


def layer_visibility(subject: Subject, label: str, length: int, x: Tensor, **options: Any) -> None:
    """Raise if the outputs of the layer depend on other tokens than pattern and mask allow."""
    eye = torch.eye(length, dtype=torch.bool)  # an output always depends on its own token
    expected = subject.visible(length, length) | eye
    if "keep" in options:
        expected = expected & options["keep"][0, 0] | eye
    depends = read_dependence(partial(subject.run_layer, **options), x)
    insist(differs(f"L={length}{label}", expected, depends))


@law(
    "Changes to later tokens never change an earlier output, not even its last bit.",
    "exact",
    "attending to the future: a mask upside down, off by one, or skipped",
    "heads|layer",
)
def causality_exact(subject: Subject, trial: Trial) -> None:
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
            same = torch.where(right.isnan() & got.isnan(), 0.0, got - right)
            if not bool((same == 0).all()):
                require(call.label, got, right, 0.0, cause)


def _causal_calls(subject: Subject, trial: Trial, batch: int, length: int) -> list[Call]:
    found = []
    options = causal_call(subject, length, length)
    if subject.attend is not None and options is not None:
        sizes = subject.fit(Sizes(batch, 1, 1, length, length, 4, 4))
        heads = dict(zip("qkv", subject.inputs(sizes, trial), strict=True))
        found.append(Call(str(sizes), partial(subject.attend, **options), heads))
    options = causal_layer_call(subject, length)
    if subject.layer is not None and options is not None:
        x = subject.tokens(batch, length, trial)
        found.append(Call(f"B={batch} L={length}", partial(subject.layer, **options), {"x": x}))
    return found


@law(
    "A query attends to its own token.",
    "exact",
    "a causal mask that excludes the diagonal",
    "heads",
)
def self_visible(subject: Subject, trial: Trial) -> None:
    sizes = subject.fit(Sizes(1, 1, 1, 5, 5, 4, 5))
    attended = subject.attended(sizes, trial, **(causal_call(subject, sizes.L, sizes.S) or {}))
    same_visibility(sizes, attended | torch.eye(sizes.L, dtype=torch.bool), attended)


@law(
    "Where queries and keys differ in number, the causal rule is counted from the declared corner.",
    "exact",
    "top-left for bottom-right: a decoding step that attends to the first key only",
    "cross",
)
def alignment_probe(subject: Subject, trial: Trial) -> None:
    options = subject.causal_options()
    if options is None:
        raise NotApplicable("it has no causal rule of its own")
    for queries, keys in ((1, 5), (3, 7), (7, 3)):
        sizes = subject.fit(Sizes(1, 1, 1, queries, keys, 4, keys))
        try:
            got = subject.attended(sizes, trial, **options)
        except SubjectError as error:
            subject.notes.append(f"Causal with {queries} queries and {keys} keys: {error}.")
            continue
        expected = subject.visible(queries, keys, **options)
        masked = ~expected.any(-1, keepdim=True)  # other laws test the output of such a query
        same_visibility(sizes, expected | masked, got | masked)


@law(
    "The keys with a weight above 0 are exactly those that pattern and mask leave visible.",
    "exact",
    "any wrong mask: a window off by one, a wrong axis, one cell too many",
    "heads|layer",
)
def visible_set_probe(subject: Subject, trial: Trial) -> None:
    if subject.attend is None:
        for length in (2, 3, 6):
            x = subject.tokens(2, length, trial)
            layer_visibility(subject, "", length, x)
            if subject.has.mask:
                keep = trial.rand(1, 1, length, length) < 0.6
                keep |= torch.eye(length, dtype=torch.bool)
                layer_visibility(subject, ", a mask", length, x, keep=keep)
        return
    for sizes in sizes_for(subject, trial, most=8):
        _visible_under(subject, sizes, trial)
        if subject.has.padding:
            keep = random_mask(subject, sizes, trial)
            _visible_under(subject, sizes, trial, ", a mask", keep=keep)


def _visible_under(
    subject: Subject, sizes: Sizes, trial: Trial, label: str = "", **options: Any
) -> None:
    """Raise if keys are attended to that pattern and mask hide, or the other way round."""
    visible = subject.visible(sizes.L, sizes.S)
    masked = ~visible.any(-1, keepdim=True)
    expected = visible & options["keep"] if options else visible
    attended = subject.attended(sizes, trial, **options)
    same_visibility(f"{sizes}{label}", expected | masked, attended | masked)


@law(
    "Under a window of W, min(i + 1, W) keys are visible to query i, its own included.",
    "exact",
    "a window off by one, a window that is ignored or hides everything",
    "heads",
)
def window_edges(subject: Subject, trial: Trial) -> None:
    length = 6
    sizes = subject.fit(Sizes(1, 1, 1, length, length, 4, length))
    if not subject.has.window or subject.module:
        if not subject.conventions.window:
            raise NotApplicable("it has no window")
        return same_visibility(
            sizes, subject.visible(length, length), subject.attended(sizes, trial)
        )
    causal = subject.causal_options() or {}
    for window in (1, 2, 3, length - 1, length, length + 1):
        attended = subject.attended(sizes, trial, window=window, **causal)
        expected = subject.visible(length, length, causal=True, window=window)
        same_visibility(f"{sizes} window={window}", expected, attended)
    return None


@law(
    "Hiding one key hides that key, and only that.",
    "exact",
    "a mask read the wrong way round, added to the scores as a number, or ignored",
    "mask|padding|unusable_mask",
)
def mask_polarity(subject: Subject, trial: Trial) -> None:
    if not subject.has.padding:
        cause = subject.inferred.get("mask", "")
        fail("B=1 L=4 S=4", "key 1", "hidden", "visible, or others are hidden with it", cause)
    sizes = subject.fit(FOUR)
    x = subject.tokens(2, 4, trial) if subject.attend is None else None
    for key in range(1, sizes.S):
        keep, label = sizes.mask(key), f", key {key} hidden"
        if x is not None:
            layer_visibility(subject, label, 4, x, keep=keep)
        else:
            expected = subject.visible(sizes.L, sizes.S) & keep
            attended = subject.attended(sizes, trial, keep=keep)
            same_visibility(f"{sizes}{label}", expected, attended)


@law(
    "A boolean mask, and a mask of 0 and -inf or of 0 and the least finite value, have one effect.",
    "bounded",
    "conversions: a fill too small, a sum of two fills that overflows",
    "mask",
)
def mask_float_bool_agree(subject: Subject, trial: Trial) -> None:
    needs_heads(subject)
    if subject.form.polarity != "additive" and not _also_additive(subject, trial):
        raise NotApplicable("it takes one type of mask")
    sizes = subject.fit(Sizes(1, 2, 2, 5, 5, 4, 4))
    form = subject.form._replace(polarity="additive", dtype="float")
    for _ in range(4):
        keep = random_mask(subject, sizes, trial)
        q, k, v = subject.inputs(sizes, trial)
        k = k * 1024.0  # with large scores too small a fill does not hide
        right = subject.expected(q, k, v, keep=keep)
        allowed = bound(right, v, torch.float32)
        for low in (float("-inf"), torch.finfo(torch.float32).min, -1e9):
            mask = form.encode(keep, (sizes.B, sizes.H), torch.float32)
            mask = mask.masked_fill(mask < 0, low)
            got = subject.run(q, k, v, raw=mask).double()
            cause = f"a mask of 0 and {low:g} does not hide what a boolean mask hides"
            require(f"{sizes}, fill {low:g}", got, right.out, allowed, cause)


def _also_additive(subject: Subject, trial: Trial) -> bool:
    """Whether a function of boolean masks takes additive ones too: -inf hides key 1."""
    if subject.form.dtype == "int":
        return False
    sizes = subject.fit(FOUR)
    keep = sizes.mask(1)
    form = subject.form._replace(polarity="additive", dtype="float")
    mask = form.encode(keep, (sizes.B, sizes.H), torch.float32)
    try:
        attended = subject.attended(sizes, trial, raw=mask)
    except SubjectError:
        return False
    return bool((attended == (subject.visible(4, 4) & keep)).all())


@law(
    "A mask of another dtype is obeyed or refused, never misread.",
    "exact",
    "0 and 1 added to scores, a float32 mask reinterpreted beside half queries",
    "mask|padding",
    advised=True,
)
def mask_dtype(subject: Subject, trial: Trial) -> None:
    needs_heads(subject)
    sizes = subject.fit(FOUR)
    keep = sizes.mask(1)
    mask = subject.form.encode(keep, (sizes.B, sizes.H), torch.float32)
    expected = subject.visible(sizes.L, sizes.S) & keep
    dtypes = [torch.float64, torch.float32, torch.float16]
    if subject.form.polarity != "additive":
        dtypes = [torch.bool, torch.uint8, torch.int64]
    for dtype in dtypes:
        try:
            attended = subject.attended(sizes, trial, raw=mask.to(dtype))
        except SubjectError:
            continue
        try:
            same_visibility(f"{sizes}, a mask of {dtype}", expected, attended)
        except Broken as broken:
            cause = f"a mask of {dtype} is neither obeyed nor refused. {broken.example.cause}"
            raise Broken(replace(broken.example, cause=cause)) from broken


@law(
    "A mask means the same however it is broadcast, and each row of the batch has its own.",
    "exact",
    "a mask on the wrong axis, tiled where it should be interleaved, a neighbour's mask",
    "mask|padding",
)
def mask_broadcast(subject: Subject, trial: Trial) -> None:
    if subject.attend is None:
        return _layer_rows(subject, trial)
    for sizes in (Sizes(2, 2, 2, 3, 3, 4, 4), Sizes(4, 4, 4, 4, 4, 4, 4), Sizes(3, 2, 2, 5, 4, 4)):
        sizes = subject.fit(sizes)
        keep = random_mask(subject, sizes, trial)
        _visible_under(subject, sizes, trial, ", a mask for each row", keep=keep)
        if subject.form.shape == "BHLS":
            keep = keep | (trial.rand(sizes.B, sizes.H, sizes.L, sizes.S) < 0.6)
            _visible_under(subject, sizes, trial, ", a mask for each head", keep=keep)
    return None


def _layer_rows(subject: Subject, trial: Trial) -> None:
    """Each row of a batch, with its own mask, gives what it gives alone."""
    batch, length = 4, 4
    x = subject.tokens(batch, length, trial)
    keep = trial.rand(batch, 1, 1, length) < 0.6
    keep[..., 0] = True
    keep = keep.expand(-1, -1, length, -1)
    whole = subject.run_layer(x, keep=keep).double()
    for row in range(batch):
        one = slice(row, row + 1)
        alone = subject.run_layer(x[one], keep=keep[one]).double()
        alone = torch.where(alone.isnan(), whole[one], alone)
        cause = f"row {row} of the batch is not masked by its own mask"
        require(f"B={batch} L={length}", whole[one], alone, 1e-4, cause)


@law(
    "A mask and the causal rule together hide what either hides, or are refused.",
    "exact",
    "one of the two is silently ignored",
    "heads",
)
def mask_and_causal(subject: Subject, trial: Trial) -> None:
    if not subject.has.padding:
        raise NotApplicable("it takes no mask")
    if not subject.conventions.causal and not subject.has.causal:
        raise NotApplicable("it has no causal rule of its own")
    options = {} if subject.conventions.causal else {"causal": True}
    sizes = subject.fit(Sizes(2, 2, 2, 5, 5, 4, 5))
    keep = random_mask(subject, sizes, trial)
    keep[..., 0] = True
    expected = subject.visible(sizes.L, sizes.S, causal=True) & keep
    try:
        attended = subject.attended(sizes, trial, keep=keep, **options)
    except SubjectError:
        return  # refused
    same_visibility(f"{sizes}, a mask and causal", expected, attended)


LAWS = (
    causality_exact, self_visible, alignment_probe, visible_set_probe, window_edges,
    mask_polarity, mask_float_bool_agree, mask_dtype, mask_broadcast, mask_and_causal,
)  # fmt: skip
