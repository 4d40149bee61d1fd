"""Calls of a drawn attention: how it is built, and inputs with what each query may see."""

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from strangers.draw import Drawing
from strangers.forwards import SECOND
from strangers.write import Source

WIDTH, HEADS, GROUPS, OWN = 24, 4, 2, 8
BATCH, LENGTH, OTHER = 3, 5, 7
WINDOW = 2
NOPE, ROPE, VALUE, KV_RANK, Q_RANK = 6, 4, 5, 10, 9


def load(source: Source) -> Any:
    """The attention of a source: a class or a function."""
    module = ModuleType("stranger")
    module.__dict__["__name__"] = "stranger"
    exec(compile(source.text, "stranger.py", "exec"), module.__dict__)
    return getattr(module, source.name)


def build(drawing: Drawing, made: Any, *, rate: float = 0.0) -> Any:
    """A module of a class, or the function as it is."""
    if drawing.family == "function":
        return made
    d, values = drawing, {}
    values |= {
        "d_in": WIDTH,
        "d_out": WIDTH,
        d.width_name: WIDTH,
        d.heads_name: HEADS,
        d.kv_name: GROUPS,
    }
    values |= {d.dim_name: NOPE if d.family == "latent" else OWN}
    for name in ("context_dim", "cross_dim", "kv_dim"):
        values[name] = WIDTH
    for name in ("bias", "qkv_bias", "use_bias"):
        values[name] = d.bias
    for name in ("dropout", "attn_dropout", "dropout_rate", "drop"):
        values[name] = rate
    for name in ("context_length", "block_size", "max_seq_len", "max_len"):
        values[name] = 32
    values |= {"kv_lora_rank": KV_RANK, "d_latent": KV_RANK, "q_lora_rank": Q_RANK}
    values |= {"d_q_latent": Q_RANK, "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE}
    for name in ("window_size", "window", "local_window", "attn_window", "chunk_size"):
        values[name] = WINDOW
    values |= {"v_head_dim": VALUE, "causal": True, "is_causal": True}
    parameters = inspect.signature(made.__init__).parameters
    if d.config == "plain":
        return made(**{name: values[name] for name in parameters if name in values})
    name = next(each for each in parameters if each not in ("self", "layer_idx"))
    if d.config == "dict":
        return made(values)
    if d.config == "namespace":
        return made(SimpleNamespace(**values))
    own = parameters[name].annotation
    return made(own(**{each.name: values[each.name] for each in dataclasses.fields(own)}))


@dataclass(frozen=True)
class Case:
    """One call, or the pieces of one.

    Attributes:
        inputs: queries, keys and values, each [B, L, E]; of functions [B, H, L, D].
        mask: [B, L, S], true where visible, or None.
        rows: [B, S], or None: the second mask.
        causal: whether the call asks for it (or the module has it).
        pieces: where the sequence is cut, of modules with a cache.
        window: tokens of a block, of which a token sees its own and the one before; or 0.
    """

    inputs: tuple[Tensor, Tensor, Tensor]
    mask: Tensor | None
    rows: Tensor | None
    causal: bool
    pieces: tuple[int, ...] = ()
    window: int = 0

    def visible(self) -> Tensor:
        """[B, L, S], true where a key has a weight."""
        q, k = self.inputs[:2]
        rows, columns = q.shape[-2], k.shape[-2]
        shown = torch.ones(q.shape[0], rows, columns, dtype=torch.bool)
        if self.causal:
            shown &= torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)
        if self.window:
            block = torch.arange(columns) // self.window
            shown = shown & (block[:, None] - block <= 1)
        if self.mask is not None:
            shown = shown & self.mask
        if self.rows is not None:
            shown = shown & self.rows[:, None]
        start = 0
        for end in self.pieces:
            shown[:, start:end, end:] = False
            start = end
        return shown


