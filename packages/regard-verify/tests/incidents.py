"""Incidents of 2024 to 2026, each rebuilt in about twenty lines from its public thread.

Each class or function is right with `wrong=False`, and does what the thread reports with True.
Nothing here is the code of those projects.
"""

from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn


def band(rows, columns, window=0):
    """Which keys are visible [rows, columns] under a causal rule and a window."""
    at = torch.arange(columns - rows, columns)[:, None]
    keys = torch.arange(columns)
    return (keys <= at) & (keys > at - window) if window else keys <= at


class Layer(nn.Module):
    """Attention of four heads; `seen` says which keys are visible."""

    def __init__(self, wrong=False):
        super().__init__()
        self.wrong = wrong
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def heads(self, x):
        return (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))

    def attend(self, q, k, v, seen=None, **options):
        out = F.scaled_dot_product_attention(q, k, v, seen, **options)
        return self.out(out.transpose(1, 2).flatten(2))


class PackedStep(Layer):
    """A trainer hands `cu_seqlens` on, and no mask: flash reads them, sdpa does not."""

    def forward(self, x, cu_seqlens=None):
        q, k, v = self.heads(x)
        if cu_seqlens is None or self.wrong:
            return self.attend(q, k, v, is_causal=True)
        ids = torch.bucketize(torch.arange(x.shape[1]), cu_seqlens[1:], right=True)
        return self.attend(q, k, v, band(x.shape[1], x.shape[1]) & (ids[:, None] == ids))


def fallback_attention(q, k, v, attn_bias=None, *, wrong=False):
    """Without xformers, torch's attention takes its place: without the mask of blocks."""
    return F.scaled_dot_product_attention(q, k, v, None if wrong else attn_bias)


class TrainingWindow(Layer):
    """In training no mask is made, and only the flash path is told of the window."""

    def forward(self, x):
        q, k, v = self.heads(x)
        if self.training and self.wrong:
            return self.attend(q, k, v, is_causal=True)
        return self.attend(q, k, v, band(x.shape[1], x.shape[1], window=4))


def paged_forward(module, query, key, value, attention_mask=None, cache=None, *, wrong=False):
    """In paged mode a model makes no mask; a plain forward has no cache, and is not causal."""
    seen = attention_mask
    if cache is None and not wrong:
        seen = band(query.shape[2], key.shape[2])
        seen = seen if attention_mask is None else seen & attention_mask
    out = F.scaled_dot_product_attention(query, key, value, seen)
    return out.transpose(1, 2), None


class PaddedAlone(Layer):
    """The mask of padding is applied where a batch has more than one row."""

    def forward(self, x, attention_mask=None):
        q, k, v = self.heads(x)
        seen = band(x.shape[1], x.shape[1])
        if attention_mask is not None and not (self.wrong and len(attention_mask) == 1):
            seen = seen & attention_mask[:, None, None].bool()
        return self.attend(q, k, v, torch.where(seen, 0.0, -1e9).to(x.dtype))


class WindowCache:
    """Keys and values of the last `keep` tokens."""

    def __init__(self):
        self.k = self.v = None
        self.keep = self.tokens = 0

    def update(self, k, v):
        self.tokens += k.shape[2]
        if self.k is not None:
            k, v = torch.cat([self.k, k], 2), torch.cat([self.v, v], 2)
        self.k, self.v = k[:, :, -self.keep :], v[:, :, -self.keep :]
        return k, v

    def crop(self, length):
        dropped, self.tokens = self.tokens - length, length
        self.k, self.v = (t[:, :, : t.shape[2] - dropped] for t in (self.k, self.v))


class Drafted(Layer):
    """A layer with a window of 4; drafts need tokens back that have left the window."""

    def forward(self, x, cache=None):
        q, k, v = self.heads(x)
        if cache is not None:
            cache.keep = 3 if self.wrong else 3 + 3
            k, v = cache.update(k, v)
        return self.attend(q, k, v, band(x.shape[1], k.shape[2], window=4))


def two_ranks(q, k, v, *, wrong=False):
    """Each of two ranks has half of the queries and gathers all keys; a hook drops the mask."""
    size = q.shape[2] // 2
    if q.shape[2] != 2 * size:
        raise ValueError("the sequence must be a multiple of the ranks")
    seen = band(q.shape[2], k.shape[2], window=0 if wrong else 3)
    shards = []
    for rank in range(2):
        rows = slice(rank * size, (rank + 1) * size)
        shards.append(F.scaled_dot_product_attention(q[:, :, rows], k, v, seen[rows]))
    return torch.cat(shards, 2)


class DecodedWindow(Layer):
    """With one query the mask is left out, since nothing is later: and with it the window."""

    def forward(self, x, past=None):
        q, k, v = self.heads(x)
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        seen = band(x.shape[1], k.shape[2], window=4)
        if self.wrong and x.shape[1] == 1:
            seen = None
        return self.attend(q, k, v, seen), (k, v)


class LateWindow(Layer):
    """The mask of the window is made after the branch for flash attention has returned."""

    def forward(self, x):
        q, k, v = self.heads(x)
        if self.wrong:
            return self.attend(q, k, v, is_causal=True)
        return self.attend(q, k, v, band(x.shape[1], x.shape[1], window=4))


@dataclass(frozen=True)
class Incident:
    """One row of the page.

    Attributes:
        thread: where it was reported.
        title: what happened.
        make: from whether it is wrong to the subject.
        law: that names it.
        like: what is declared.
    """

    thread: str
    title: str
    make: object
    law: str
    like: dict = field(default_factory=dict)


def function(target):
    """A maker of `target`, right or wrong."""

    def make(wrong):
        made = partial(target, wrong=wrong)
        made.__name__ = target.__name__
        return made

    return make


INCIDENTS = (
    Incident(
        "areal-project/AReaL#1442", "a packed training step under sdpa: documents attend to each "
        "other, and log-probabilities are wrong", PackedStep, "documents_apart",
    ),
    Incident(
        "NVIDIA-TAO/tao-pytorch#96", "a fallback to sdpa drops the block-diagonal mask: ImageNet "
        "k-NN falls from 82.4 % to 4.0 %", function(fallback_attention), "mask_polarity",
    ),
    Incident(
        "unslothai/unsloth#8253", "the window never reaches sdpa in training", TrainingWindow,
        "train_eval_agree",
    ),
    Incident(
        "keras-team/keras-hub#2186", "the flash path returns before the window's mask is made",
        LateWindow, "window_edges", {"window": 4, "causal": True},
    ),
    Incident(
        "huggingface/transformers#48296", "a forward in paged mode is bidirectional",
        function(paged_forward), "causality_exact", {"causal": True},
    ),
    Incident(
        "huggingface/transformers#46773", "padding is not masked at batch size 1", PaddedAlone,
        "mask_polarity", {"mask": "attention_mask", "polarity": "keep", "mask_shape": "BS"},
    ),
    Incident(
        "huggingface/transformers#48280", "a window's cache forgets what drafts pushed out",
        Drafted, "drafts_dropped",
    ),
    Incident(
        "huggingface/accelerate#4177", "context parallelism replaces every mask by the causal one",
        function(two_ranks), "window_edges", {"window": 3, "causal": True},
    ),
    Incident(
        "karpathy/nanochat#456", "steps of one token look past the window", DecodedWindow,
        "decode_equals_full",
    ),
    Incident(
        "pytorch/pytorch#99282", "a mask switches is_causal off",
        lambda wrong: nn.MultiheadAttention(32, 4, batch_first=True) if wrong else None,
        "mask_and_causal",
    ),
)  # fmt: skip
