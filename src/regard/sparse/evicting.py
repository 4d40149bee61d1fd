"""A cache that keeps a budget of tokens for each key head.

Three numbers differ: `length`, the tokens seen, which positions and masks count; `rows`, the tokens
held for each key head; and the slot of each row. A layer lets a cache that does not hold all keys
attend by itself. So the cache knows the queries that scores read, and evaluates masks at slots.
"""

import math
import re
from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.cache import Part
from regard.cache.files import is_naturals
from regard.cache.growing import FIRST_CAPACITY, Contiguous
from regard.cache.saving import Record
from regard.cache.streams import (
    Lengths,
    check_rows,
    check_streams,
    check_whole,
    needs_gradients,
    select_rows,
    with_room,
    write_tokens,
)
from regard.masks import Span
from regard.ops.prepared import Prepared
from regard.sparse.attention import Sparse, attended_rows
from regard.sparse.scores import ExpectedAttention, Rows, Score, attention_weights
from regard.sparse.seen import Seen, gathered, with_seen, without_seen
from regard.sparse.slots import visible_rows
from regard.tracing import is_forward_mode

SINKS = 4  # tokens at the start, as StreamingLLM keeps
RECENT = 16  # tokens at the end: most heads look at them, whatever the text
AT_ONCE = 16  # a share of 1 / AT_ONCE of the budget is evicted together: one copy for several steps
SLACK = 4  # buffers have room for 1 / SLACK more rows
QUERIES = 64  # in a block whose attention weights are summed


