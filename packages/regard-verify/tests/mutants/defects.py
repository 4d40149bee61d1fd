"""Modules as people write and publish them, with one defect each that is found in packages."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from incidents import Drafted, PackedStep
from mutants.table import Mutant


@dataclass
class How:
    """The steps in which the modules below differ; the defaults are right."""

    drops_in_eval: bool = False
    causal_unless_masked: bool = False
    ignores_the_switch: bool = False
    future: int = 0
    ignores: str = ""


class Attention(nn.Module):
    """Self-attention with two masks, a causal option and dropout."""

    how = How()

    def __init__(self, d_model, n_heads, dropout=0.0, causal=False):
        super().__init__()
        self.n_heads, self.dropout, self.causal = n_heads, dropout, causal
        self.q, self.k, self.v, self.out = (nn.Linear(d_model, d_model) for _ in range(4))

    def hidden(self, x, attn_mask, key_padding_mask):
        """Which keys are hidden [B, 1, L, L]; in both masks True hides."""
        length = x.shape[1]
        hidden = torch.zeros(len(x), 1, length, length, dtype=torch.bool)
        if attn_mask is not None:
            hidden = hidden | attn_mask
        if key_padding_mask is not None and self.how.ignores != "key_padding_mask":
            hidden = hidden | key_padding_mask[:, None, None]
        masked = attn_mask is not None or key_padding_mask is not None
        if self.causal and not (self.how.causal_unless_masked and masked):
            later = torch.ones(length, length, dtype=torch.bool).triu(1 + self.how.future)
            hidden = hidden | later & (not self.how.ignores_the_switch)
        return hidden

    def forward(self, x, attn_mask=None, key_padding_mask=None):
        q, k, v = (w(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for w in (
            self.q, self.k, self.v))  # fmt: skip
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        hidden = self.hidden(x, attn_mask, key_padding_mask)
        weights = scores.masked_fill(hidden, torch.finfo(scores.dtype).min).softmax(-1)
        weights = F.dropout(weights, self.dropout, self.training or self.how.drops_in_eval)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


def variant(how, *, causal=False):
    """The class with these steps; always causal, or by an option."""

    class Optional(Attention):
        def __init__(self, d_model, n_heads, dropout=0.0, causal=False):
            super().__init__(d_model, n_heads, dropout, causal)

    class Causal(Attention):
        def __init__(self, d_model, n_heads, dropout=0.0):
            super().__init__(d_model, n_heads, dropout, causal=True)

    found = Causal if causal else Optional
    found.how = how
    return found


class NeverScaled(nn.Module):
    """Non-inverted dropout: in eval mode the weights are multiplied by 1 - p."""

    def __init__(self, d_model, n_heads, dropout=0.0):
        super().__init__()
        self.inner, self.p = Attention(d_model, n_heads), dropout

    def forward(self, x):
        out = self.inner(x)
        return out if self.training else out * (1.0 - self.p)


class WithoutSuper(Attention):
    """Its __init__ forgets nn.Module's."""

    def __init__(self, d_model, n_heads):
        self.n_heads, self.dropout, self.causal = n_heads, 0.0, False
        self.q, self.k, self.v, self.out = (nn.Linear(d_model, d_model) for _ in range(4))


class WithoutTransposition(nn.Module):
    """The product of its queries and keys does not exist."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.qkv, self.out = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)

    def forward(self, x):
        q, k, v = (
            y.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1)
        )
        scores = q @ k * q.shape[-1] ** -0.5
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def undefined(q, k, v):
    """A name that is defined nowhere."""
    return (q @ k.mT * scale).softmax(-1) @ v


def given(thing):
    """What `make` of a mutant is: it returns the class or function itself."""
    return partial(_same, thing)


def _same(thing):
    return thing


MUTANTS = [
    Mutant("super().__init__() is missing", given(WithoutSuper), {}, ("super_init",)),
    Mutant("keys are not transposed", given(WithoutTransposition), {"width": 32}, ("runs",)),
    Mutant("a name is not defined", given(undefined), {}, ("runs",)),
    Mutant(
        "dropout runs in eval, off by default",
        given(variant(How(drops_in_eval=True))), {}, ("dropout_in_eval",),
    ),
    Mutant(
        "dropout scales in eval, off by default", given(NeverScaled), {}, ("dropout_in_eval",)
    ),
    Mutant(
        "a mask switches the causal rule off", given(variant(How(causal_unless_masked=True),
        causal=True)), {}, ("mask_and_causal",),
    ),
    Mutant(
        "a mask switches the causal option off", given(variant(How(causal_unless_masked=True))),
        {}, ("causal_option",),
    ),
    Mutant(
        "the causal option is ignored", given(variant(How(ignores_the_switch=True))), {},
        ("causal_option",),
    ),
    Mutant(
        "the causal option leaves one later key visible", given(variant(How(future=1))), {},
        ("causal_option",),
    ),
    Mutant(
        "the causal option hides each query's own key", given(variant(How(future=-1))), {},
        ("causal_option",),
    ),
    Mutant(
        "the second mask is ignored", given(variant(How(ignores="key_padding_mask"))), {},
        ("every_mask_argument",),
    ),
    Mutant(
        "packed documents attend to each other", lambda: PackedStep(True), {},
        ("documents_apart",), "AReaL#1442",
    ),
    Mutant(
        "a window forgets under drafts", lambda: Drafted(True), {}, ("drafts_dropped",),
        "transformers#48280",
    ),
]  # fmt: skip
