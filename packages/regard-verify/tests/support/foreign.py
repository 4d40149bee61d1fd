"""Attentions with the signatures of other libraries, in plain torch: all are right."""

import functools
import re
import warnings

import torch
from torch import Tensor, nn


def softmax(scores, visible):
    """Over the visible keys; zeros where there is none."""
    scores = scores.masked_fill(~visible, -float("inf"))
    largest = scores.amax(-1, keepdim=True).clamp_min(-1e30)
    e = (scores - largest).exp()
    return e / e.sum(-1, keepdim=True).clamp_min(1e-30)


def shared(x, heads):
    return x.repeat_interleave(heads // x.shape[1], 1)


def near(queries, keys, window, causal):
    """Visible keys [L, S], counted from the end; a window of -1 has no edge."""
    left, right = window
    right = 0 if causal else right
    i = torch.arange(queries)[:, None] + keys - queries
    j = torch.arange(keys)[None]
    visible = torch.ones(queries, keys, dtype=torch.bool)
    visible = visible if left < 0 else visible & (j >= i - left)
    return visible if right < 0 else visible & (j <= i + right)


def flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """q [B, L, H, D], k and v [B, S, G, D]; as flash-attention's function."""
    assert alibi_slopes is None
    assert len(window_size) == 2
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = shared(k, q.shape[1]), shared(v, q.shape[1])
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    scores = q @ k.mT * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    weights = softmax(scores, near(q.shape[2], k.shape[2], window_size, causal))
    weights = nn.functional.dropout(weights, dropout_p, dropout_p > 0)
    return (weights @ v).transpose(1, 2)


def memory_efficient_attention(query, key, value, attn_bias=None, p=0.0, scale=None):
    """[B, L, H, D], and a bias of the scores [B, H, L, S]; as xformers' function."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if attn_bias is not None:
        scores = scores + attn_bias
    weights = nn.functional.dropout(softmax(scores, scores > -1e30), p, p > 0)
    return (weights @ v).transpose(1, 2)


def values_first(values, keys, xq, mask=None):
    """The order of a tutorial."""
    visible = torch.ones(()).bool() if mask is None else mask.bool()
    return softmax(xq @ keys.mT * xq.shape[-1] ** -0.5, visible) @ values


def eager(q, k, v, scaling, dropout=0.1, training=True, causal_mask=False):
    """A scale is required; dropout is on unless `training` is False."""
    visible = near(q.shape[2], k.shape[2], (-1, -1), causal_mask)
    weights = softmax(q @ k.mT * scaling, visible)
    return nn.functional.dropout(weights, dropout, training) @ v


def of_a_module(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    """As transformers calls the attention of a module; an additive mask is required."""
    key, value = (x.repeat_interleave(module.num_key_value_groups, 1) for x in (key, value))
    scores = query @ key.mT * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = nn.functional.dropout(softmax(scores, scores > -1e30), dropout, module.training)
    return (weights @ value).transpose(1, 2), weights


def unscaled(q, k, v, d_k, sm_scale=1.0, block_mask=None):
    """A scale of 1 is declared; the mask is no tensor."""
    assert d_k == q.shape[-1]
    assert block_mask is None
    return (q @ k.mT * sm_scale).softmax(-1) @ v


def required_mask(q, k, v, padding_mask):
    """1 is hidden, and None is not taken."""
    return softmax(q @ k.mT * q.shape[-1] ** -0.5, padding_mask == 0) @ v


class Temperature(nn.Module):
    """The scale is an argument of the class."""

    def __init__(self, temperature):
        super().__init__()
        self.temperature = temperature

    def forward(self, q, k, v):
        return (q / self.temperature @ k.mT).softmax(-1) @ v


class DotProduct(nn.Module):
    """Without weights: a function of (q, k, v)."""

    def __init__(self, dropout=0.1):
        super().__init__()
        self.drop = nn.Dropout(dropout)

    def forward(self, query, key, value, mask=None):
        visible = torch.ones(()).bool() if mask is None else mask.bool()
        return self.drop(softmax(query @ key.mT * query.shape[-1] ** -0.5, visible)) @ value


class Holder:
    """An object with a method, as a kernel is loaded by a library."""

    def __init__(self, dim):
        self.factor = dim**-0.5

    def attend(self, q, k, v, causal: bool = False):
        assert self.factor > 0
        visible = near(q.shape[2], k.shape[2], (-1, -1), causal)
        return softmax(q @ k.mT * q.shape[-1] ** -0.5, visible) @ v

    def __call__(self, q, k, v):
        return self.attend(q, k, v)


holder = Holder(4)
layers = nn.ModuleDict({"plain": DotProduct()})
partial = functools.partial(flash_attn_func, softmax_scale=None)
compiled = torch.compile(holder.attend, backend="eager")


# Tests load this file several times, and an operator that is defined anew leaves its callers of
# before with a pointer to freed memory: so each copy of the module has an operator of its own.
NAMESPACE = "regard_tests_" + re.sub(r"\W", "_", __name__)


@torch.library.custom_op(f"{NAMESPACE}::attend", mutates_args=())
def operator(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, is_causal: bool = False
) -> Tensor:
    visible = near(q.shape[2], k.shape[2], (-1, -1), is_causal)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    return softmax(q @ k.mT * factor, visible) @ v


packet = getattr(torch.ops, NAMESPACE).attend


def unscripted(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        i = torch.arange(q.shape[2])[:, None] + (k.shape[2] - q.shape[2])
        scores = scores.masked_fill(torch.arange(k.shape[2])[None] > i, -1e30)
    return scores.softmax(-1) @ v


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # deprecated, and still in use
    scripted = torch.jit.script(unscripted)


class Applied(torch.autograd.Function):
    """Its `apply` takes no arguments by name."""

    @staticmethod
    def forward(ctx, q, k, v, causal=False):
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_() for x in (q, k, v)]
            ctx.out = holder.attend(*inputs, causal)
        ctx.inputs = inputs
        return ctx.out.detach()

    @staticmethod
    def backward(ctx, grad):
        return (*torch.autograd.grad(ctx.out, ctx.inputs, grad, retain_graph=True), None)
