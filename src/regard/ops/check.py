"""Checks of the arguments of `attend`. Errors state the rule, the values given, and a remedy."""

from functools import reduce
from operator import and_
from typing import NoReturn

import torch
from torch import Tensor

from regard.masks import (
    EVERYTHING,
    AllOf,
    AnyOf,
    BeyondData,
    Dense,
    Everything,
    Mask,
    Not,
    Nothing,
    Padding,
    Span,
)
from regard.ops.bias import Alibi, RelativeBias, ScoreBias
from regard.tracing import is_concrete

LARGEST_SCALE = 1e38  # of scores: kernels multiply it by log2(e) in float32, which ends at 3.4e38
POLARITIES = (
    "In torch's scaled_dot_product_attention and FlexAttention True means 'may attend', in "
    "nn.MultiheadAttention it means 'hidden'; Hugging Face's 2-D masks hold 1 for 'keep'."
)


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def refuse_jit_trace() -> None:
    """Refuse `torch.jit.trace`, whose program would be fixed to the lengths, mask and backend of
    this call."""
    if torch._C._get_tracing_state() is not None:
        raise ValueError(
            "torch.jit.trace keeps the lengths, the mask and the backend of one call for all "
            "others; use torch.export.export or torch.compile (for ONNX: torch.onnx.export(..., "
            "dynamo=True))"
        )


