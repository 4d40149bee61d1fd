"""Functions of (q, k, v) with one fault each."""

from functools import partial

import torch
import torch.nn.functional as F

from mutants import good
from mutants.good import INF, LIKE, with_steps
from mutants.table import Mutant


def mutant(name, *kills, after="", slow=False, like=LIKE, **steps):
    """`after` is where it was found, or the last step."""
    if callable(after):
        steps, after = {**steps, "after": after}, ""
    return Mutant(name, partial(with_steps, **steps), like, kills, after, slow)


def made(name, function, *kills, after="", like=LIKE, slow=False):
    return Mutant(name, lambda: function, like, kills, after, slow)


GOOD = good.Steps().function()


def keep_of(change):
    """A visible set that is changed afterwards, for the mask, the causal rule and the window."""

    def visible(mask, rows, columns, is_causal, size):
        keep = good.visible(mask, rows, columns, is_causal, size)
        return change(keep, mask, rows, columns, is_causal, size)

    return visible


def rule(causal=good.causal, window=good.window, mask=lambda m: m):
    """A visible set of other rules."""

    def visible(given, rows, columns, is_causal, size):
        keep = torch.ones(rows, columns, dtype=torch.bool)
        keep = keep & causal(rows, columns) if is_causal else keep
        keep = keep & window(rows, columns, size) if size is not None else keep
        return keep & mask(given) if given is not None and given.dtype == torch.bool else keep

    return visible


def shifted(by, top=False):
    def causal(rows, columns):
        i = torch.arange(rows)[:, None] + (0 if top else columns - rows)
        return torch.arange(columns)[None] <= i + by

    return causal


def uncleaned(x, keep):
    return x


def filled(value):
    """A fill that is a number, and a softmax that knows nothing of masks."""
    return lambda x, keep: x.masked_fill(~keep, value).softmax(-1)


def plain_softmax(x, keep):
    return x.masked_fill(~keep, -INF).softmax(-1)


def added(x, keep):
    """-inf added, which its gradient does not stop at."""
    return (x + torch.zeros_like(x).masked_fill(~keep, -INF)).softmax(-1)


def no_maximum(x, keep):
    powers = torch.where(keep, x.exp(), 0.0)
    return powers / powers.sum(-1, keepdim=True).clamp(min=1e-30)


def over(axis):
    def softmax(x, keep):
        return torch.nan_to_num(x.masked_fill(~keep, -INF).softmax(axis))

    return softmax


def after_softmax(x, keep):
    return x.softmax(-1) * keep


def rounded(x, keep):
    return good.softmax(x.bfloat16().to(x.dtype), keep)


def weights_rounded(weights, keep):
    return weights.bfloat16().to(weights.dtype)


SCALES = [
    mutant("scale missing", "scale_closed_form", scale=lambda q, k, v: 1.0),
    mutant("scale without root", "scale_closed_form", scale=lambda q, k, v: 1 / q.shape[-1]),
    mutant(
        "scale upside down",
        "scale_closed_form",
        scale=lambda q, k, v: q.shape[-1] ** 0.5,
        after="maxtext#1370",
    ),
    mutant(
        "scale by the width",
        "oracle_forward",
        after="Megatron-LM#1501",
        scale=lambda q, k, v: (q.shape[1] * q.shape[-1]) ** -0.5,
    ),
    mutant(
        "scale by the value size", "scale_closed_form", scale=lambda q, k, v: v.shape[-1] ** -0.5
    ),
    mutant(
        "scale by the number of keys",
        "scale_closed_form",
        scale=lambda q, k, v: max(k.shape[2], 1) ** -0.5,
    ),
    mutant(
        "scale one percent off",
        "scale_closed_form",
        "oracle_forward",
        scale=lambda q, k, v: 1.01 * q.shape[-1] ** -0.5,
    ),
    mutant("scale of whole dozens", "scale_closed_form", scale=lambda q, k, v: 12**-0.5),
    mutant("softcap ignored", "options_obeyed", cap=lambda x, softcap: x, after="vllm-metal#665"),
    mutant(
        "softcap not scaled back",
        "options_obeyed",
        cap=lambda x, softcap: x if softcap is None else torch.tanh(x / softcap),
    ),
    mutant(
        "softcap without its slope",
        "options_obeyed",
        cap=lambda x, softcap: x if softcap is None else softcap * torch.tanh(x),
    ),
]


