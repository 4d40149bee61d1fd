"""Layers from x to output, with caches, latents or cross-attention: one fault each."""

import math
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from mutants import good
from mutants.good import LAYER_LIKE, MLA, MLA_LIKE, Cross, Layer, LayerSteps, Steps, rotated
from mutants.table import Mutant

CACHED_TOKENS = ("chunked_prefill", "decode_equals_full")


def layer(name, *kills, after="", like=None, p=0.0, bias=True, slow=False, steps=None, **changes):
    """`after` is where it was found, or the last step."""
    if callable(after):
        changes, after = {**changes, "after": after}, ""
    if steps:
        changes["steps"] = replace(Steps(), **steps)
    how = replace(LayerSteps(), **changes)
    make = partial(Layer, how, p=p, bias=bias)
    return Mutant(name, make, {**LAYER_LIKE, **(like or {})}, kills, after, slow)


def causal_top_left(rows, columns):
    return torch.arange(columns)[None] <= torch.arange(rows)[:, None]


def unless_past(visible):
    """The right rule without a cache, another with one."""

    def chosen(mask, rows, columns, is_causal, size):
        chosen = good.visible if rows == columns else visible
        return chosen(mask, rows, columns, is_causal, size)

    return chosen


def restart(q, k, v, past):
    return good.rotate(q, k, v, 0)


def rotated_by(pairs=False, theta=10_000.0, table=torch.float32, values=False, keys=True, shift=0):
    def rotate(q, k, v, past):
        at = torch.arange(past, past + q.shape[2])
        rotate = partial(paired if pairs else rotated, theta=theta, table=table)
        return rotate(q, at + shift), rotate(k, at) if keys else k, rotate(v, at) if values else v

    return rotate


def paired(x, positions, theta, table):
    order = torch.cat([torch.arange(0, x.shape[-1], 2), torch.arange(1, x.shape[-1], 2)])
    out = torch.empty_like(x)
    out[..., order] = rotated(x[..., order], positions, theta, table)
    return out


def grown(change):
    def append(past, k, v):
        return (k, v) if past is None else change(past, k, v)

    return append


def counted(past):
    return 0 if past is None else past[0].shape[2]


class Shared:
    """One cache for all instances."""

    def __init__(self):
        self.held = None

    def __call__(self, past, k, v):
        if past is None:
            self.held = (
                None if self.held is None or self.held[0].shape[0] != k.shape[0] else self.held
            )
        self.held = good.append(self.held if past is None else past, k, v)
        return self.held


class Leaky:
    """Every step writes into the same list."""

    def __init__(self):
        self.all = {}

    def __call__(self, past, k, v):
        kept = good.append(past, k, v)
        if past is not None and kept[0].shape[2] in self.all:
            other = self.all[kept[0].shape[2]]
            if other[0].shape == kept[0].shape:
                return other
        self.all[kept[0].shape[2]] = kept
        return kept


class Sticky:
    """After one eval, never again."""

    def __init__(self):
        self.off = False

    def __call__(self, layer, x):
        self.off = self.off or not layer.training
        return x if self.off else F.dropout(x, layer.dropout, True)


def padded_positions(layer, x):
    """Added positions that count padding."""
    return x + torch.sin(torch.arange(x.shape[1])[:, None] * 1.0)


class Outside(Layer):
    """One weight that no state dict knows."""

    made = 0

    def __init__(self):
        super().__init__()
        Outside.made += 1
        self.extra = torch.full((32,), float(Outside.made))
        object.__setattr__(self, "how", LayerSteps(after=lambda layer, x, out: out * layer.extra))

    def __deepcopy__(self, memo):
        twin = Outside()
        twin.load_state_dict(self.state_dict())
        return twin.eval()


class Raw(nn.Module):
    """No linear modules: nothing to hook."""

    def __init__(self, by):
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 32, 32) / 6)
        self.by = by

    def forward(self, x):
        q, k, v = (x @ w for w in self.w)
        i, j = torch.arange(x.shape[1])[:, None], torch.arange(x.shape[1])[None]
        return (q @ k.mT / math.sqrt(32)).masked_fill(j > i + self.by, -math.inf).softmax(-1) @ v