def refuse_layout(name: str, x: Tensor) -> NoReturn:
    """Refuse a tensor that is sparse or nested, and say how to make a dense one of it."""
    dense, got = f"{name}.to_dense()", str(x.layout)
    if x.is_nested:
        dense, got = f"torch.nested.to_padded_tensor({name}, 0.0)", "a nested one"
        dense += " and mask=Padding.from_lengths(lengths)"
    raise ValueError(f"{name} is a dense tensor, got {got}; give {dense}")


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuse queries, keys and values whose shapes, dtypes or devices do not fit."""
    refuse_jit_trace()
    named = {"q": q, "k": k, "v": v}
    for name, x in named.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is a tensor [B, heads, length, width], got {type(x).__name__}")
        if x.is_nested or x.layout is not torch.strided:
            refuse_layout(name, x)
        if x.dim() != 4:
            raise ValueError(
                f"{name} is [B, heads, length, width], got shape {tuple(x.shape)}; "
                "add the missing axes with unsqueeze"
            )
        if not x.is_floating_point():
            raise ValueError(f"{name} is floating point, got {x.dtype}; cast it first")
        if x.itemsize < 2:
            raise ValueError(f"{name} has 16 bits a number or more, got {x.dtype}; cast it first")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v have one dtype, got {_each(named, 'dtype')}; cast them")
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k and v are on one device, got {_each(named, 'device')}; move them")
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        raise ValueError(
            f"q, k and v have one batch size, got {q.shape[0]}, {k.shape[0]} and {v.shape[0]}; "
            "expand the smaller ones"
        )
    if k.shape[1:3] != v.shape[1:3]:
        raise ValueError(
            f"k and v have the same heads and keys, got {tuple(k.shape[1:3])} and "
            f"{tuple(v.shape[1:3])}; give one value for each key"
        )
    if q.shape[3] != k.shape[3]:
        raise ValueError(
            f"q and k have one head dim, got {q.shape[3]} and {k.shape[3]}; only v may differ"
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"the {q.shape[1]} heads of q are not a multiple of the {k.shape[1]} of k and v; "
            f"choose key heads from {divisors(q.shape[1])}"
        )
    if q.shape[3] == 0:
        raise ValueError("q and k have a head dim of 0; there is nothing to score with")


def _each(named: dict[str, Tensor], attribute: str) -> str:
    return ", ".join(f"{name} {getattr(x, attribute)}" for name, x in named.items())


def check_mask(mask: object) -> None:
    """Refuse masks that are not rules: the polarity of a tensor is ambiguous."""
    if isinstance(mask, Tensor):
        raise TypeError(
            f"mask is a rule, got a tensor of {mask.dtype}, shape {tuple(mask.shape)}; say what it "
            "means: Dense(keep) for [.., L, S] with True where a query may attend, Padding(valid) "
            "for [B, S] with True for real tokens, Dense.from_additive(t) for 0 and -inf. "
            + POLARITIES
        )
    if isinstance(mask, type):
        raise TypeError(f"mask is an object, got the class {mask.__name__}; call it")
    if not isinstance(mask, Mask):
        raise TypeError(
            f"mask is a Mask such as Causal() & Padding(valid), got {type(mask).__name__}; "
            "EVERYTHING hides nothing, Where(mask_mod) wraps a function"
        )


def check_mask_sizes(mask: Mask, batch: int, heads: int) -> None:
    """Refuse masks made for another batch size or another number of heads."""
    if not _serves(mask.batch, batch):
        raise ValueError(
            f"mask={mask!r} is for a batch of {mask.batch}, q of a batch of {batch}; "
            "give the mask one row for each sequence, or a single row for all"
        )
    if not _serves(mask.heads, heads):
        raise ValueError(
            f"mask={mask!r} is for {mask.heads} heads, q has {heads}; "
            "give the mask one plane for each query head, or a single one for all"
        )


def _serves(size: int | None, asked: int) -> bool:
    return size is None or size == 1 or size == asked  # `in` does not compare symbolic sizes


def check_options(
    *, dropout: float, softcap: float | None, precision: str, scale: float | None
) -> None:
    for name, value in (("scale", scale), ("softcap", softcap), ("dropout", dropout)):
        if isinstance(value, Tensor):
            raise TypeError(f"{name} is a number, got a tensor; multiply q by what is learned")
        if isinstance(value, str) or (value is None and name == "dropout"):
            raise TypeError(f"{name} is a number, got {value!r}")
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"dropout is a probability, 0 <= dropout < 1, got {dropout}; 0.0 is none")
    if softcap is not None and not 1 / LARGEST_SCALE <= softcap <= LARGEST_SCALE:
        raise ValueError(f"softcap is above 0 and finite in float32, got {softcap}; None for none")
    if precision not in ("strict", "fast"):
        raise ValueError(f"precision is 'strict' or 'fast', got {precision!r}")
    if scale is not None and not -LARGEST_SCALE <= scale <= LARGEST_SCALE:
        raise ValueError(
            f"scale is finite in float32, at most {LARGEST_SCALE:g} in size, got {scale}; None "
            "means head_dim ** -0.5"
        )


def check_sinks(sinks: object, q: Tensor) -> None:
    if sinks is None:
        return
    if not isinstance(sinks, Tensor):
        raise TypeError(f"sinks are a tensor [{q.shape[1]}], got {type(sinks).__name__}")
    if sinks.shape != (q.shape[1],):
        raise ValueError(
            f"sinks hold one score for each of the {q.shape[1]} query heads, "
            f"got shape {tuple(sinks.shape)}; give [{q.shape[1]}]"
        )
    if sinks.device != q.device:
        raise ValueError(f"sinks are on {sinks.device}, q is on {q.device}; move one of them")


def check_bias(bias: object, shape: tuple[int, int, int, int], device: torch.device) -> None:
    """Refuse biases that are neither rules nor tensors that broadcast to `[B, H, L, S]`."""
    if bias is None:
        return
    if not isinstance(bias, Tensor):
        kind = type(bias).__name__
        if not isinstance(bias, ScoreBias):
            raise TypeError(f"score_bias is a tensor or a rule such as Alibi, got {kind}")
        # not `in (1, shape[1])`: that finds no size which `torch.compile` leaves open
        if isinstance(bias, Alibi | RelativeBias) and 1 != bias.num_heads != shape[1]:
            raise ValueError(
                f"score_bias={bias!r} is for {bias.num_heads} heads, the call has {shape[1]} query "
                f"heads; give {kind} for {shape[1]}, or for 1, which broadcasts"
            )
        return
    if not bias.is_floating_point():
        raise ValueError(
            f"score_bias is added to the scores, got {bias.dtype}; a mask goes in mask=Dense(keep)"
        )
    if bias.device != device and bias.dim():
        raise ValueError(f"score_bias is on {bias.device}, q is on {device}; move one of them")
    check_broadcasts(bias, shape)


def check_broadcasts(bias: Tensor, shape: tuple[int, ...], rule: object | None = None) -> None:
    """Refuse a bias, of a rule or given, that does not broadcast to `[B, H, L, S]`."""
    sizes = tuple(bias.shape)
    target = shape[4 - len(sizes) :] if len(sizes) <= 4 else ()
    if len(sizes) > 4 or not all(map(_serves, sizes, target)):
        name = "score_bias" if rule is None else f"score_bias={rule!r}"
        raise ValueError(
            f"{name} broadcasts to [B, H, L, S] = {list(shape)}, got shape {list(sizes)}; "
            "its last axis is the keys, the one before the queries"
        )


def default_span(mask: Mask, score_bias: object, num_queries: int, num_keys: int) -> Span:
    """The span of a call without `span=`: queries and keys both begin at slot 0.

    With fewer queries than keys, a rule that depends on positions needs a span: to align the first
    query with the first key by accident is the most frequent causal-mask bug.
    """
    positionless = _positionless(mask) and (score_bias is None or isinstance(score_bias, Tensor))
    if num_queries != num_keys and not positionless:
        past = max(num_keys - num_queries, 0)
        what = f"mask={mask!r}" if not _positionless(mask) else f"score_bias={score_bias!r}"
        raise ValueError(
            f"{what} needs to know where {num_queries} queries stand among {num_keys} keys; give "
            f"span=Span(past, past + L, 0, S), here Span({past}, {past + num_queries}, 0, "
            f"{num_keys}) if these are the newest tokens"
        )
    return Span(0, num_queries, 0, num_keys)


def _positionless(mask: Mask) -> bool:
    """Whether a mask does not depend on the positions of the queries."""
    match mask:
        case Everything() | Nothing() | Padding() | Dense():
            return True
        case AllOf(parts=parts) | AnyOf(parts=parts):
            return all(map(_positionless, parts))
        case Not(mask=inner):
            return _positionless(inner)
    return False


def check_decodable(mask: Mask, span: Span) -> None:
    """Refuse masks under which a query may attend to keys that the cache does not hold: keys of
    later tokens, or keys that were dropped.

    Otherwise decoding would silently differ from one full forward.
    """
    low, high = mask.reach(span)
    ahead = high is None or high >= span.kv_stop
    if ahead and _shows(mask, span, span.kv_stop, span.kv_stop + span.num_queries + 8):
        raise ValueError(
            f"under mask={mask!r} keys from slot {span.kv_stop} on, which the cache does not hold "
            f"yet, are visible to queries {span.first_query}..{span.last_query}, so that decoding "
            "would differ from one full forward; intersect it with Causal(), or give all tokens "
            "that attend to each other, such as a prefix, in one call"
        )
    gone = low is None or low < span.kv_start
    if gone and _shows(mask, span, 0, span.kv_start):
        raise ValueError(
            f"under mask={mask!r} keys before slot {span.kv_start}, which the cache has dropped, "
            f"are visible to queries {span.first_query}..{span.last_query}; intersect it with "
            "SlidingWindow(size) no wider than the cache's, or use KVCache()"
        )


def check_window(mask: Mask, size: int) -> None:
    """Refuse a rule of distances that shows a query more than the last `size` tokens, which are all
    that a cache of this window keeps."""
    parts = mask.parts if isinstance(mask, AllOf) else (mask,)
    lasting = [part for part in parts if not isinstance(part, Padding)]  # it hides few tokens
    if not all(part.relative for part in lasting):
        return  # documents, say, may all be shorter than the window
    rule = reduce(and_, lasting, EVERYTHING)
    query = 2 * size  # a slot whose window does not begin with the first token
    span = Span(query, query + 1, 0, query + 1)
    low, _ = rule.reach(span)
    if (low is None or low <= query - size) and _shows(rule, span, 0, size + 1):
        raise ValueError(
            f"under mask={mask!r} a query may attend to more than {size} tokens, but the cache "
            f"keeps the last {size}: decoding would differ from one full forward once it is full; "
            "intersect it with SlidingWindow(size) no wider than the cache's, or use KVCache()"
        )


def _shows(mask: Mask, span: Span, start: int, stop: int) -> bool:
    """Whether any cell of keys start..stop is visible. Only opaque rules are evaluated: for others
    `reach` is exact."""
    if not mask.opaque:
        return True
    if torch.compiler.is_compiling() or start >= stop:
        return False
    outside = Span(span.first_query, span.last_query + 1, start, stop)
    try:
        cells = mask.dense(outside, batch=mask.batch or 1, heads=mask.heads or 1, device="cpu")
    except BeyondData:  # the data of the rule ends among these keys: test those before its end
        slots = range(start, stop) if stop - start > 1 else ()
        return any(_shows(mask, span, slot, slot + 1) for slot in slots)
    return is_concrete(cells) and bool(cells.any())