class Evicting(Contiguous, Sparse):
    """Base class of caches that keep a budget of tokens; the arguments are `EvictingCache`'s."""

    def __init__(
        self,
        budget: int | float,
        score: Score = ExpectedAttention(),  # noqa: B008 (a value)
        sinks: int = SINKS,
        recent: int = RECENT,
    ) -> None:
        check_whole("sinks", sinks, least=0)
        check_whole("recent", recent, least=1)  # a token attends to itself
        if isinstance(budget, float):
            if not 0.0 < budget <= 1.0:
                raise ValueError(f"budget is a share in (0, 1] or a whole number, got {budget}")
        else:
            check_whole("budget", budget, least=1)
            if budget <= sinks + recent:
                raise ValueError(
                    f"budget={budget} leaves no room beside sinks={sinks} and recent={recent}; "
                    f"give {sinks + recent + 1} or more, or fewer of these"
                )
        if isinstance(score, type) or not isinstance(score, Score):
            raise TypeError(f"score is one such as Streaming() or SnapKV(), got {score!r:.80}")
        super().__init__()
        self.budget, self.score, self.sinks, self.recent = budget, score, sinks, recent
        self._seen: Seen | None = None  # None: no tokens
        self._before: Seen | None = None  # the last call's rows, before any were evicted
        self._evicted_at = 0  # tokens seen when rows were last evicted; 0: never
        self._due = False  # whether tokens were appended that no query has attended to

    @property
    def rows(self) -> int:
        """The number of tokens held for each key head."""
        return 0 if self._seen is None else self._seen.slots.shape[2]

    @property
    def slots(self) -> Int[Tensor, "B G n"] | None:
        """The slot of each row, for each key head; None without tokens."""
        return None if self._seen is None else self._seen.slots

    @property
    def most(self) -> int:
        """The number of rows that are held at most, after so many tokens."""
        if isinstance(self.budget, int):
            return self.budget
        return max(int(self.budget * self.length), self.sinks + self.recent + 1)

    @property
    def nbytes(self) -> int:
        """Bytes stored for the tokens held."""
        return sum(each[:, :, : self.rows].nbytes for each in self._held)

    def describe(self) -> str:
        """As of other caches, and the rows held for each key head."""
        if self._seen is None:
            return super().describe()
        return f"{super().describe()}\n  {self.rows:,} rows held for each key head"

    def span(self, new: int) -> Span:
        """The slots of a call with `new` more tokens: masks count all tokens seen."""
        return Span(self.length, self.length + new, 0, self.length + new)

    def update(self, *new: Tensor) -> tuple[Part, ...]:
        """Append `[B, G, L, W]` streams; return all rows as one part that ends with the new tokens.

        The slots of earlier rows are those of `slots`: such a part is read by `attend`.

        Raises:
            ValueError: if the streams do not fit each other or those held, have several numbers of
                key heads, require gradients, or the tokens of the last update were not attended to
                and are more than the budget.
        """
        added = self._check(new)
        self._refuse(new)
        rows, stop = self.rows, self.length + added
        total = rows + added
        if not self._held or self._held[0].shape[2] < total:
            capacity = max(FIRST_CAPACITY, total + total // SLACK)
            self._held = with_room(self._held or new, rows, capacity)
        write_tokens(self._held, new, Lengths(rows, rows))
        self.count(added)
        return (Part(stop - total, stop, tuple(x.narrow(2, 0, total) for x in self._held)),)

    def count(self, new: int) -> None:
        """Count tokens that have been written to `buffers`, after the rows held."""
        stop = self.length + new
        appended = Seen.of(self._held[0], self.length, stop, self.score.sums)
        self._seen = appended if self._seen is None else self._seen.followed_by(appended)
        self._lengths = self._lengths.grown(new)
        self._due, self._before = True, self._seen

    def remember(self, q: Float[Tensor, "B H L D"]) -> None:
        """Remember the queries of the last tokens, for the score."""
        assert self._seen is not None
        self._seen = self._seen.with_queries(q, self.score.queries)

    def peek(self, *new: Tensor) -> tuple[Part, ...]:
        added, rows = self._check(new), self.rows
        held = [each.narrow(2, 0, rows) for each in self._held] or [x[:, :, :0] for x in new]
        whole = tuple(torch.cat(pair, 2) for pair in zip(held, new, strict=True))
        return (Part(self.length - rows, self.length + added, whole),)

    def attend(
        self, prepared: Prepared, q: Tensor, parts: Iterable[Part], sinks: Tensor | None
    ) -> Tensor:
        """Attention of `q` to the rows, `[B, H, L, Dv]`; then rows beyond the budget are evicted. A
        further call after the same update, as of a layer that shares the keys, attends to the same
        rows; the score reads the queries of the first.

        Args:
            prepared: the call over the slots of all tokens seen, without sinks.
            q: queries of the new tokens, `[B, H, L, D]`.
            parts: what `update` returned, or keys and values made of it.
            sinks: a score for each head.

        Raises:
            ValueError: if the call has dropout or a score bias, or no update came before it.
        """
        call, (part,) = prepared.call, parts
        if call.dropout or call.score_bias is not None:
            got = f"dropout={call.dropout}, score_bias: {type(call.score_bias).__name__}"
            raise ValueError(
                f"EvictingCache is for inference without a score bias, got {got}; call "
                "layer.eval(), or use KVCache()"
            )
        if self._before is None:
            raise ValueError("attend() reads what update() returned; call cache.update(k, v) first")
        slots = self._before.slots
        # a model of transformers numbers the keys that are held from 0
        part = part._replace(kv_start=self.length - slots.shape[2], kv_stop=self.length)
        out = attended_rows(prepared, q, part, slots, sinks)
        if self._due:
            self._observe(prepared, q, part)
            if self.rows > self.most:
                self._evict(prepared, part)
            self._due = False
        return out

    def truncate(self, length: int | Tensor) -> None:
        """Keep the first `length` tokens, if no row was evicted since there were so many.

        Raises:
            ValueError: if rows were, if queries after them count in the score, or if `length` is a
                tensor, negative or above the tokens seen.
        """
        if isinstance(length, Tensor):
            raise ValueError(
                "EvictingCache has rows of one length, got a tensor; truncate to a whole number, "
                "or use KVCache()"
            )
        lengths = self._lengths.truncated(length)
        if length == 0:
            self._seen, self._evicted_at, self._due = None, 0, False
        elif length < self.length:
            self._seen = self._without_last(length)
        self._lengths, self._before = lengths, None

    def reorder(self, rows: Tensor) -> None:
        """Keep these batch rows, `[N]` integers, in this order."""
        check_rows(rows, self._held)
        self._held, self._before = select_rows(self._held, rows), None
        if self._seen is not None:
            self._seen = self._seen.reordered(rows)

    @property
    def arguments(self) -> dict[str, Any]:
        score = re.sub(" at 0x[0-9a-fA-F]+", "", repr(self.score))  # no address of an object
        own = {"budget": self.budget, "score": score}
        return own | {"sinks": self.sinks, "recent": self.recent}

    def record(self) -> Record:
        streams = [each.detach().narrow(2, 0, self.rows) for each in self._held]
        return Record({"length": self.length, "evicted_at": self._evicted_at}, streams)

    def fill(self, record: Record) -> None:
        length = cast(int, record.state.get("length"))
        evicted_at = cast(int, record.state.get("evicted_at"))
        if not is_naturals([length, evicted_at]) or evicted_at > length:
            raise ValueError(f"length and evicted_at count tokens, got {length!r}, {evicted_at!r}")
        rows = check_streams(record.streams, ()) if record.streams else 0
        last = -1 if self._seen is None else int(self._seen.slots.max())
        if rows != self.rows or last >= length:
            raise ValueError(f"slots of {length} tokens are below, got {last}, for {rows} rows")
        self._held = tuple(record.streams)
        self._lengths, self._evicted_at = Lengths(length, length), evicted_at

    def _code(self) -> str:
        """The arguments of this class as code."""
        return f"{self.budget}, score={self.score!r}, sinks={self.sinks}, recent={self.recent}"

    def _refuse(self, new: tuple[Tensor, ...]) -> None:
        """Raise an error if these streams cannot be appended."""
        if torch.compiler.is_compiling() or needs_gradients(new, ()) or is_forward_mode():
            raise ValueError(
                "EvictingCache is for inference: gradients do not flow through it, and it runs "
                "outside of compiled graphs; use torch.no_grad()"
            )
        if len({each.shape[1] for each in new}) != 1:
            raise ValueError(
                "EvictingCache evicts the same tokens of all streams of a key head, got streams "
                f"of {[each.shape[1] for each in new]} heads; use KVCache()"
            )
        if self._due and self.rows > self.most:
            raise ValueError(
                f"{self.rows} rows are held for a budget of {self.most}: tokens are evicted once "
                "queries have attended to them; give the cache to a layer, or call "
                "cache.attend(prepared, q, parts, None) after each update"
            )

    def _without_last(self, length: int) -> Seen:
        """What is known of the rows of the first `length` tokens."""
        assert self._seen is not None
        if length < self._evicted_at:
            raise ValueError(
                f"length={length}: rows were evicted when {self._evicted_at} tokens had been seen, "
                f"of {self.length}; truncate to {self._evicted_at} or more, or use KVCache()"
            )
        if self.score.sums:
            raise ValueError(
                f"score={self.score!r} sums the attention of all queries, also of those after "
                f"length={length}, and cannot take it back; use another score, or KVCache()"
            )
        return self._seen.without_last(self.length - length)

    def _observe(self, prepared: Prepared, q: Tensor, part: Part) -> None:
        """Remember the last queries, and sum the attention of all, where the score reads that."""
        if self.score.queries:
            self.remember(q)
        assert self._seen is not None
        if self.score.sums:
            received = self._seen.received
            assert received is not None
            for weights in self.weights(prepared, q, part):
                received = received + weights.sum(2)
            self._seen = self._seen._replace(received=received)

    def weights(
        self, prepared: Prepared, q: Tensor, part: Part
    ) -> Iterator[Float[Tensor, "B G w n"]]:
        """The attention that each row receives from the queries of the last tokens, some of them at
        a time; from those at padding, none."""
        assert self._seen is not None
        slots, keys = self._seen.slots, part.as_tensors().streams[0]
        before = self.length - q.shape[2]
        for start, some in zip(range(0, q.shape[2], QUERIES), q.split(QUERIES, 2), strict=True):
            first, stop = before + start, before + start + some.shape[2]
            visible = visible_rows(prepared, slots, Span(first, stop, 0, self.rows), keys.shape[1])
            at = self.rows - self.length + first  # the row of the first of these queries' tokens
            no_padding = visible[..., at : at + some.shape[2]].any(2)[..., None]
            found = attention_weights(some, keys, visible & no_padding, prepared.call.scale)
            yield _of_stored_heads(found, slots)

    def _evict(self, prepared: Prepared, part: Part) -> None:
        """Keep the rows that score highest; those that the last query cannot see go first."""
        assert self._seen is not None
        call, slots = prepared.call, self._seen.slots
        streams = part.as_tensors().streams
        keys, values = streams[0], streams[-1][..., : call.v_head_dim]
        key_heads, repeats = keys.shape[1], keys.shape[1] // slots.shape[1]
        last = Span(self.length - 1, self.length, 0, self.rows)
        visible = visible_rows(prepared, slots, last, key_heads)[:, :, 0]
        none = keys.new_empty(len(keys), call.num_heads, 0, keys.shape[3])
        queries = self._seen.last_queries(self.score.queries) if self.score.queries else none
        rows = Rows(
            keys=keys,
            values=values,
            slots=slots.repeat_interleave(repeats, 1),
            visible=visible,
            queries=queries,
            received=self._seen.received,
            length=self.length,
            scale=call.scale,
        )
        score = _of_stored_heads(self.score(rows).float(), slots)
        self.keep(self._kept(score, visible.unflatten(1, (-1, repeats)).any(2), slots))

    def keep(self, rows: Int[Tensor, "B G m"]) -> None:
        """Evict all rows but these, whose numbers ascend."""
        assert self._seen is not None
        capacity = rows.shape[2] + max(1, rows.shape[2] // SLACK)
        self._held = tuple(gathered(each, rows, capacity) for each in self._held)
        self._seen = self._seen.kept(rows)
        self._evicted_at = self.length

    def _kept(self, score: Tensor, visible: Tensor, slots: Tensor) -> Int[Tensor, "B G m"]:
        """The rows to keep, in their order."""
        first = visible & (visible.cumsum(-1) <= self.sinks)
        last = slots >= self.length - self.recent
        score = score.nan_to_num(-math.inf).masked_fill(first | last, math.inf)
        score = score.masked_fill(~visible, -math.inf)
        count = self.most + 1 - max(1, self.most // AT_ONCE)
        return score.topk(max(self.sinks + self.recent, count), -1).indices.sort(-1).values


class EvictingCache(Evicting):
    """A cache that keeps a budget of tokens for each key head, and evicts the others for good.

    Each key head keeps its own tokens: the first `sinks`, the last `recent`, and between them those
    of the highest score. After each call at most `budget` rows are held; when there are more, a
    sixteenth of the budget is evicted at once, after the queries of that call have attended to all.
    Tokens that the last query cannot see, such as padding, or tokens before a window, go first.
    Rotary positions are those of the tokens seen. Without gradients.

    A layer attends through `attend`, and a model of transformers needs `regard.hf.install`.

    Args:
        budget: rows of each key head, a whole number; or a share of the tokens seen, in (0, 1], of
            a short text at least `sinks + recent + 1`.
        score: which tokens to keep: `ExpectedAttention()`, `SnapKV()`, `TOVA()`, `H2O()`,
            `KeyDiff()`, `Streaming()`, or a function of your own with the attributes of `Score`.
        sinks: tokens at the start of each row of the batch that are never evicted.
        recent: tokens at the end that are not evicted yet, at least 1.

    Raises:
        ValueError: if a number is out of its range, or a budget not above `sinks + recent`.
        TypeError: if `score` is none.

    Examples:
        >>> import torch
        >>> from regard import Attention, Causal, Rotary
        >>> from regard.sparse import EvictingCache
        >>> layer = Attention(32, 4, num_kv_heads=2, rope=Rotary(8), mask=Causal()).eval()
        >>> cache = EvictingCache(24, sinks=2, recent=8)
        >>> with torch.no_grad():
        ...     _ = layer(torch.randn(1, 100, 32), cache=cache)
        >>> cache.length, cache.rows, cache.slots.shape  # seen, and held for each key head
        (100, 24, torch.Size([1, 2, 24]))
    """

    def record(self) -> Record:
        """The rows, with their slots and all that the score reads, for a file of the cache."""
        return with_seen(super().record(), self._seen)

    def fill(self, record: Record) -> None:
        """Take the rows of a file into this cache, which is empty and has the same arguments.

        Raises:
            ValueError: if it could not be the record of such a cache.
        """
        rest, self._seen = without_seen(record)
        super().fill(rest)

    def __repr__(self) -> str:
        return f"EvictingCache({self._code()})"


def _of_stored_heads(scores: Float[Tensor, "B K *n"], slots: Int[Tensor, "B G n"]) -> Tensor:
    """The mean over the key heads that are rebuilt of one stored head, `[B, G, *n]`."""
    if scores.shape[1] == slots.shape[1]:
        return scores
    return scores.unflatten(1, (slots.shape[1], -1)).mean(2)
