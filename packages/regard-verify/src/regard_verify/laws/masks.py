"""Laws of masks: what they hide, in which dtype and shape, and together with the causal rule."""

from contextlib import suppress
from dataclasses import replace
from functools import partial

import torch

from regard_verify.law import Broken, NotApplicable, Sizes, Trial, fail, law
from regard_verify.laws.cases import FOUR, random_mask, rows_alone
from regard_verify.laws.visibility import (
    first_attends,
    layer_visibility,
    same_visibility,
    visible_under,
)
from regard_verify.subject.other_masks import argument_forms, with_causal, with_form
from regard_verify.subject.subject import Call, Subject, SubjectError
from regard_verify.visibility import read_dependence


@law("exact", "mask|padding|unusable_mask")
def mask_polarity(subject: Subject, trial: Trial) -> None:
    """Hiding one key hides that key, and only that."""
    if not subject.has.padding:
        cause = subject.inferred.get("mask", "")
        fail("B=1 L=4 S=4", "key 1", "hidden", "visible, or others are hidden with it", cause)
    sizes = subject.fit(FOUR)
    x = subject.tokens(2, 4, trial) if subject.attend is None else None
    for key in range(1, sizes.S):
        keep, label = sizes.mask(key), f", key {key} hidden"
        if x is not None:
            layer_visibility(subject, label, x, keep=keep)
        else:
            visible_under(subject, sizes, trial, label, keep=keep)


@law("exact", "mask|padding", "heads", advised=True)
def mask_dtype(subject: Subject, trial: Trial) -> None:
    """A mask of another dtype is obeyed or refused, never misread."""
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
            free = subject.declared_padding(keep)
            same_visibility(f"{sizes}, a mask of {dtype}", expected | free, attended | free)
        except SubjectError:
            continue
        except Broken as broken:
            cause = f"a mask of {dtype} is neither obeyed nor refused. {broken.example.cause}"
            raise Broken(replace(broken.example, cause=cause)) from broken


@law("exact", "mask|padding")
def mask_broadcast(subject: Subject, trial: Trial) -> None:
    """A mask means the same however it is broadcast, and each row of the batch has its own."""
    if subject.attend is None:
        length = subject.length(4)
        x, keep = subject.tokens(4, length, trial), trial.rand(4, 1, 1, length) < 0.6
        form = subject.layer_form
        keep[..., 0] = True
        keep = keep[:1].expand_as(keep) if form.shape == "LS" else keep  # one for all rows
        given = {"x": x, "keep": keep.expand(-1, -1, length, -1)}
        rows = Call(f"B=4 L={length}, {form.argument}", subject.layer, given)
        return rows_alone(rows, "of the batch is not masked by its own mask")
    for sizes in (Sizes(2, 2, 2, 3, 3, 4, 4), Sizes(4, 4, 4, 4, 4, 4, 4), Sizes(3, 2, 2, 5, 4, 4)):
        sizes = subject.fit(sizes)
        keep = random_mask(subject, sizes, trial)
        visible_under(subject, sizes, trial, ", a mask for each row", keep=keep)
        call = getattr(subject.attend, "call", subject.layer)
        known = getattr(call, "heads", sizes.H) == sizes.H
        if subject.form.shape == "BHLS" and known:
            keep = keep | (trial.rand(sizes.B, sizes.H, sizes.L, sizes.S) < 0.6)
            visible_under(subject, sizes, trial, ", a mask for each head", keep=keep)
    return None


@law("exact", "heads|layer")
def mask_and_causal(subject: Subject, trial: Trial) -> None:
    """A mask and the causal rule together hide what either hides, or are refused."""
    if not subject.has.padding:
        raise NotApplicable("it takes no mask")
    if not subject.conventions.causal and not subject.has.causal:
        raise NotApplicable("it has no causal rule of its own")
    options = {} if subject.conventions.causal else {"causal": True}
    sizes = subject.fit(Sizes(2, 2, 2, 5, 5, 4, 5))
    keep = random_mask(subject, sizes, trial)
    keep[..., 0] = True
    label = ", a mask and causal"
    with suppress(SubjectError):  # refused
        if subject.attend is None:
            x = subject.tokens(2, 5, trial)
            return layer_visibility(subject, label, x, keep=keep, **options)
        return visible_under(subject, sizes, trial, label, keep=keep, **options)


@law("exact", "module")
def causal_option(subject: Subject, trial: Trial) -> None:
    """A switch for the causal rule, in its constructor or in a call, hides later keys, with a mask
    as well.
    """
    if subject.conventions.causal:
        raise NotApplicable("it is causal without a switch")
    switched = list(with_causal(subject))
    if not switched:
        raise NotApplicable("it has no switch for the causal rule that could be turned on")
    x = subject.tokens(2, 5, trial)
    sizes = Sizes(B=2, L=x.shape[1], S=x.shape[1])
    for label, other in switched:
        layer_visibility(other, f", {label}", x)
        first_attends(other, label, x)
        if other.has.padding:
            keep = random_mask(replace(other, form=other.layer_form), sizes, trial)
            with suppress(SubjectError):  # a mask may be refused
                layer_visibility(other, f", {label}, a mask", x, keep=keep)


@law("exact", "mask|padding|unusable_mask")
def every_mask_argument(subject: Subject, trial: Trial) -> None:
    """Every argument that is documented as a mask hides keys, and two together hide what either
    hides.
    """
    found = argument_forms(subject)
    if len(found) < 2:
        raise NotApplicable("it has one mask argument, which other laws check")
    for name, form in found.items():
        if form is None:
            cause = f"no form of {name} hides a key and nothing else: documented masks are accepted"
            fail("B=2 L=4", f"a mask given as {name}", "key 1 hidden", "otherwise", cause)
    usable = [form for form in found.values() if form is not None]
    for form in usable[1:]:  # the other laws are asked with the first
        mask_broadcast.run(with_form(subject, form, {}), trial)
    first, sizes = usable[0], subject.fit(Sizes(2, 2, 2, 4, 4, 4, 4))
    one, other = sizes.mask(1), sizes.mask(2)
    for second in usable[1:]:
        both = with_form(subject, first, {second: other})
        label = f", key 1 hidden by {first.argument}, key 2 by {second.argument}"
        try:
            if subject.attend is None or subject.module is not None:
                x, mask = subject.tokens(2, 4, trial), (one & other)[:1]
                free = torch.eye(4).bool() | ~mask.diagonal(dim1=-2, dim2=-1)[..., None]
                depends = read_dependence(partial(both.run_layer, keep=one), x)[None, None] | free
                expected = both.visible(4, 4) & mask | free
                same_visibility(f"L=4{label}", expected, depends, mask | free)
                continue
            attended = both.attended(sizes, trial, keep=one)
        except SubjectError:
            continue  # both together are refused
        expected = subject.visible(sizes.L, sizes.S) & one & other
        same_visibility(f"{sizes}{label}", expected, attended, one & other)
