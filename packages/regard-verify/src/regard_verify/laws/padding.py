"""Laws of fully masked queries, of padding, and of rows of the batch."""

from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from regard_verify.law import NotApplicable, Sizes, Trial, fail, law, require, tolerance
from regard_verify.laws.cases import FOUR, random_mask, rows_alone
from regard_verify.oracle import pattern
from regard_verify.subject.subject import Call, Subject, SubjectError, called

SOME = Sizes(2, 2, 2, 3, 3, 4, 4)


def _masking_queries(subject: Subject, sizes: Sizes) -> tuple[Tensor, Tensor]:
    """A mask that fully masks some queries, and which [B, 1, L, 1] are fully masked."""
    keep = sizes.mask()
    if subject.form.shape in ("BS", "B11S"):
        keep[0] = False
    else:
        keep[..., 1, :] = False
    visible = subject.visible(sizes.L, sizes.S)[None, None] & keep
    return keep, ~visible.any(-1, keepdim=True)


@law("exact", "mask|padding")
def fully_masked_forward(subject: Subject, trial: Trial) -> None:
    """A fully masked query gives the declared output, by default zeros, and changes no other
    output.
    """
    if subject.attend is None:
        return _fully_masked_row(subject, trial)
    for sizes in dict.fromkeys(subject.fit(each) for each in (SOME, SOME._replace(H=4, G=1))):
        q, k, v = subject.inputs(sizes, trial)
        keep, masked = _masking_queries(subject, sizes)
        out = subject.run(q, k, v, keep=keep)
        shape, masked = f"{sizes}, query 1 fully masked", masked.expand_as(out)
        if not bool(out[masked].isfinite().all()):
            fail(shape, "query 1", "zeros", "NaN", "a softmax over nothing divides 0 by 0")
        right = subject.expected(q, k, v, keep=keep).out
        cause = f"a fully masked query must give {subject.conventions.fully_masked or 'zeros'}"
        if not subject.conventions.block:  # whose mean may be that of the block and of its padding
            require(shape, out.double(), torch.where(masked, right, out.double()), 1e-4, cause)
        base = torch.where(masked, out, subject.run(q, k, v))
        require(shape, out, base, 1e-5, "a fully masked query changed another query's output")
    return None


def _fully_masked_row(subject: Subject, trial: Trial) -> None:
    x = subject.tokens(2, 4, trial)
    keep = torch.ones(2, 1, x.shape[1], x.shape[1], dtype=torch.bool)
    keep[0] = False
    out, shape = subject.run_layer(x, keep=keep), "B=2 L=4, row 0 fully masked"
    if not bool(out.isfinite().all()):
        fail(shape, "row 0", "finite values", "NaN", "a softmax over nothing divides 0 by 0")
    cause = "a fully masked row changed another row"
    require(shape, out[1:], subject.run_layer(x)[1:], 1e-5, cause)


@law("exact", "mask|padding", "heads")
def fully_masked_backward(subject: Subject, trial: Trial) -> None:
    """With a fully masked query all gradients are finite, and that query's gradient is 0."""
    sizes = subject.fit(SOME)
    keep, masked = _masking_queries(subject, sizes)
    given = [x.requires_grad_() for x in subject.inputs(sizes, trial)]
    out = subject.attend(*given, keep=keep)
    if not out.requires_grad:
        raise NotApplicable("its output has no gradient")
    called(out.square().sum().backward)
    shape = f"{sizes}, query 1 fully masked"
    for name, x in zip("qkv", given, strict=True):
        if x.grad is not None and not bool(x.grad.isfinite().all()):
            bad = f"{int((~x.grad.isfinite()).sum())} NaN or infinite"
            cause = "0 times NaN in the backward pass of the softmax"
            fail(shape, f"d{name}", "finite values", bad, cause)
    zeros = subject.conventions.fully_masked != "mean" and subject.sinks is None
    if zeros and given[0].grad is not None:
        found = torch.where(masked, given[0].grad, 0.0)
        cause = "a fully masked query has a gradient"
        require(shape, found, torch.zeros_like(found), 0.0, cause)


@law("exact", "mask|padding", "heads", advised=True)
def masked_poison(subject: Subject, trial: Trial) -> None:
    """NaN or infinity in a key or value that is hidden from all queries has no effect."""
    sizes = subject.fit(FOUR)
    keep = sizes.mask(2)
    q, k, v = subject.inputs(sizes, trial)
    base = subject.run(q, k, v, keep=keep)
    for name, value in (("value", float("nan")), ("value", float("inf")), ("key", float("nan"))):
        keys, values = k.clone(), v.clone()
        (keys if name == "key" else values)[:, :, 2] = value
        got = subject.run(q, keys, values, keep=keep)
        cause = "a weight of 0 was multiplied by it"
        require(f"{sizes}, {name} 2 hidden and {value}", got, base, 0.0, cause)