def _bias(change):
    def function(q, k, v, mask=None, is_causal=False, scale=None, bias=None):
        return GOOD(
            q, k, v, mask, is_causal, scale=scale, bias=None if bias is None else change(bias)
        )

    return function


SOFTMAXES = [
    mutant("softmax over queries", "oracle_forward", "convexity", softmax=over(2)),
    mutant("softmax over heads", "oracle_forward", "convexity", softmax=over(1)),
    mutant("softmax without its maximum", "score_shift", softmax=no_maximum),
    mutant(
        "mask after softmax",
        "convexity",
        "oracle_forward",
        softmax=after_softmax,
        after="timm#2236",
    ),
    mutant(
        "softmax of bfloat16 scores",
        "dtype_bound",
        "oracle_forward",
        softmax=rounded,
        after="maxtext#1225",
    ),
    mutant("weights in bfloat16", "dtype_bound", "convexity", weights=weights_rounded),
    mutant("sigmoid for softmax", "convexity", softmax=lambda x, keep: x.sigmoid() * keep),
    mutant(
        "mean of the values",
        "oracle_forward",
        "scale_closed_form",
        scores=lambda q, k, factor: 0 * good.scores(q, k, factor),
    ),
    mutant(
        "softmax over one key too many",
        "convexity",
        softmax=lambda x, keep: good.softmax(F.pad(x, (0, 1)), F.pad(keep, (0, 1), value=True))[
            ..., :-1
        ],
    ),
    mutant("absolute scores", "oracle_forward", scores=lambda q, k, f: good.scores(q, k, f).abs()),
    made("bias ignored", _bias(lambda bias: None), "options_obeyed"),
    made("bias scaled", _bias(lambda bias: bias / 2), "options_obeyed"),
    made("bias of one head for all", _bias(lambda bias: bias[:, :1]), "options_obeyed"),
]


def transposed(mask):
    return mask.transpose(-1, -2) if mask.shape[-1] == mask.shape[-2] else mask


def tiled(mask):
    """As `repeat` makes it where `repeat_interleave` is due."""
    flat = mask[:, 0].repeat(mask.shape[1], 1, 1)
    return flat.view(mask.shape)


def with_output(q, k, v, mask, change):
    return change(GOOD(q, k, v, mask))


def added_as_number(q, k, v, mask=None):
    s = good.scores(q, good.expand(k, q.shape[1]), q.shape[-1] ** -0.5)
    s = s if mask is None else s + mask
    return s.softmax(-1) @ good.expand(v, q.shape[1])


def times_mask(q, k, v, mask=None):
    s = good.scores(q, good.expand(k, q.shape[1]), q.shape[-1] ** -0.5)
    s = s if mask is None else s * mask
    return s.softmax(-1) @ good.expand(v, q.shape[1])


def int_as_bias(q, k, v, mask=None, is_causal=False):
    """Obeys truth values; adds anything else."""
    if mask is None or mask.dtype == torch.bool:
        return GOOD(q, k, v, mask, is_causal)
    return GOOD(q, k, v, mask.to(q.dtype), is_causal)


def weak_additive(q, k, v, mask=None, is_causal=False):
    """A fill that does for usual scores."""
    if mask is not None and mask.dtype != torch.bool:
        return GOOD(q, k, v, None, is_causal, bias=mask.clamp(min=-1000.0))
    return GOOD(q, k, v, mask, is_causal)


def two_fills(q, k, v, mask=None, is_causal=False):
    """A mask and a rule, each the least number, added: their sum is -inf."""
    least = torch.finfo(q.dtype).min
    s = good.scores(q, good.expand(k, q.shape[1]), q.shape[-1] ** -0.5)
    if mask is not None:
        s = s + torch.zeros_like(s).masked_fill(~mask, least)
    if is_causal:
        s = s + torch.zeros_like(s).masked_fill(~good.causal(s.shape[-2], s.shape[-1]), least)
    return (s - s.amax(-1, keepdim=True)).exp().softmax(-1) @ good.expand(v, q.shape[1])