def cases(drawing: Drawing, seed: int = 0) -> list[Case]:
    """Calls with and without each mask and rule that this attention knows."""
    d, generator = drawing, torch.Generator().manual_seed(seed)
    crossed = d.family in ("cross", "qkv", "function", "kernel")
    always = d.causal in ("buffer", "built", "option", "blocks")
    flags = [False, True] if d.causal == "argument" else [always]
    found = []
    if d.optional_context:
        found += cases(replace(d, family="layer", optional_context=False), seed + 1)
    for longer in [False, True] if crossed else [False]:
        for causal in flags:
            for first in [False, True] if d.masked else [False]:
                for second in [False, True] if d.second != "none" else [False]:
                    if d.required_mask and not first:
                        continue
                    cuts = [(LENGTH,), (2, 3, LENGTH)] if d.cache != "none" else [()]
                    for pieces in cuts:
                        inputs = _inputs(d, longer, generator)
                        window = WINDOW if d.causal == "blocks" else 0
                        case = Case(inputs, None, None, causal, pieces, window)
                        found += [_masked(d, case, first, second, generator)]
    return found


def _inputs(d: Drawing, longer: bool, generator: torch.Generator) -> tuple[Tensor, ...]:
    keys = OTHER if longer else LENGTH

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    if d.family in ("function", "kernel"):
        groups = GROUPS if d.kind == "GQA" else HEADS
        return (
            draw(BATCH, HEADS, LENGTH, OWN),
            draw(BATCH, groups, keys, OWN),
            draw(BATCH, groups, keys, OWN),
        )
    x = draw(BATCH, 3 * WINDOW if d.multiples else LENGTH, WIDTH)
    if d.family == "qkv":
        return x, draw(BATCH, keys, WIDTH), draw(BATCH, keys, WIDTH)
    if d.family == "cross":
        other = draw(BATCH, keys, WIDTH)
        return x, other, other
    return x, x, x


def _masked(d: Drawing, case: Case, first: bool, second: bool, generator: Any) -> Case:
    """The case with random masks that leave each query a key."""
    columns = case.inputs[1].shape[-2]
    mask = rows = None
    if first:
        shape = {"LS": (1, LENGTH, columns), "BS": (BATCH, 1, columns)}
        mask = torch.rand(shape.get(d.mask_shape, (BATCH, LENGTH, columns)), generator=generator)
        mask = (mask < 0.6).expand(BATCH, LENGTH, columns).clone()
        mask[..., 0] = True
    if second:
        rows = torch.rand((BATCH, columns), generator=generator) < 0.6
        rows[:, 0] = True
    return replace(case, mask=mask, rows=rows)


def encoded(d: Drawing, mask: Tensor) -> Tensor:
    """A mask [B, L, S], in this attention's own form."""
    mask = {"LS": mask[0], "BS": mask[:, 0], "BLS": mask, "B1LS": mask[:, None]}[d.mask_shape]
    if d.family in ("function", "kernel") and d.layout == "BLD" and d.mask_shape == "BLS":
        mask = mask.contiguous()
    if d.mask == "additive":
        least = torch.finfo(torch.float64).min
        return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, least)
    return {
        "keep": mask, "hide": ~mask, "zeros hide": mask.long(), "ones hide": (~mask).long(),
    }[d.mask].clone()  # fmt: skip