@law("exact", "mask|padding")
def padding_content(subject: Subject, trial: Trial) -> None:
    """The content of padded tokens changes nothing, not even the last bit."""
    for length in map(subject.length, (3, 6)):
        real = length - 1 - length // 4
        keep = (torch.arange(length) < real).expand(2, 1, length, length)
        if subject.attend is not None:
            sizes = subject.fit(Sizes(2, 2, 2, length, length, 4, 4))
            q, k, v = subject.inputs(sizes, trial)
            base = subject.run(q, k, v, keep=keep[: sizes.B])
            others = [torch.cat([x[:, :, :real], x[:, :, real:] * 50 + 9], 2) for x in (k, v)]
            _unchanged(sizes, subject.run(q, *others, keep=keep[: sizes.B]), base)
        if subject.layer is not None:
            x = subject.tokens(2, length, trial)
            base = subject.run_layer(x, keep=keep)[:, :real]
            other = torch.cat([x[:, :real], x[:, real:] * 3 + 9], 1)
            got = subject.run_layer(other, keep=keep)[:, :real]
            _unchanged(f"B=2 L={length}", got, base)
    if subject.stepper is not None:
        x, steps = subject.tokens(2, 6, trial), replace(subject.stepper, hidden=1)
        other = torch.cat([x[:, :1], x[:, 1:2] * 3 + 9, x[:, 2:]], 1)
        with suppress(SubjectError):  # such a layer may take no mask in its steps
            outs = [steps.pieces(each, [4, 1, 1])[0][:, 2:] for each in (other, x)]
            _unchanged("B=2, 4 tokens and 2 steps, token 1", *outs)


def _unchanged(shape: object, got: Tensor, base: Tensor) -> None:
    cause = "the content of padded, hidden tokens reached the output"
    require(f"{shape}, padded", got, base, 0.0, cause)


@law("bounded", "layer")
def padding_side(subject: Subject, trial: Trial) -> None:
    """A sequence gives the same whether it is padded on the left, on the right, or not at all."""
    if not subject.has.padding:
        raise NotApplicable("it takes no mask")
    if subject.has.unknown_positions:
        raise NotApplicable("its positions may be absolute, and padding shifts those")
    if subject.conventions.block:
        raise NotApplicable("padding on the left moves tokens to other blocks")
    real = subject.length(4)
    pad = subject.length(real + 3) - real
    x = subject.tokens(1, real, trial)
    causal = subject.causal_options() or {}
    if not subject.conventions.causal and subject.has.mask:
        causal = {"keep": pattern(real, real, causal=True)[None, None]}
    alone = subject.run_layer(x, **causal).double()
    filler = subject.tokens(1, pad, trial)
    for side in ("right", "left"):
        whole = torch.cat([x, filler] if side == "right" else [filler, x], 1)
        first = 0 if side == "right" else pad
        token = torch.arange(real + pad)
        keep = ((token >= first) & (token < first + real)).expand(1, 1, real + pad, real + pad)
        if "keep" in causal:
            keep = keep & subject.visible(real + pad, real + pad, causal=True)
        got = subject.run_layer(whole, **{**causal, "keep": keep})
        got = got[:, first : first + real].double()
        cause = f"padding on the {side} shifts positions, or is attended to"
        if bool(((got == 0).all(-1) & (alone != 0).any(-1)).any()):
            cause = "the outputs of real tokens are 0 under the mask"
        require(f"L={real} and {pad} of padding", got, alone, tolerance(alone, 1e-3), cause)


@law("bounded", "documents")
def documents_apart(subject: Subject, trial: Trial) -> None:
    """Documents that are packed in one row give the outputs that each document gives alone."""
    lengths = [subject.length(each) for each in (3, 4)]
    ids = torch.repeat_interleave(torch.arange(2), torch.tensor(lengths))[None]
    given = ids
    if subject.layer.names["documents"].startswith("cu_"):
        given = torch.tensor([0, lengths[0], sum(lengths)], dtype=torch.int32)
    x = subject.tokens(1, sum(lengths), trial)
    got = subject.run_layer(x, documents=given)
    expected = torch.cat([subject.run_layer(x[:, ids[0] == each]) for each in (0, 1)], 1)
    label = f"B=1, documents of {lengths[0]} and {lengths[1]} tokens"
    cause = "a document attends to another one that is packed with it, or its positions go on"
    require(label, got, expected, tolerance(expected, 1e-3), cause)


@law("exact", "heads|layer")
def batch_invariance(subject: Subject, trial: Trial) -> None:
    """A row of the batch gives the output that it gives alone, beside any other rows, in any
    order.
    """
    for sizes in (SOME, Sizes(3, 4, 4, 5, 5, 4, 4)):  # a layer may have places for 4 rows
        if subject.fixed.get("B") == 1:
            raise NotApplicable("it has no batch")
        for call in subject.calls(sizes, trial):
            _independent_rows(call)
        if subject.attend is not None and subject.has.padding:
            fitted = subject.fit(sizes)
            keep = random_mask(subject, fitted, trial)
            heads = dict(zip("qkv", subject.inputs(fitted, trial), strict=True))
            label = f"{fitted}, each row its own mask"
            call = Call(label, subject.attend, {**heads, "keep": keep})
            rows_alone(call, "is masked by another row's mask")


def _independent_rows(call: Call) -> None:
    base, label = call(), call.label
    others = {n: torch.cat([x[:1], x[1:] * 3 - 1]) for n, x in call.given.items()}
    cause = "the content of another row of the batch changed this one"
    require(label, call(**others)[:1], base[:1], 0.0, cause)
    flipped = call(**{n: x.flip(0).contiguous() for n, x in call.given.items()}).flip(0)
    allowed = tolerance(torch.nan_to_num(base))
    require(label, flipped, base, allowed, "the order of the batch's rows matters")
    for row in range(base.shape[0]):
        one = slice(row, row + 1)
        alone = call(**{n: x[one] for n, x in call.given.items()})
        require(label, base[one], alone, allowed, f"row {row} gives something else alone")
