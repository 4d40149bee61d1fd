"""The description of a call of attention: everything a backend may read, and nothing that runs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from regard.cache import Part
from regard.cache.parts import TENSORS, AnyStream, Storage
from regard.constants import accumulating_dtype
from regard.masks import EVERYTHING, Mask, Span
from regard.masks.rules import MISTAKES
from regard.ops.bias import ScoreBias
from regard.ops.check import check_broadcasts
from regard.ops.partial import Partial
from regard.tracing import is_immediate

Reads = Mapping[type, Callable[[Sequence[AnyStream]], bool]]  # which streams of a class are read


class Backend(NamedTuple):
    """One way to compute attention.

    Attributes:
        objection: a sentence that says why it cannot run a call, or with `call.partial` why it has
            no log-sum-exp for it; None if it can. Where it has none, keys in several parts are
            concatenated first.
        estimate: seconds that a call is expected to take.
        run: the output, in the dtype of the queries.
        partial: the output and the log-sum-exp of the scores.
        reads: the classes of streams that it reads as they are stored, each with a function that
            says whether it reads these; others are copied to tensors first.
        note: a sentence on the precision that it gives up for a call, if it gives up any.
        run_parts: the output for keys that are stored in another way than in one part of tensors,
            or None, and then `run` or `partial` reads them part by part; None of a backend that
            always reads them so.
    """

    objection: "Callable[[Call], str | None]"
    estimate: "Callable[[Call], float]"
    run: "Callable[[Call, Tensor, Any, Any], Tensor]"
    partial: "Callable[[Call, Tensor, Any, Any], Partial]"
    reads: Reads = MappingProxyType({})
    note: "Callable[[Call], str | None] | None" = None
    run_parts: "Callable[[Call, Tensor, Sequence[Part]], Tensor | None] | None" = None


@dataclass(frozen=True, eq=False)
class Call:
    """The description of one attention call: shapes and rules. Made by `prepare`, never written to.

    Attributes:
        batch: batch size, B.
        num_heads: query heads, H.
        num_kv_heads: key/value heads, G.
        head_dim: size of a query and a key, D.
        v_head_dim: size of a value, Dv.
        dtype: dtype of the queries and of the output.
        device: device of the queries.
        given_mask: the mask as it was given.
        mask: the same, simplified inside `span`.
        given_span: the rectangle of queries and keys as it was given.
        span: the same, without keys that no query may attend to.
        scale: factor of the scores.
        score_bias: as for `attend`.
        softcap: as for `attend`.
        sinks: as for `attend`.
        dropout: as for `attend`.
        precision: as for `attend`.
        needs_grad: whether gradients are wanted of anything that the call reads.
        immediate: whether operators compute values now, on plain tensors: nothing is traced,
            transformed or differentiated in forward mode.
        joined: whether keys and values are one stream, the first `v_head_dim` columns of the keys
            being the values.
        partial: whether the log-sum-exp of the scores is wanted, too.
        storage: how the keys and values are stored: that of the parts that `Prepared.run` gets.

    Examples:
        >>> import torch
        >>> from regard import Causal, Span, prepare
        >>> q, k = torch.zeros(1, 4, 1, 8), torch.zeros(1, 2, 6, 8)
        >>> call = prepare(q, k, k, mask=Causal(), span=Span(5, 6, 0, 6)).call
        >>> call.group, call.mask  # the last query may attend to all keys
        (2, Everything())
    """

    batch: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype
    device: torch.device
    given_mask: Mask
    mask: Mask
    given_span: Span
    span: Span
    scale: float
    score_bias: Tensor | ScoreBias | None
    softcap: float | None
    sinks: Tensor | None
    dropout: float
    precision: str
    needs_grad: bool
    immediate: bool
    joined: bool = False
    partial: bool = False
    storage: Storage = TENSORS

    @property
    def num_queries(self) -> int:
        """The number of queries, L."""
        return self.span.num_queries

    @property
    def num_keys(self) -> int:
        """The number of keys inside `span`."""
        return self.span.num_keys

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.num_heads // self.num_kv_heads

    def at(self, span: Span) -> "Call":
        """This call, whose mask hides nothing, over another rectangle of as many queries."""
        return self.but(given_span=span, span=span)

    def but(self, **fields: Any) -> "Call":
        """A copy with some fields changed, in a fifth of the time of `dataclasses.replace`."""
        call = object.__new__(Call)
        vars(call).update(vars(self), **fields)
        return call

    def over(self, part: Part) -> "Call":
        """This call over one part of the keys."""
        joined = len(part.streams) == 1
        call = self if joined == self.joined else self.but(joined=joined)
        return call.of_keys(part.kv_start, part.kv_stop)

    def of_keys(self, kv_start: int, kv_stop: int) -> "Call":
        """This call over some of the keys."""
        if (kv_start, kv_stop) == (self.span.kv_start, self.span.kv_stop):
            return self
        span = replace(self.span, kv_start=kv_start, kv_stop=kv_stop)
        return self.but(span=span, mask=self.mask.within(span))

    def keys_and_values(self, part: Part) -> tuple[AnyStream, AnyStream]:
        """The keys and values of a part with two streams, or with one stream of both.

        Of a single tensor the first columns are the values; another single stream is returned
        twice.
        """
        k, *rest = part.stored
        if rest:
            return k, rest[0]
        return k, k[..., : self.v_head_dim] if isinstance(k, Tensor) else k

    def keep(self) -> Bool[Tensor, "..."]:
        """The mask as a tensor that broadcasts to `[B, H, L, S]`; at least two-dimensional."""
        return self.mask.dense(
            self.span, batch=self.batch, heads=self.num_heads, device=self.device
        )

    def bias(self) -> Float[Tensor, "..."] | None:
        """The bias of this span's scores, which broadcasts to `[B, H, L, S]`; None without one.

        In the dtype of the scores: float32, or float64 for float64 queries.
        """
        bias, dtype = self.score_bias, accumulating_dtype(self.dtype)
        if bias is None:
            return None
        if not isinstance(bias, Tensor):
            return self._bias_of(bias, dtype)
        if bias.dim() and bias.shape[-1] != 1:
            bias = bias.narrow(-1, self.span.kv_start - self.given_span.kv_start, self.num_keys)
        return bias.to(dtype)

    def _bias_of(self, rule: ScoreBias, dtype: torch.dtype) -> Tensor:
        """The tensor of a rule for biases. A rule of a user may raise or return a wrong shape."""
        try:
            bias: object = rule.bias(self.span, device=self.device, dtype=dtype)
        except torch.OutOfMemoryError:
            raise
        except MISTAKES as error:
            raise ValueError(
                f"score_bias={rule!r} raised {type(error).__name__} ({error}); a rule has "
                "bias(span, *, device, dtype), which returns a tensor for [B, H, L, S]"
            ) from error
        if not isinstance(bias, Tensor):
            raise TypeError(f"score_bias={rule!r} returned {type(bias).__name__}, not a tensor")
        shape = (self.batch, self.num_heads, self.num_queries, self.num_keys)
        check_broadcasts(bias, shape, rule)
        return bias.to(dtype)


def begins_with(k: Tensor, v: Tensor) -> bool:
    """Whether the values are a view of the first columns of the keys, as those of latents are."""
    if v.shape[-1] >= k.shape[-1] or v.stride() != k.stride() or v.stride(-1) != 1:
        return False
    return is_immediate(k, v) and v.data_ptr() == k.data_ptr()


def narrowed(span: Span, mask: Mask) -> Span:
    """The span without the keys before the first and after the last that `mask` may show."""
    if torch.compiler.is_exporting():  # one program serves every length
        return span
    low, high = mask.reach(span)
    start = span.kv_start if low is None else max(span.kv_start, low)
    stop = span.kv_stop if high is None else min(span.kv_stop, high + 1)
    start = min(start, span.kv_stop)  # no key is visible: an empty range inside the span
    stop = max(start, stop)
    if (start, stop) == (span.kv_start, span.kv_stop):
        return span
    return replace(span, kv_start=start, kv_stop=stop)


def shown(value: float | None) -> str:
    """A number in a message; inside a compiled graph it may be symbolic, and has no digits."""
    return "a number" if torch.compiler.is_compiling() else str(value)


def is_everything(mask: Mask) -> bool:
    """Whether the mask hides nothing."""
    return mask is EVERYTHING or mask == EVERYTHING


def hides_nothing(call: Call) -> bool:
    """Whether no score can be -inf: nothing is masked, and there is no bias to hide with."""
    return call.score_bias is None and is_everything(call.mask) and call.num_keys > 0


def is_empty(call: Call) -> bool:
    """Whether there is nothing to compute: no batch, no query, or no visible key."""
    return 0 in (call.batch, call.num_queries, call.num_keys)
