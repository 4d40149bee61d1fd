"""A cache of all tokens of a text, until those that are not needed are evicted from each head.

Heads of a condensed cache hold different numbers of tokens, so each has a cache of its own.
"""

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.cache import Part
from regard.cache.files import is_naturals
from regard.cache.paging.formats import PageFormat, format_of
from regard.cache.saving import Record
from regard.cache.stored import Stored
from regard.cache.streams import Lengths
from regard.masks import Span
from regard.ops.prepared import Prepared
from regard.sparse.attention import Sparse, attended_rows
from regard.sparse.evicting import Evicting, EvictingCache
from regard.sparse.quantized import QuantizedEvicting
from regard.sparse.scores import Streaming

_ALL = 1.0  # the budget of a head's cache, which evicts nothing by itself


class CondensingCache(Stored, Sparse):
    """A cache that holds all tokens until `condense`, which leaves each key head those it needs.

    Later tokens are all held, and may be condensed again. Slots, masks and rotary positions count
    all tokens seen. A batch has the same number of tokens in all rows of a key head. Without
    gradients.

    A layer attends through `attend`, and a model of transformers needs `regard.hf.install`.

    Args:
        format: of codes that store the tokens, such as `"K8V4"`; None for values as they are.

    Raises:
        ValueError: if `format` is none of `QuantizedCache`.

    Examples:
        >>> import torch
        >>> from regard import Attention, Causal, Rotary
        >>> from regard.sparse import CondensingCache, condense
        >>> layer = Attention(32, 4, num_kv_heads=2, rope=Rotary(8), mask=Causal()).eval()
        >>> cache, x = CondensingCache(), torch.randn(1, 100, 32)
        >>> def repeat():
        ...     before = cache.snapshot()
        ...     layer(x, cache=cache)
        ...     cache.restore(before)
        >>> with torch.no_grad():
        ...     _ = layer(x, cache=cache)
        ...     condense([cache], repeat, budget=0.5)
        >>> cache.length, sum(cache.rows)  # tokens seen, and held by both key heads
        (100, 100)
    """

    def __init__(self, format: str | PageFormat | None = None) -> None:
        super().__init__()
        self.format = None if format is None else format_of(format)
        self._heads: tuple[Evicting, ...] = ()  # the tokens of each key head; () before the first
        self._parts: tuple[Part, ...] = ()  # of the heads, that their caches returned last
        self._returned: Part | None = None  # what `update` returned last
        # [B, n] of each head while `condense` runs, the most attention of one query; else empty.
        # Its items are replaced: a snapshot that is restored meanwhile has the same list
        self._attention: list[Tensor] = []
        self._head()

    @property
    def heads(self) -> tuple[Evicting, ...]:
        """The caches of the key heads, which hold different tokens; () before the first tokens."""
        return self._heads

    @property
    def is_observed(self) -> bool:
        """Whether the attention that rows receive is noted, as `condense` asks for."""
        return bool(self._attention)

    @property
    def rows(self) -> tuple[int, ...]:
        """The number of tokens held for each key head."""
        return tuple(each.rows for each in self._heads)

    @property
    def slots(self) -> tuple[Int[Tensor, "B _"], ...]:
        """The slots of the tokens held for each key head."""
        return tuple(each.slots[:, 0] for each in self._heads if each.slots is not None)

    @property
    def length(self) -> int:
        """The number of tokens seen."""
        return self.lengths.longest

    @property
    def lengths(self) -> Lengths:
        return self._heads[0].lengths if self._heads else self._lengths

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self._heads)

    @property
    def allocated_bytes(self) -> int:
        return sum(each.allocated_bytes for each in self._heads)

    @property
    def empty_streams(self) -> tuple[Tensor, ...]:
        streams = zip(*(each.empty_streams for each in self._heads), strict=True)
        return tuple(torch.cat(each, 1) for each in streams)

    @property
    def arguments(self) -> dict[str, Any]:
        return {"format": None if self.format is None else self.format.name}

    def describe(self) -> str:
        """As of other caches, and the rows held for each key head."""
        rows = ", ".join(f"{each:,}" for each in self.rows)
        return super().describe() + (f"\n  rows held for each key head: {rows}" if rows else "")

    def span(self, new: int) -> Span:
        """The slots of a call with `new` more tokens: masks count all tokens seen."""
        return Span(self.length, self.length + new, 0, self.length + new)

    def update(self, *new: Tensor) -> tuple[Part, ...]:
        """Append `[B, G, L, W]` streams; return those of the new tokens, as one part.

        Of a single key head all rows are returned; those of several heads `attend` reads.

        Raises:
            ValueError: as `EvictingCache.update`.
        """
        heads = self._heads or self._new_heads(new)
        start = self.length
        self._parts = _of_heads(heads, "update", new)
        self._heads = heads
        several = Part(start, self.length, tuple(new))
        self._returned = several if len(heads) > 1 else self._parts[0]
        return (self._returned,)

    def count(self, new: int) -> None:
        """Count tokens that have been written to the buffers of all heads, after their rows."""
        for head in self._heads:
            head.count(new)

    def peek(self, *new: Tensor) -> tuple[Part, ...]:
        """The result of `update`, without changing the cache."""
        heads = self._heads or self._new_heads(new)
        parts = _of_heads(heads, "peek", new)
        several = Part(self.length, parts[0].kv_stop, tuple(new))
        return (several if len(heads) > 1 else parts[0],)

    def attend(
        self, prepared: Prepared, q: Tensor, parts: Iterable[Part], sinks: Tensor | None
    ) -> Tensor:
        """Attention of `q` to the rows of each key head, `[B, H, L, Dv]`.

        Args:
            prepared: the call over the slots of all tokens seen, without sinks.
            q: queries of the new tokens, `[B, H, L, D]`.
            parts: what `update` returned; of a single key head, or keys and values made of it.
            sinks: a score for each head.

        Raises:
            ValueError: if the call has dropout, a score bias, or a mask that differs between heads,
                or if keys of several heads were rebuilt from what `update` returned.
        """
        found = []
        calls = self._calls(prepared, q, tuple(parts), sinks)
        for index, (its, queries, part, sink) in enumerate(calls):
            head = self._heads[index]
            assert head.slots is not None
            found.append(attended_rows(its, queries, part, head.slots, sink))
            if self._attention:
                self._observe(index, its, queries, part)
        return torch.cat(found, 1)

    def _calls(
        self, prepared: Prepared, q: Tensor, parts: tuple[Part, ...], sinks: Tensor | None
    ) -> list[tuple[Prepared, Tensor, Part, Tensor | None]]:
        """The call of each key head: its queries, its rows, and its sinks."""
        call, count = prepared.call, len(self._heads)
        if call.dropout or call.score_bias is not None or (call.mask.heads or 1) > 1:
            got = f"dropout={call.dropout}, score_bias: {type(call.score_bias).__name__}"
            raise ValueError(
                "CondensingCache is for inference without a score bias, under one mask for all "
                f"heads, got {got}, {call.mask!r:.80}; call layer.eval(), or use KVCache()"
            )
        if count == 1:  # a model of transformers numbers the keys that are held from 0
            start = self.length - self.rows[0]
            part = parts[0]._replace(kv_start=start, kv_stop=self.length)
            return [(prepared, q, part, sinks)]
        if self._returned is None or parts[0].streams is not self._returned.streams:
            raise ValueError(
                "CondensingCache reads the keys of several heads as they are stored, and this "
                "layer rebuilds them; use EvictingCache(budget)"
            )
        group = call.num_heads // count
        its = prepared._replace(call=call.but(num_heads=group, num_kv_heads=1))
        of_heads = [None] * count if sinks is None else sinks.split(group)
        together = zip(q.split(group, 1), self._parts, of_heads, strict=True)
        return [(its, queries, part, sink) for queries, part, sink in together]

    def _observe(self, index: int, prepared: Prepared, q: Tensor, part: Part) -> None:
        """Note the most attention that each row of a key head receives from one of the queries."""
        most = self._attention[index]
        for weights in self._heads[index].weights(prepared, q, part):
            most = torch.maximum(most, weights[:, 0, :, : most.shape[1]].amax(1))
        self._attention[index] = most

    def observe(self) -> None:
        """From now on, note the most attention that each row of now receives from one query."""
        self._attention = [torch.zeros_like(each, dtype=torch.float32) for each in self.slots]

    def observed(self) -> list[Float[Tensor, "B _"]]:
        """The attention since `observe`, for each key head; no more is noted."""
        noted, self._attention = self._attention, []
        return noted

    def keep(self, rows: Sequence[Int[Tensor, "B _"]]) -> None:
        """Evict all rows of each key head but these, whose numbers ascend."""
        for head, kept in zip(self._heads, rows, strict=True):
            head.keep(kept[:, None])
        self._parts, self._returned = (), None

    def truncate(self, length: int | Tensor) -> None:
        """Keep the first `length` tokens, if no row was evicted since there were so many.

        Raises:
            ValueError: if rows were, or if `length` is a tensor, negative or above the tokens seen.
        """
        for head in self._heads or (self._head(),):
            head.truncate(length)
        if length == 0:
            self._heads = ()

    def reorder(self, rows: Tensor) -> None:
        """Keep these batch rows, `[N]` integers, in this order."""
        for head in self._heads:
            head.reorder(rows)
        self._parts, self._returned = (), None

    def fork(self) -> "CondensingCache":
        new = object.__new__(CondensingCache)
        vars(new).update(vars(self), _parts=(), _returned=None, _attention=[])
        new._heads = tuple(each.fork() for each in self._heads)
        return new

    __copy__ = fork

    def snapshot(self) -> object:
        return dict(vars(self)), [each.snapshot() for each in self._heads]

    def restore(self, snapshot: object) -> None:
        assert isinstance(snapshot, tuple)
        attributes, heads = snapshot
        super().restore(attributes)
        for head, before in zip(self._heads, heads, strict=True):
            head.restore(before)

    def record(self) -> Record:
        records = [each.record() for each in self._heads]
        heads = [{"state": state, "streams": len(streams)} for state, streams in records]
        return Record({"heads": heads}, [x for each in records for x in each.streams])

    def fill(self, record: Record) -> None:
        heads, streams = record.state.get("heads"), list(record.streams)
        if not isinstance(heads, list) or not all(_is_head(each) for each in heads):
            raise ValueError(f"each key head has a state and streams, got {heads!r:.200}")
        filled = []
        for each in heads:
            its, streams = streams[: each["streams"]], streams[each["streams"] :]
            filled.append(self._head())
            filled[-1].fill(Record(each["state"], its))
        lengths = {each.length for each in filled}
        shapes = {tuple(tuple(x.shape) for x in each.empty_streams) for each in filled}
        several = any(shape[1] != 1 for each in shapes for shape in each)
        if streams or several or len(lengths) > 1 or len(shapes) > 1:
            raise ValueError(
                f"key heads have as many tokens and streams of one head, got {sorted(lengths)} of "
                f"{shapes!r:.200}, and {len(streams)} streams more"
            )
        self._heads = tuple(filled)

    def _head(self) -> Evicting:
        """A cache for the tokens of one key head."""
        if self.format is None:
            return EvictingCache(_ALL, Streaming())
        return QuantizedEvicting(_ALL, Streaming(), format=self.format)

    def _new_heads(self, new: tuple[Tensor, ...]) -> tuple[Evicting, ...]:
        """Caches for the key heads of these streams."""
        heads = {each.shape[1] for each in new}
        if len(heads) != 1:
            raise ValueError(
                "CondensingCache keeps the same tokens of all streams of a key head, got streams "
                f"of {[each.shape[1] for each in new]} heads; use KVCache()"
            )
        found = tuple(self._head() for _ in range(new[0].shape[1]))
        for each in found:
            each.pieces = self.pieces
        return found

    def __repr__(self) -> str:
        return f"CondensingCache({'' if self.format is None else repr(self.format.name)})"


def _of_heads(heads: Sequence[Evicting], method: str, new: tuple[Tensor, ...]) -> tuple[Part, ...]:
    """A part of each key head, from its cache and its streams."""
    found = []
    for index, head in enumerate(heads):
        own = (x[:, index : index + 1] if len(heads) > 1 else x for x in new)
        found += getattr(head, method)(*own)
    return tuple(found)


def _is_head(value: Any) -> bool:
    """Whether a value of a file says what one key head holds."""
    if not isinstance(value, dict) or not isinstance(value.get("state"), dict):
        return False
    return is_naturals([cast(int, value.get("streams"))])