MASKS = [
    mutant(
        "mask inverted",
        "mask_polarity",
        visible=rule(mask=lambda m: ~m),
        after="LLMs-from-scratch#1061",
    ),
    mutant("mask ignored", "mask_polarity", visible=rule(mask=lambda m: torch.ones_like(m))),
    made("mask added as a number", added_as_number, "mask_polarity"),
    made("mask multiplied", times_mask, "mask_polarity"),
    mutant(
        "mask filled with -10",
        "mask_polarity",
        "visible_set_probe",
        clean=uncleaned,
        softmax=filled(-10.0),
    ),
    mutant("mask filled with 0", "mask_polarity", clean=uncleaned, softmax=filled(0.0)),
    mutant(
        "mask filled with -1e4",
        "fully_masked_forward",
        softmax=filled(-1e4),
        after="transformers#17306",
    ),
    mutant("mask filled with -1e9", "fully_masked_forward", softmax=filled(-1e9)),
    mutant(
        "scores under the fill",
        "fully_masked_forward",
        softmax=filled(-3e5),
        after="flashinfer#4267",
    ),
    mutant("mask transposed", "mask_polarity", "visible_set_probe", visible=rule(mask=transposed)),
    mutant(
        "mask of the first row",
        "mask_broadcast",
        "batch_invariance",
        visible=rule(mask=lambda m: m[:1]),
    ),
    mutant("mask of the first head", "mask_broadcast", visible=rule(mask=lambda m: m[:, :1])),
    mutant(
        "mask of the first query", "visible_set_probe", visible=rule(mask=lambda m: m[:, :, :1])
    ),
    mutant(
        "mask tiled over the batch",
        "mask_broadcast",
        visible=rule(mask=tiled),
        after="lighthouse#77",
    ),
    mutant(
        "mask of any head", "mask_broadcast", visible=rule(mask=lambda m: m.any(1, keepdim=True))
    ),
    mutant("mask shifted by one key", "mask_polarity", visible=rule(mask=lambda m: m.roll(1, -1))),
    made("0 and 1 added to the scores", int_as_bias, "mask_dtype", after="pytorch#191612"),
    made(
        "additive mask cut at -1000",
        weak_additive,
        "mask_dtype",
        after="transformers#18185",
    ),
    made(
        "fills that add up to -inf",
        two_fills,
        "oracle_forward",
        "mask_polarity",
        after="transformers#26421",
    ),
    mutant("causal without its own key", "self_visible", visible=rule(causal=shifted(-1))),
    mutant("one key of the future", "causality_exact", visible=rule(causal=shifted(1))),
    mutant(
        "causal upside down",
        "causality_exact",
        visible=rule(causal=lambda r, c: ~shifted(-1)(r, c)),
    ),
    mutant(
        "only the future", "causality_exact", visible=rule(causal=lambda r, c: ~good.causal(r, c))
    ),
    mutant(
        "causal ignored",
        "causality_exact",
        visible=rule(causal=lambda r, c: torch.ones(r, c).bool()),
    ),
    mutant(
        "causal from the top left",
        "alignment_probe",
        visible=rule(causal=shifted(0, top=True)),
        after="pytorch#108108",
    ),
    mutant(
        "causal skipped with more keys than queries",
        "alignment_probe",
        after="TinyLLM#18",
        visible=rule(causal=lambda r, c: good.causal(r, c) if r == c else torch.ones(r, c).bool()),
    ),
    mutant(
        "causal off by one with more keys than queries",
        "alignment_probe",
        visible=rule(causal=lambda r, c: shifted(int(r != c))(r, c)),
    ),
    mutant(
        "mask ignored when causal",
        "mask_and_causal",
        after="pytorch#178588",
        visible=lambda m, r, c, is_causal, size: good.visible(
            None if is_causal else m, r, c, is_causal, size
        ),
    ),
    mutant(
        "causal ignored with a mask",
        "mask_and_causal",
        after="pytorch#99282",
        visible=lambda m, r, c, is_causal, size: good.visible(
            m, r, c, is_causal and m is None, size
        ),
    ),
    mutant(
        "causal or mask",
        "mask_and_causal",
        visible=keep_of(
            lambda keep, m, r, c, causal, s: keep if m is None or not causal else (keep | m)
        ),
    ),
    mutant(
        "window one too wide",
        "window_edges",
        after="transformers#26792",
        visible=rule(window=lambda r, c, size: good.window(r, c, size + 1)),
    ),
    mutant(
        "window one too narrow",
        "window_edges",
        visible=rule(window=lambda r, c, size: good.window(r, c, max(size - 1, 1))),
    ),
    mutant(
        "window ignored",
        "window_edges",
        after="unsloth#8253",
        visible=rule(window=lambda r, c, size: torch.ones(r, c).bool()),
    ),
    mutant(
        "window to both sides of the query",
        "window_edges",
        visible=lambda m, r, c, is_causal, size: (
            good.visible(m, r, c, is_causal and size is None, size)
            if size is None
            else good.window(r, c, size) & shifted(size - 1)(r, c)
        ),
    ),
    mutant(
        "window in blocks",
        "window_edges",
        visible=rule(
            window=lambda r, c, size: (
                (torch.arange(r)[:, None] + c - r) // size == torch.arange(c)[None] // size
            )
        ),
    ),
    mutant(
        "fully masked rows are NaN",
        "fully_masked_forward",
        softmax=plain_softmax,
        after="pytorch#41508",
    ),
    mutant(
        "fully masked rows give the mean",
        "fully_masked_forward",
        softmax=filled(torch.finfo(torch.float32).min),
        after="onnxruntime#28904",
    ),
    mutant(
        "fully masked rows have NaN gradients",
        "fully_masked_backward",
        after="pytorch#103963",
        softmax=lambda x, keep: torch.where(keep.any(-1, keepdim=True), added(x, keep), 0.0),
    ),
    mutant("NaN behind the mask", "masked_poison", clean=uncleaned, after="pytorch#101967"),
    mutant(
        "last key lost of an odd number",
        "oracle_forward",
        visible=keep_of(
            lambda keep, *_: keep & (torch.arange(keep.shape[-1]) < max(keep.shape[-1] // 2 * 2, 1))
        ),
    ),
    mutant(
        "keys beyond 32 lost",
        "oracle_forward",
        visible=keep_of(lambda keep, *_: keep & (torch.arange(keep.shape[-1]) < 32)),
    ),
]


def group(change):
    return {"expand": change, "expand_values": change}


def repeated_along_keys(k, heads):
    many = heads // k.shape[1]
    return (
        k.repeat_interleave(many, 2)
        .reshape(k.shape[0], k.shape[2], heads, k.shape[3])
        .transpose(1, 2)
    )


def modulo(k, heads):
    return k[:, [h % k.shape[1] for h in range(heads)]]


HEADS = [
    mutant("key heads tiled", "gqa_order", after="jax-js#180", **group(modulo)),
    mutant(
        "heads repeated along the keys",
        "oracle_forward",
        after="prime-rl#2681",
        **group(repeated_along_keys),
    ),
    mutant(
        "key head of the next group",
        "gqa_order",
        **group(lambda k, heads: good.expand(k.roll(1, 1), heads)),
    ),
    mutant(
        "one key head for all",
        "oracle_forward",
        "gqa_order",
        "head_permutation",
        **group(lambda k, heads: k[:, :1].expand(-1, heads, -1, -1)),
    ),
    mutant(
        "values of another head",
        "oracle_forward",
        "gqa_order",
        expand_values=lambda v, heads: good.expand(v.roll(1, 1), heads),
    ),
    mutant("values tiled, keys not", "gqa_order", expand_values=modulo),
    mutant(
        "few key heads read the next value",
        "oracle_forward",
        after="pytorch#193893",
        expand_values=lambda v, heads: good.expand(v if v.shape[1] > 2 else v.roll(1, 2), heads),
    ),
    mutant(
        "fully masked rows are not masked with one key head",
        "fully_masked_forward",
        after="pytorch#177842",
        before=lambda q, k, v, m: (
            (q, k, v, m)
            if m is None or m.dtype != torch.bool or k.shape[1] > 1
            else (q, k, v, m | ~m.any(-1, keepdim=True))
        ),
    ),
    mutant(
        "heads mixed after attending",
        "head_permutation",
        "oracle_forward",
        after=lambda out, q, k, v: out + 0.1 * torch.arange(out.shape[1])[:, None, None],
    ),
    mutant(
        "heads and queries reshaped",
        "oracle_forward",
        "head_permutation",
        before=lambda q, k, v, m: (q.transpose(1, 2).reshape(q.shape), k, v, m),
    ),
    mutant(
        "queries mixed", "oracle_forward", after=lambda out, q, k, v: out + 0.1 * out.roll(1, 2)
    ),
    mutant("values clipped", "oracle_forward", before=lambda q, k, v, m: (q, k, v.clamp(-1, 1), m)),
    mutant(
        "first row's keys for all",
        "batch_invariance",
        before=lambda q, k, v, m: (q, k[:1].expand(k.shape), v, m),
    ),
    mutant(
        "statistics of the batch",
        "batch_invariance",
        before=lambda q, k, v, m: (q, k - k.mean(0, keepdim=True) * (k.shape[0] > 1), v, m),
    ),
]


def by_assumed_strides(q, k, v, m):
    return torch.as_strided(q, q.shape, torch.empty(q.shape).stride(), q.storage_offset()), k, v, m


def scaled_in_place(q, k, v, m):
    return q.mul_(1.0 + 1e-3), k, v, m


def mask_in_place(q, k, v, m):
    if m is not None and m.dtype == torch.bool:
        m &= torch.ones_like(m).tril()
    return q, k, v, m


class SameBuffer:
    """Writes every answer into one buffer."""

    def __init__(self):
        self.buffer = None

    def __call__(self, out, q, k, v):
        if torch.is_grad_enabled() and out.requires_grad:
            return out
        if self.buffer is None or self.buffer.shape != out.shape or self.buffer.dtype != out.dtype:
            self.buffer = torch.empty_like(out)
        return self.buffer.copy_(out)


class SometimesWrong:
    """A race that shows once in twenty calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, out, q, k, v):
        self.calls += 1
        return out + (1e-3 if self.calls % 20 == 0 else 0.0)


def dropped_badly(q, k, v, mask=None, dropout_p=0.0):
    """Dropout of scores, which the softmax makes up for."""
    s = good.scores(
        F.dropout(q, dropout_p) if dropout_p else q, good.expand(k, q.shape[1]), q.shape[-1] ** -0.5
    )
    keep = torch.ones_like(s).bool() if mask is None else mask.expand_as(s)
    return good.softmax(s, keep) @ good.expand(v, q.shape[1])


class Unchanged(torch.autograd.Function):
    """What goes forward stays; the ways back differ."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()


class NaNBackward(Unchanged):
    """The first query's gradient is no number."""

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        grad[:, :, :1] = torch.nan
        return grad


class WrongBackward(Unchanged):
    @staticmethod
    def backward(ctx, grad):
        return grad * 1.1


class StridedBackward(Unchanged):
    """Takes the gradient's memory for contiguous."""

    @staticmethod
    def backward(ctx, grad):
        if grad.is_contiguous():
            return grad
        flat = torch.zeros(grad.shape)
        flat.view(-1)[0] = grad.reshape(-1)[0]
        return flat


def cut_to_fit(q, k, v, mask):
    """No refusal."""


def fitted(q, k, v, m):
    length = min(k.shape[2], v.shape[2])
    dim = min(q.shape[3], k.shape[3])
    return q[..., :dim], k[:, :, :length, :dim], v[:, :, :length], m


def compiled_wrong(out, q, k, v):
    return out * 1.5 if torch.compiler.is_compiling() else out


class Remembers:
    """Stores the head count of the first call, as a process with one model may."""

    def __init__(self):
        self.heads = None

    def __call__(self, out, q, k, v):
        self.heads = self.heads or q.shape[1]
        return out if q.shape[1] == self.heads or q.shape[1] == k.shape[1] else out.flip(1)


class History:
    """Records every call, and branches on their number."""

    def __init__(self):
        self.calls = []

    def __call__(self, out, q, k, v):
        self.calls.append(len(self.calls))
        return out * (1 if self.calls[-1] >= 0 else 2)


def weights_change(q, k, v, mask=None, need_weights=False):
    out, weights = GOOD(q, k, v, mask, need_weights=True)
    return (out * 1.1, weights) if need_weights else out


def under_autocast(out, q, k, v):
    return out * 0.5 if torch.is_autocast_enabled("cpu") else out


RUNS = [
    mutant("strides assumed", "strides", before=by_assumed_strides, after="pytorch#112577"),
    mutant(
        "gradient's strides assumed",
        "strides",
        after="flash-attention#355",
        weights=lambda w, keep: w,
        output=lambda w, v: StridedBackward.apply(w @ v),
    ),
    mutant("scaled in place", "no_mutation", before=scaled_in_place),
    mutant("mask changed in place", "no_mutation", before=mask_in_place),
    Mutant(
        "one buffer for all outputs", lambda: with_steps(after=SameBuffer()), LIKE, ("no_alias",)
    ),
    mutant(
        "a view of the values",
        "no_alias",
        after=lambda out, q, k, v: v if k.shape[2] == 1 and k.shape[1] == q.shape[1] else out,
    ),
    mutant(
        "dropout in eval",
        "eval_determinism",
        after="pytorch#124464",
        weights=lambda w, keep: F.dropout(w, 0.1),
    ),
    made("dropout of queries", dropped_badly, "dropout_stats"),
    mutant(
        "dropout without growth", "dropout_stats", drop=lambda w, p: w * (torch.rand_like(w) >= p)
    ),
    mutant(
        "dropout keeps what it should drop", "dropout_stats", drop=lambda w, p: F.dropout(w, 1 - p)
    ),
    mutant(
        "dropout of whole rows",
        "dropout_stats",
        drop=lambda w, p: F.dropout(torch.ones_like(w[..., :1]), p) * w,
    ),
    mutant(
        "scores detached",
        "oracle_gradient",
        scores=lambda q, k, f: good.scores(q, k, f).detach(),
    ),
    mutant(
        "gradient one tenth too large",
        "oracle_gradient",
        before=lambda q, k, v, m: (q, WrongBackward.apply(k), v, m),
    ),
    mutant(
        "NaN gradients of queries under a mask",
        "oracle_gradient",
        after="pytorch#196678",
        before=lambda q, k, v, m: (q if m is None else NaNBackward.apply(q), k, v, m),
    ),
    mutant(
        "gradient lost behind a mask",
        "oracle_gradient",
        before=lambda q, k, v, m: (q if m is None else q.detach(), k, v, m),
        after="pytorch#109517",
    ),
    Mutant(
        "a race",
        lambda: with_steps(after=SometimesWrong()),
        LIKE,
        ("oracle_forward",),
        "flash-attention#1766",
    ),
    mutant("shapes cut to fit", "mask_dtype", refuse=cut_to_fit, before=fitted),
    Mutant(
        "compiled to something else",
        lambda: with_steps(after=compiled_wrong),
        LIKE,
        ("compile_agree",),
        "pytorch#195320",
        True,
    ),
    Mutant(
        "compiled at every call",
        lambda: with_steps(after=History()),
        LIKE,
        ("compile_count",),
        "transformers#37908",
        True,
    ),
    Mutant(
        "head count of the first call",
        lambda: with_steps(after=Remembers()),
        LIKE,
        ("gqa_order",),
        "DeepSpeed#8316",
    ),
    made("returning weights changes the output", weights_change, "needs_weights_agree"),
    Mutant(
        "autocast changes the output",
        lambda: with_steps(after=under_autocast),
        LIKE,
        ("autocast_precision",),
        "diffusers#13920",
    ),
    mutant(
        "accumulates in half",
        "dtype_bound",
        after="pytorch#160841",
        output=lambda w, v: (
            torch.stack(
                [(w[..., j, None] * v[..., None, j, :]).bfloat16() for j in range(v.shape[-2])]
            )
            .sum(0)
            .to(v.dtype)
            if v.shape[-2]
            else w @ v
        ),
    ),
    mutant(
        "a huge value overflows",
        "oracle_forward",
        scores=lambda q, k, f: good.scores(q, k, f).half().to(q.dtype),
    ),
]

MUTANTS = [*SCALES, *SOFTMAXES, *MASKS, *HEADS, *RUNS]
