"""Attention as an operation: `attend` is `prepare`, which checks and describes a call and chooses
its backend, and then `run`.
"""

from typing import Literal

from jaxtyping import Float
from torch import Tensor

from regard.cache import Part
from regard.masks import EVERYTHING, Mask, Span
from regard.ops.bias import ScoreBias
from regard.ops.memo import Arguments, prepare_call
from regard.ops.partial import Partial
from regard.ops.prepared import Prepared

Precision = Literal["strict", "fast"]


def attend(
    q: Float[Tensor, "B H L D"],
    k: Float[Tensor, "B G S D"],
    v: Float[Tensor, "B G S Dv"],
    *,
    mask: Mask | None = EVERYTHING,
    span: Span | None = None,
    scale: float | None = None,
    score_bias: Tensor | ScoreBias | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " H"] | None = None,
    dropout: float = 0.0,
    backend: str = "auto",
    precision: str = "strict",
) -> Float[Tensor, "B H L Dv"]:
    """Scaled dot-product attention, for any grouping of heads, any mask, any backend.

    Scores are `softcap(scale * q.k) + score_bias`; hidden ones are -inf; the softmax goes over the
    scores and the sinks; then dropout. A fully masked row is zeros with zero gradients.

    Args:
        q: queries, `[B, H, L, D]`. Query head `h` reads key head `h // (H // G)`.
        k: keys, `[B, G, S, D]`; G divides H.
        v: values, `[B, G, S, Dv]`, of any width.
        mask: a rule for which keys a query may attend to, never a tensor; all keys if None.
        span: the slots of these queries and keys in the sequence. May be left out when L == S, or
            when the mask does not depend on positions (`EVERYTHING`, `Padding`, `Dense`).
        scale: `D ** -0.5` if None.
        score_bias: a tensor that broadcasts to `[B, H, L, S]`, or a rule such as `Alibi`.
        softcap: Gemma 2's `softcap * tanh(score / softcap)`.
        sinks: a score for each head, `[H]`, that takes its share of the softmax, with a value of 0.
        dropout: probability; the caller passes 0.0 outside training.
        backend: `"auto"`, or a name; an objection of the named one is an error.
        precision: `"strict"` keeps products and softmax in float32 (float64 for float64).

    Returns:
        `[B, H, L, Dv]` in the dtype of `q`.

    Raises:
        TypeError: if `mask` is not a Mask.
        ValueError: if shapes, dtypes or options do not fit, or the backend objects.

    Examples:
        >>> import torch
        >>> from regard import Causal, attend
        >>> q, k, v = torch.randn(2, 8, 5, 16), torch.randn(2, 2, 5, 16), torch.randn(2, 2, 5, 16)
        >>> attend(q, k, v, mask=Causal()).shape
        torch.Size([2, 8, 5, 16])
    """
    mask = EVERYTHING if mask is None else mask
    options = mask, scale, score_bias, softcap, sinks, dropout, backend, precision
    prepared = prepare_call(Arguments(q, k, v, span, *options))
    return prepared.run(q, one_part(k, v, prepared.call.given_span))


def attend_partial(
    q: Float[Tensor, "B H L D"],
    k: Float[Tensor, "B G S D"],
    v: Float[Tensor, "B G S Dv"],
    *,
    mask: Mask | None = EVERYTHING,
    span: Span | None = None,
    scale: float | None = None,
    score_bias: Tensor | ScoreBias | None = None,
    softcap: float | None = None,
    backend: str = "auto",
) -> Partial:
    """Attention over some of the keys, to be merged with attention over the others.

    Takes neither sinks nor dropout: merge `Partial.of_sinks(sinks)` once.

    Args:
        q: queries, `[B, H, L, D]`.
        k: some of the keys, `[B, G, S, D]`.
        v: their values, `[B, G, S, Dv]`.
        mask: as for `attend`.
        span: the slots of all these queries and of these keys.
        scale: as for `attend`.
        score_bias: as for `attend`.
        softcap: as for `attend`.
        backend: as for `attend`; it must have a log-sum-exp.

    Returns:
        The output and the log-sum-exp, in float32 (float64 for float64) until merged and cast.

    Raises:
        TypeError, ValueError: as `attend`.

    Examples:
        >>> import torch
        >>> from regard import attend, attend_partial, merge
        >>> q, k, v = (torch.randn(1, 2, 3, 8) for _ in range(3))
        >>> halves = [attend_partial(q, k[:, :, s], v[:, :, s]) for s in (slice(0, 2), slice(2, 3))]
        >>> torch.allclose(merge(*halves).out, attend(q, k, v), atol=1e-6)
        True
    """
    mask = EVERYTHING if mask is None else mask
    options = mask, scale, score_bias, softcap
    prepared = prepare_call(Arguments(q, k, v, span, *options, backend=backend, partial=True))
    return prepared.partial(q, one_part(k, v, prepared.call.given_span))


def one_part(k: Tensor, v: Tensor, whole: Span) -> tuple[Part, ...]:
    """Check that one part holds the keys of the whole span, and return its keys and values."""
    if k.shape[2] != whole.num_keys:
        raise ValueError(
            f"k has {k.shape[2]} keys where span={whole} holds {whole.num_keys}; "
            f"give Span(q_start, q_stop, kv_start, kv_start + {k.shape[2]})"
        )
    return (Part(whole.kv_start, whole.kv_stop, (k, v)),)


def prepare(
    q: Float[Tensor, "B H L D"],
    k: Float[Tensor, "B G S D"],
    v: Float[Tensor, "B G S Dv"],
    *,
    mask: Mask | None = EVERYTHING,
    span: Span | None = None,
    scale: float | None = None,
    score_bias: Tensor | ScoreBias | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " H"] | None = None,
    dropout: float = 0.0,
    backend: str = "auto",
    precision: str = "strict",
    partial: bool = False,
) -> Prepared:
    """Check and describe a call, and choose its backend. Computes nothing.

    With a cache, `k` and `v` are those of the new tokens and `span` is `cache.span(L)`. Where the
    parts of the cache hold codes, or lie in pages, `run` chooses the backend for that.

    Args:
        q: queries, `[B, H, L, D]`.
        k: keys, `[B, G, L, D]` or more of them.
        v: values, `[B, G, L, Dv]`.
        mask: as for `attend`.
        span: as for `attend`.
        scale: as for `attend`.
        score_bias: as for `attend`.
        softcap: as for `attend`.
        sinks: as for `attend`.
        dropout: as for `attend`.
        backend: as for `attend`.
        precision: as for `attend`.
        partial: whether to exclude backends without a log-sum-exp.

    Raises:
        TypeError, ValueError: as `attend`.

    Examples:
        >>> import torch
        >>> from regard import Causal, KVCache, prepare
        >>> q, cache = torch.randn(1, 2, 3, 8), KVCache()
        >>> prepared = prepare(q, q, q, mask=Causal(), span=cache.span(3))
        >>> prepared.run(q, cache.update(q, q)).shape
        torch.Size([1, 2, 3, 8])
    """
    mask = EVERYTHING if mask is None else mask
    options = mask, scale, score_bias, softcap, sinks, dropout, backend, precision
    return prepare_call(Arguments(q, k, v, span, *options, partial))