def call(
    drawing: Drawing, attention: Any, case: Case
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """The output [B, L, E] (or [B, H, L, D]), and the tensors that were given with their copies."""
    d = drawing
    if d.family in ("function", "kernel"):
        return _call_plain(d, attention, case)
    turn = (lambda x: x) if d.batch_first else (lambda x: x.transpose(0, 1))
    parameters = [*inspect.signature(attention.forward).parameters]
    outs, given, past, start = [], [], None, 0
    if d.cache == "object":
        name = next(
            n for n in ("cache", "kv_cache", "past_key_value", "past_key_values") if n in parameters
        )
        past = cache_of(attention)
    for end in case.pieces or (case.inputs[0].shape[1],):
        keywords: dict[str, Any] = _sources(d, parameters, case, start, end, turn)
        if case.mask is not None:
            columns = end if case.pieces else case.mask.shape[-1]
            keywords[d.mask_name] = encoded(d, case.mask[:, start:end, :columns])
        if case.rows is not None:
            name = next(n for n in SECOND[d.second] if n in parameters)
            keywords[name] = case.rows.clone() if d.second == "keep" else ~case.rows
        if d.causal == "argument":
            keywords["is_causal" if "is_causal" in parameters else "causal"] = case.causal
        if d.rope == "given":
            keywords["position_embeddings"] = cosines(d, start, end)
        if d.rope == "complex":
            keywords["freqs_cis"] = turns(d, start, end)
        if d.cache == "object":
            keywords[name] = past
        if d.cache == "tuple":
            name = next(n for n in parameters if n in PASTS)
            keywords[name] = past
        given += copies(keywords)
        result = attention(**keywords)
        out = result[0] if isinstance(result, tuple) else result
        past = result[-1] if d.cache == "tuple" else past
        outs += [turn(out)]
        start = end
    return torch.cat(outs, 1), given


PASTS = ("past_kv", "layer_past", "past_key_value", "kv_cache", "cache")


def cache_of(attention: Any) -> Any:
    """An empty cache of the class in the attention's file."""
    names = ("KVCache", "Cache", "KeyValueCache", "DynamicCache")
    home = type(attention).forward.__globals__
    return next(home[name] for name in names if name in home)()


def turns(d: Drawing, start: int, end: int) -> Tensor:
    """exp(i angle) [L, D / 2] of positions, in complex64."""
    cos, sin = cosines(d, start, end)
    half = cos.shape[-1] // 2
    return torch.complex(cos[0, :, :half].float(), sin[0, :, :half].float())


def cosines(d: Drawing, start: int, end: int) -> tuple[Tensor, Tensor]:
    """cos and sin [B, L, D] of positions."""
    width = OWN if d.own_width else WIDTH // (1 if d.kind == "single" else HEADS)
    freqs = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.arange(start, end, dtype=torch.float64)[:, None] * freqs
    angles = torch.cat([angles, angles], -1).expand(BATCH, -1, -1)
    return angles.cos(), angles.sin()


def copies(keywords: dict[str, Any]) -> list[tuple[Tensor, Tensor]]:
    """Each tensor, and a copy of it."""
    return [(each, each.detach().clone()) for each in keywords.values() if isinstance(each, Tensor)]


def _sources(
    d: Drawing, parameters: list[str], case: Case, start: int, end: int, turn: Callable
) -> dict[str, Any]:
    q, k, v = (turn(each).clone() for each in case.inputs)
    if d.family == "qkv":
        names = ("query", "key", "value") if "query" in parameters else ("q", "k", "v")
        return dict(zip(names, (q, k, v), strict=True))
    if d.family == "cross":
        both = dict(zip(parameters[:2], (q, k), strict=True))
        alone = d.optional_context and case.inputs[0] is case.inputs[1]
        return {parameters[0]: q} if alone else both
    return {parameters[0]: turn(case.inputs[0][:, start:end]).clone()}


def _call_plain(
    d: Drawing, attention: Any, case: Case
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """A function, or a module without weights."""
    home = attention.forward if isinstance(attention, nn.Module) else attention
    parameters = [*inspect.signature(home).parameters]
    to = {
        "BHLD": lambda x: x,
        "BLHD": lambda x: x.transpose(1, 2),
        "BLD": lambda x: x.flatten(0, 1),
    }[d.layout]
    keywords = dict(zip(parameters[:3], (to(x).clone() for x in case.inputs), strict=True))
    if case.mask is not None:
        mask = case.mask
        if d.layout == "BLD":
            mask = mask.repeat_interleave(HEADS, 0)
        keywords[d.mask_name] = encoded(d, mask)
    if d.causal == "argument":
        keywords["is_causal" if "is_causal" in parameters else "causal"] = case.causal
    given = copies(keywords)
    result = attention(**keywords)
    out = result[0] if isinstance(result, tuple) else result
    back = {
        "BHLD": lambda x: x,
        "BLHD": lambda x: x.transpose(1, 2),
        "BLD": lambda x: x.unflatten(0, (BATCH, HEADS)),
    }[d.layout]
    return back(out), given
