"""Which backend runs, what the mask became, why others do not run; and the attention weights."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from regard.cache import Part
from regard.masks import EVERYTHING, Dense, Mask, Span
from regard.ops.attend import one_part, prepare
from regard.ops.backends import BACKENDS
from regard.ops.backends.common import without_hidden
from regard.ops.bias import ScoreBias
from regard.ops.blocks import Block, part_of
from regard.ops.call import Call, is_everything
from regard.ops.choose import objection_of, seconds_of
from regard.ops.definition import scores, softmax
from regard.ops.estimates import rates_note
from regard.ops.memo import Arguments, prepare_call
from regard.ops.parts import concatenated, reading_of, visible_parts
from regard.ops.prepared import Prepared
from regard.tracing import without_autocast
from regard.words import counted


def explain(
    q: Tensor | Prepared, k: Tensor | None = None, v: Tensor | None = None, **options: object
) -> str:
    """Say which backend a call gets, what its mask became, and why the others do not run.

    Args:
        q: queries, or what `prepare` returned.
        k: keys.
        v: values.
        **options: keyword arguments of `attend`.

    Raises:
        TypeError, ValueError: as `attend`.

    Examples:
        >>> import torch
        >>> from regard import Causal, Span, explain
        >>> q, k = torch.zeros(1, 32, 1, 64), torch.zeros(1, 8, 4097, 64)
        >>> print(explain(q, k, k, mask=Causal(), span=Span(4096, 4097, 0, 4097)).splitlines()[0])
        1 query x 4,097 keys, 32 heads on 8, head dim 64, float32, cpu
    """
    if isinstance(q, Prepared):
        return str(explanation(q))
    if k is None or v is None:
        raise TypeError("explain() takes q, k and v as attend does, or what prepare() returned")
    return str(explanation(prepare(q, k, v, **options)))  # type: ignore[arg-type]


def kernel_objection() -> str | None:
    """Why `fused`, the compiled kernel, cannot run the smallest decoding step; None if it can."""
    with torch.no_grad():
        q = torch.zeros(1, 1, 1, 16, dtype=torch.float32, device="cpu")
        return objection_of(prepare(q, q, q).call, "fused")


@dataclass(frozen=True)
class Verdict:
    """The objection of a backend to a call, or the seconds that it is expected to take."""

    name: str
    objection: str | None
    seconds: float | None

    def __str__(self) -> str:
        if self.seconds is None:
            return f"objects: {self.objection}"
        if self.seconds < 1:
            return f"about {1e3 * self.seconds:.3g} ms"
        return f"about {self.seconds:,.{0 if self.seconds >= 100 else 1}f} s"


@dataclass(frozen=True)
class Explanation:
    """The result of `explain` as data; `str()` gives its lines.

    Args:
        batch, queries, num_heads, num_kv_heads, head_dim, v_head_dim, dtype, device: of the call.
        keys: of the call, with those that are not read.
        asked: the mask as it was given.
        mask: the mask on these slots.
        kv_start: the slot of the first key that is read.
        kv_stop: one past the last one.
        runs: the backend that runs.
        backends: a verdict of each.
        note: the precision that the backend gives up, in a sentence; None if it gives up none.
        rates: what the estimates rest on; None on a CPU.
        parts: how keys in several parts are read; None if they lie in one.
    """

    batch: int
    queries: int
    keys: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: str
    device: str
    asked: str
    mask: str
    kv_start: int
    kv_stop: int
    runs: str
    backends: tuple[Verdict, ...]
    note: str | None
    rates: str | None
    parts: str | None = None

    def __str__(self) -> str:
        queries = counted(self.queries, "query", "queries")
        values = f" (values {self.v_head_dim})" if self.v_head_dim != self.head_dim else ""
        lines = [
            f"{queries} x {self.keys:,} keys, {self.num_heads} heads on {self.num_kv_heads}, "
            f"head dim {self.head_dim}{values}, {self.dtype}, {self.device}",
            f"mask     {self.asked}" + f"  ->  {self.mask} here" * (self.asked != self.mask),
        ]
        if (read := self.kv_stop - self.kv_start) != self.keys:
            slots = f"slots {self.kv_start}..{self.kv_stop - 1}"
            lines.append(f"keys     {read:,} are read: {slots}")
        if self.parts:
            lines.append(f"parts    {self.parts}")
        for each in self.backends:
            runs = "runs, " if each.name == self.runs else ""
            lines.append(f"{each.name:<8} {runs}{each}")
        ends = (("fast", self.note), ("rates", self.rates))
        return "\n".join([*lines, *(f"{name:<8} {text}" for name, text in ends if text)])


def explanation(prepared: Prepared) -> Explanation:
    """Which backend a prepared call gets, and why, as data."""
    call, note = prepared.call, prepared.backend.note
    return Explanation(
        batch=call.batch,
        queries=call.given_span.num_queries,
        keys=call.given_span.num_keys,
        num_heads=call.num_heads,
        num_kv_heads=call.num_kv_heads,
        head_dim=call.head_dim,
        v_head_dim=call.v_head_dim,
        dtype=str(call.dtype).removeprefix("torch."),
        device=str(call.device),
        asked=repr(call.given_mask),
        mask=repr(call.mask),
        kv_start=call.span.kv_start,
        kv_stop=call.span.kv_stop,
        runs=prepared.name,
        backends=tuple(_verdict(call, name) for name in BACKENDS),
        note=None if note is None else note(call),
        rates=rates_note(call.device),
        parts=reading_of(call, prepared.backend) if call.storage.several else None,
    )


def _verdict(call: Call, name: str) -> Verdict:
    objection = objection_of(call, name)
    return Verdict(name, objection, None if objection else seconds_of(call, BACKENDS[name]))


def attention_weights(
    q: Float[Tensor, "B H L D"],
    k: Float[Tensor, "B G S D"],
    *,
    mask: Mask | None = EVERYTHING,
    span: Span | None = None,
    scale: float | None = None,
    score_bias: Tensor | ScoreBias | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " H"] | None = None,
    heads: Sequence[int] | None = None,
    queries: Sequence[int] | None = None,
) -> Float[Tensor, "B Hs Ls S"]:
    """The attention weights, `softmax(scale * q.k)`, of all rows or of chosen ones.

    Rows sum to 1 minus the weights of the sinks; fully masked rows are 0. Dropout is not applied.

    Args:
        q: queries, `[B, H, L, D]`.
        k: keys, `[B, G, S, D]`.
        mask: as for `attend`.
        span: as for `attend`.
        scale: as for `attend`.
        score_bias: as for `attend`.
        softcap: as for `attend`.
        sinks: as for `attend`.
        heads: compute the rows of these heads only; of all if None.
        queries: compute the rows of these queries only, counted from the first of the call.

    Returns:
        `[B, len(heads), len(queries), S]` in the dtype of `q`.

    Raises:
        TypeError, ValueError: as `attend`.
        IndexError: for a head or query that is not there.

    Examples:
        >>> import torch
        >>> from regard import Causal, attention_weights
        >>> q = torch.randn(1, 4, 6, 8)
        >>> attention_weights(q, q, mask=Causal(), heads=[2], queries=[0]).tolist()
        [[[[1.0, 0.0, 0.0, 0.0, 0.0, 0.0]]]]
    """
    options = EVERYTHING if mask is None else mask, scale, score_bias, softcap, sinks
    call = prepare_call(Arguments(q, k, k, span, *options, backend="eager")).call
    one_part(k, k, call.given_span)  # refuses another number of keys
    whole = call.but(span=call.given_span, mask=call.given_mask.within(call.given_span))
    rows = [whole] if queries is None else [_row(whole, int(index)) for index in queries]
    chosen = range(q.shape[1]) if heads is None else [int(head) for head in heads]
    if not (rows and chosen):
        height = q.shape[2] if queries is None else len(rows)
        return q.new_zeros(len(q), len(chosen), height, k.shape[2])
    with without_autocast(q.device):
        return torch.cat([_chosen(row, q, k, heads) for row in rows], dim=2)


def _row(call: Call, index: int) -> Call:
    """The same call for one of its queries."""
    if not -call.num_queries <= index < call.num_queries:
        raise IndexError(f"queries={index} is not among the {call.num_queries} queries of q")
    span = call.span
    keys = [(span.kv_start, span.kv_stop)]
    rows, first = (0, call.batch), index % call.num_queries
    return part_of(call, Block(rows, first, 1, keys, span.kv_start, call.mask, aligned=False))


def _chosen(call: Call, q: Tensor, k: Tensor, heads: Sequence[int] | None) -> Tensor:
    """The weights of the chosen heads, for the queries of this call."""
    first = call.span.first_query - call.given_span.first_query
    q = q.narrow(2, first, call.num_queries)
    k, _ = without_hidden(call, k, k)
    if heads is not None:
        index = _head_index(heads, call)
        q, k = q[:, index], k[:, index // call.group]
        call = _of_heads(call, index)
    return softmax(call, scores(call, q, k)).to(call.dtype)


def _head_index(heads: Sequence[int], call: Call) -> Tensor:
    for head in heads:
        if not -call.num_heads <= head < call.num_heads:
            raise IndexError(f"heads={head} is not among the {call.num_heads} heads of q")
    return torch.tensor([h % call.num_heads for h in heads], dtype=torch.long, device=call.device)


def _of_heads(call: Call, index: Tensor) -> Call:
    """The call with its mask and bias made dense for some heads, each with its own key head."""

    def select(x: Tensor) -> Tensor:
        return x if x.dim() < 3 or x.shape[-3] == 1 else x.index_select(-3, index)

    mask, bias = call.mask, call.bias()
    return call.but(
        num_heads=len(index),
        num_kv_heads=len(index),
        mask=mask if is_everything(mask) else Dense(select(call.keep())).within(call.span),
        score_bias=None if bias is None else select(bias),
        sinks=None if call.sinks is None else call.sinks[index],
        given_span=call.span,
    )


def weights_of(
    prepared: Prepared, q: Float[Tensor, "B H L D"], parts: Iterable[Part]
) -> Float[Tensor, "B H L S"]:
    """The weights of a prepared call over all the keys of its rectangle, hidden ones 0."""
    whole = prepared.call.given_span
    part = concatenated(visible_parts(prepared.span, parts))
    call = prepared.call.over(part)
    k = part.streams[0]
    k, _ = without_hidden(call, k, k)
    with without_autocast(call.device):
        weights = softmax(call, scores(call, q, k)).to(call.dtype)
    return F.pad(weights, (call.span.kv_start - whole.kv_start, whole.kv_stop - call.span.kv_stop))