class Fused(nn.Module):
    """One projection for all three, cut up in another way than declared."""

    def __init__(self):
        super().__init__()
        self.num_heads = 4
        self.qkv, self.proj = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (4, 24)).transpose(1, 2).split(8, -1)
        return self.proj(good.merge(Steps().function()(q, k, v, None, True)))


def reference(x):
    torch.manual_seed(0)
    return Layer().eval()(x)


LAYERS = [
    layer(
        "heads split by a view",
        "oracle_forward",
        "head_permutation",
        split=lambda x, heads: x.reshape(x.shape[0], heads, x.shape[1], -1),
    ),
    layer(
        "heads merged by a view",
        "oracle_forward",
        "head_permutation",
        merge=lambda x: x.reshape(x.shape[0], x.shape[2], -1),
        after="mindone#1477",
    ),
    layer(
        "heads merged inside out",
        "named_heads",
        like={"fused": "blocked"},
        merge=lambda x: x.permute(0, 2, 3, 1).flatten(-2),
    ),
    layer(
        "channels split inside out",
        "named_heads",
        like={"fused": "blocked"},
        split=lambda x, heads: x.unflatten(-1, (x.shape[-1] // heads, heads)).permute(0, 3, 1, 2),
    ),
    layer("values rotated", "oracle_forward", rotate=rotated_by(values=True)),
    layer(
        "keys rotated twice as far",
        "oracle_forward",
        rotate=lambda q, k, v, past: (
            good.rotate(q, k, v, past)[0],
            rotated(k, 2 * torch.arange(past, past + k.shape[2])),
            v,
        ),
    ),
    layer("only queries rotated", "oracle_forward", rotate=rotated_by(keys=False)),
    layer(
        "pairs for halves",
        "oracle_forward",
        rotate=rotated_by(pairs=True),
        after="transformers#25199",
    ),
    layer("another theta", "oracle_forward", rotate=rotated_by(theta=500_000.0)),
    layer("queries one position ahead", "oracle_forward", rotate=rotated_by(shift=1)),
    layer(
        "table in bfloat16",
        "oracle_forward",
        rotate=rotated_by(table=torch.bfloat16),
        after="gpt-neox#1003",
    ),
    layer("no rotation", "oracle_forward", rotate=lambda q, k, v, past: (q, k, v)),
    layer(
        "positions restart with each piece",
        *CACHED_TOKENS,
        rotate=restart,
        after="transformers#43082",
    ),
    layer("positions count calls", *CACHED_TOKENS, length=lambda past: 0 if past is None else 1),
    layer(
        "positions one too far with a cache",
        *CACHED_TOKENS,
        length=lambda past: 0 if past is None else past[0].shape[2] + 1,
    ),
    layer(
        "keys rotated again and again",
        *CACHED_TOKENS,
        append=grown(
            lambda past, k, v: good.append(
                (rotated(past[0], torch.ones(past[0].shape[2])), past[1]), k, v
            )
        ),
    ),
    layer(
        "causal rule skipped with a cache",
        "chunked_prefill",
        after="candle#3743",
        steps={"visible": unless_past(lambda m, r, c, causal, s: torch.ones(r, c).bool())},
    ),
    layer(
        "causal rule of the piece alone",
        *CACHED_TOKENS,
        after="onnx#8068",
        steps={"visible": unless_past(lambda m, r, c, causal, s: causal_top_left(r, c))},
    ),
    layer("cache ignored", *CACHED_TOKENS, append=lambda past, k, v: (k, v), length=counted),
    layer(
        "new tokens before cached ones",
        "chunked_prefill",
        append=grown(lambda past, k, v: (torch.cat([k, past[0]], 2), torch.cat([v, past[1]], 2))),
    ),
    layer(
        "values not cached",
        *CACHED_TOKENS,
        append=grown(
            lambda past, k, v: (
                torch.cat([past[0], k], 2),
                torch.cat([past[1], torch.zeros_like(v)], 2),
            )
        ),
    ),
    layer(
        "last token of a piece lost",
        *CACHED_TOKENS,
        append=grown(
            lambda past, k, v: good.append(
                (past[0][:, :, 1:].contiguous(), past[1][:, :, 1:].contiguous()), k, v
            )
        ),
    ),
    layer(
        "cache appended to the heads",
        "decode_equals_full",
        after="mlx-lm#390",
        append=grown(
            lambda past, k, v: (
                torch.cat([past[0][:, :, -k.shape[2] :], k], 1)[:, -2:],
                torch.cat([past[1][:, :, -k.shape[2] :], v], 1)[:, -2:],
            )
        ),
    ),
    Mutant(
        "one cache for all instances",
        lambda: Layer(LayerSteps(append=Shared())),
        LAYER_LIKE,
        ("eval_determinism",),
        "Self-Forcing#78",
    ),
    Mutant(
        "a cache found by its length",
        lambda: Layer(LayerSteps(append=Leaky())),
        LAYER_LIKE,
        ("chunked_prefill",),
        "sglang#29755",
    ),
    Mutant(
        "every earlier cache is held",
        lambda: Hoarder(),
        LAYER_LIKE,
        ("memory_law",),
        "torchtune#1663",
    ),
    layer(
        "window one too wide with a cache",
        *CACHED_TOKENS,
        like={"window": 3},
        window=3,
        after="transformers#29623",
        steps={
            "visible": unless_past(lambda m, r, c, causal, s: good.visible(m, r, c, causal, s + 1))
        },
    ),
    layer("window one too wide", "window_edges", like={"window": 3}, window=4),
    layer(
        "window ignored with a cache",
        *CACHED_TOKENS,
        like={"window": 3},
        window=3,
        steps={
            "visible": unless_past(lambda m, r, c, causal, s: good.visible(m, r, c, causal, None))
        },
    ),
    layer(
        "dropout in eval",
        "eval_determinism",
        p=0.1,
        drop=lambda layer, x: F.dropout(x, layer.dropout),
        after="nanoGPT#240",
    ),
    Mutant(
        "dropout ends with the first eval",
        lambda: Layer(LayerSteps(drop=Sticky()), p=0.1),
        LAYER_LIKE,
        ("dropout_stats",),
        "Megatron-LM#411",
    ),
    layer("dropout never", "dropout_stats", p=0.1, drop=lambda layer, x: x),
    layer(
        "eval computes something else",
        "train_eval_agree",
        after=lambda layer, x, out: out if layer.training else out * 1.01,
    ),
    layer(
        "normed over the batch",
        "batch_invariance",
        before=lambda layer, x: x - x.mean(0, keepdim=True),
    ),
    layer(
        "only right for one row",
        "batch_invariance",
        before=lambda layer, x: x if len(x) == 1 else x + 0.1 * x.roll(1, 0),
    ),
    layer(
        "mask of the first row",
        "mask_broadcast",
        "batch_invariance",
        keep=lambda mask, past: None if mask is None else mask[:1],
    ),
    layer(
        "mask inverted", "mask_polarity", keep=lambda mask, past: None if mask is None else ~mask
    ),
    layer("mask ignored", "padding_content", "mask_polarity", keep=lambda mask, past: None),
    layer(
        "mask of the new tokens alone",
        "padding_content",
        keep=lambda mask, past: (
            mask
            if past is None or mask is None
            else mask | (torch.arange(mask.shape[-1]) < counted(past))
        ),
    ),
    layer(
        "mask hides with a small value",
        "mask_polarity",
        "padding_content",
        steps={
            "softmax": lambda x, keep: x.masked_fill(~keep, -20.0).softmax(-1),
            "clean": lambda x, keep: x,
        },
    ),
    layer(
        "positions count padding",
        "padding_side",
        before=padded_positions,
        after="transformers#22161",
    ),
    layer("x changed in place", "no_mutation", before=lambda layer, x: x.mul_(1.001)),
    layer(
        "smoothed over time",
        "causality_exact",
        after=lambda layer, x, out: out - 0.1 * out.mean(1, keepdim=True),
    ),
    layer(
        "attends to the next token",
        "causality_exact",
        before=lambda layer, x: x + 0.1 * torch.cat([x[:, 1:], x[:, -1:]], 1),
    ),
    layer("scaled by the width", "oracle_forward", steps={"scale": lambda q, k, v: 32**-0.5}),
    layer(
        "key heads tiled",
        "gqa_order",
        "oracle_forward",
        after="axlearn#842",
        steps={
            each: lambda k, heads: k.repeat(1, heads // k.shape[1], 1, 1)
            for each in ("expand", "expand_values")
        },
    ),
    layer(
        "half precision inside",
        "dtype_bound",
        before=lambda layer, x: x,
        after=lambda layer, x, out: out if x.dtype == torch.float32 else out + 0.5,
    ),
    layer(
        "strides of x assumed",
        "strides",
        before=lambda layer, x: torch.as_strided(
            x, x.shape, torch.empty(x.shape).stride(), x.storage_offset()
        ),
    ),
    Mutant("a weight outside the state", Outside, LAYER_LIKE, ("state_dict",), "mlx-lm#1623"),
    Mutant(
        "one key of the future, nothing to hook",
        partial(Raw, 1),
        {"width": 32, "causal": True, "window": 0},
        ("causality_exact", "visible_set_probe"),
    ),
    Mutant(
        "no causal rule, nothing to hook",
        partial(Raw, 99),
        {"width": 32, "causal": True, "window": 0},
        ("causality_exact", "visible_set_probe"),
    ),
    Mutant(
        "fused by head where blocked is declared",
        Fused,
        {"fused": "blocked", "causal": True, "window": 0, "pairing": "none"},
        ("named_heads",),
        "vllm#53114",
    ),
    Mutant(
        "converted without its biases",
        partial(Layer, bias=False),
        {**LAYER_LIKE, "reference": "mutants.layers:reference"},
        ("reference_parity",),
        "slapo#46",
    ),
]


class Latent(MLA):
    """MLA with something exchanged."""

    def __init__(self, **changes):
        super().__init__()
        for name, change in changes.items():
            object.__setattr__(self, name, partial(change, self))


def latent(name, *kills, after="", like=MLA_LIKE, **changes):
    return Mutant(name, partial(Latent, **changes), like, kills, after)


def transposed_up(self):
    return (
        self.up.weight.unflatten(0, (2 * self.nope, self.heads)).transpose(0, 1).split(self.nope, 1)
    )


def swapped_up(self):
    return MLA.matrices(self)[::-1]


def unnormed(self, q, q_rope, c, k_rope):
    return MLA.absorbed(self, q, q_rope, c / self.norm.weight, k_rope)


def unturned(self, q, q_rope, c, k_rope):
    return MLA.absorbed(self, q, torch.zeros_like(q_rope), c, k_rope)


def everything_seen(self, q, q_rope, c, k_rope):
    keep = {
        "attend": lambda q, k, v, f: Steps().run(
            q, k, v, None, False, None, f, None, None, 0.0, False
        )
    }
    twin = Latent(**{n: (lambda self, *a, f=f: f(*a)) for n, f in keep.items()})
    twin.load_state_dict(self.state_dict())
    return MLA.absorbed(twin, q, q_rope, c, k_rope)


class KeepsHeads(MLA):
    """Its cache holds the keys and values of every head."""

    def forward(self, x, past_kv=None, use_cache=False):
        q, q_rope = good.split(self.q(x), self.heads).split([self.nope, self.rope], -1)
        past = 0 if past_kv is None else past_kv[0].shape[2]
        at = torch.arange(past, past + x.shape[1])
        c, k_rope = self.held(x)
        k, v = good.split(self.up(c[:, 0]), self.heads).split([self.nope, self.nope], -1)
        k = torch.cat([k, rotated(k_rope, at).expand(-1, self.heads, -1, -1)], -1)
        k, v = good.append(past_kv, k, v)
        out = self.attend(
            torch.cat([q, rotated(q_rope, at)], -1), k, v, (self.nope + self.rope) ** -0.5
        )
        return (self.out(good.merge(out)), (k, v)) if use_cache else self.out(good.merge(out))


class TurnsQueriesAlone(MLA):
    """Its queries carry positions, and the key that all heads share does not."""

    def forward(self, x):
        q, q_rope = good.split(self.q(x), self.heads).split([self.nope, self.rope], -1)
        c, k_rope = self.held(x)
        q_rope = rotated(q_rope, torch.arange(x.shape[1]))
        return self.out(good.merge(self.expanded(q, q_rope, c, k_rope)))


class KeepsTurned(MLA):
    """Its cache holds the rotated key once for each head."""

    def forward(self, x, past_kv=None, use_cache=False):
        if past_kv is not None:
            past_kv = (past_kv[0], past_kv[1][:, :1])
        out, (c, k) = super().forward(x, past_kv, use_cache=True)
        return (out, (c, k.repeat(1, self.heads, 1, 1))) if use_cache else out


class NormedLate(MLA):
    """Its cache holds the latent before the norm; without a cache the norm comes first."""

    def held(self, x):
        c, k = self.down(x).split([self.rank, self.rope], -1)
        return (self.norm(c) if x.shape[1] > 1 else c)[:, None], k[:, None]


class Hoarder(Layer):
    """Returns its cache and all earlier ones."""

    def forward(self, x, mask=None, past_kv=None, use_cache=False):
        held = None if past_kv is None else past_kv[:2]
        out, past = super().forward(x, mask, held, use_cache=True)
        return (out, (*past, [past_kv])) if use_cache else out


class Stale(Cross):
    """Keeps the first sequence it is given."""

    def source(self, x, context):
        if context is None:
            return x
        self.first = getattr(self, "first", context)
        return self.first


class Itself(Cross):
    def source(self, x, context):
        return x


class Ordered(Cross):
    def source(self, x, context):
        return x if context is None else context + 0.1 * torch.arange(context.shape[1])[:, None]


LATENTS = [
    Mutant(
        "latent queries rotated alone",
        TurnsQueriesAlone,
        {name: value for name, value in MLA_LIKE.items() if not name.startswith("cache")},
        ("latent_positions",),
    ),
    latent(
        "absorbed scale of its own width",
        "mla_absorbed",
        after="ollama#13893",
        absorbed_scale=lambda self, wide: wide.shape[-1] ** -0.5,
    ),
    latent(
        "absorbed scale without the rotated part",
        "mla_absorbed",
        absorbed_scale=lambda self, wide: self.nope**-0.5,
    ),
    latent("absorbed matrices transposed", "mla_absorbed", matrices=transposed_up),
    latent("absorbed keys and values swapped", "mla_absorbed", matrices=swapped_up),
    latent("absorbed without its norm", "mla_absorbed", absorbed=unnormed),
    latent("absorbed without rotation", "mla_absorbed", absorbed=unturned),
    latent("absorbed attends to the future", "mla_absorbed", absorbed=everything_seen),
    Mutant("MLA caches keys and values", KeepsHeads, MLA_LIKE, ("cache_bytes",)),
    Mutant("MLA caches the rotated key for every head", KeepsTurned, MLA_LIKE, ("cache_bytes",)),
    Mutant("MLA norms a piece and not a token", NormedLate, MLA_LIKE, ("decode_equals_full",)),
    Mutant("a stale memory", Stale, {"pairing": "none"}, ("cross_attention",), "Self-Forcing#78"),
    Mutant("the other sequence is not read", Itself, {"pairing": "none"}, ("cross_attention",)),
    Mutant("the other sequence has positions", Ordered, {"pairing": "none"}, ("cross_attention",)),
]

MUTANTS = [*LAYERS, *LATENTS]
