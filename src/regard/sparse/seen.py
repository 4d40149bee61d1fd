"""What a cache that evicts tokens knows of its rows besides their keys and values."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.cache.saving import Record
from regard.cache.streams import empty_like, select_rows


class Seen(NamedTuple):
    """The slots of rows, the attention that they received, and the last queries. These tensors are
    replaced, and never written: a snapshot of a cache needs no copy of them.

    Attributes:
        slots: `[B, G, n]`, the slot of each row.
        received: `[B, G, n]`, the attention received so far; None of scores that do not sum it.
        queries: the last ones, `[B, H, w, D]`, in pieces as they came.
    """

    slots: Int[Tensor, "B G n"]
    received: Float[Tensor, "B G n"] | None = None
    queries: tuple[Tensor, ...] = ()

    @classmethod
    def of(cls, like: Tensor, start: int, stop: int, sums: bool) -> "Seen":
        """Of the tokens in the slots from `start` to `stop`, in streams of the batch and heads of
        `like`, `[B, G, n, W]`."""
        slots = torch.arange(start, stop, device=like.device).expand(*like.shape[:2], -1)
        return cls(slots, torch.zeros_like(slots, dtype=torch.float32) if sums else None)

    def followed_by(self, new: "Seen") -> "Seen":
        """With new rows after these."""
        received = self.received
        if received is not None and new.received is not None:
            received = torch.cat([received, new.received], 2)
        return Seen(torch.cat([self.slots, new.slots], 2), received, self.queries)

    def with_queries(self, q: Tensor, count: int) -> "Seen":
        """With more queries, of which the last `count` or a few more are remembered. Queries of
        another width, as those of the other form of MLA, replace these."""
        q = q.detach()
        held = [] if self.queries and self.queries[0].shape[3] != q.shape[3] else [*self.queries]
        held.append(q[:, :, -count:].clone())
        total = sum(each.shape[2] for each in held)
        while total - held[0].shape[2] >= count:
            total -= held.pop(0).shape[2]
        return self._replace(queries=tuple(held))

    def last_queries(self, count: int) -> Tensor:
        """The last `count` queries, or fewer, `[B, H, w, D]`."""
        return torch.cat(self.queries, 2)[:, :, -count:]

    def without_last(self, removed: int) -> "Seen":
        """The record without the last tokens, for scores that do not sum weights over queries."""
        queries = self.queries
        if queries:
            joined = torch.cat(queries, 2)
            queries = (joined[:, :, : max(0, joined.shape[2] - removed)],)
        return Seen(self.slots[..., : self.slots.shape[2] - removed], None, queries)

    def kept(self, rows: Int[Tensor, "B G m"]) -> "Seen":
        """Of some of the rows."""
        received = None if self.received is None else self.received.gather(2, rows)
        return self._replace(slots=self.slots.gather(2, rows), received=received)

    def reordered(self, rows: Int[Tensor, " N"]) -> "Seen":
        """Of these rows of the batch."""
        (slots, *queries) = select_rows((self.slots, *self.queries), rows)
        received = self.received
        received = None if received is None else select_rows((received,), rows)[0]
        return Seen(slots, received, tuple(queries))


def with_seen(record: Record, seen: Seen | None) -> Record:
    """The record of a cache, with what is known of its rows as further streams."""
    if seen is None:
        return Record(record.state | {"seen": []}, record.streams)
    found = {"slots": seen.slots[..., None]}
    if seen.received is not None:
        found["received"] = seen.received[..., None]
    if seen.queries:
        found["queries"] = torch.cat(seen.queries, 2)
    streams = [*record.streams, *found.values()]
    return Record(record.state | {"seen": [*found]}, streams)


def without_seen(record: Record) -> tuple[Record, Seen | None]:
    """The record of a cache as it was, and what is known of its rows.

    Raises:
        ValueError: if the file could not be of such a cache.
    """
    names = record.state.get("seen")
    if names not in (
        [], ["slots"], ["slots", "received"], ["slots", "queries"], ["slots", "received", "queries"]
    ):  # fmt: skip
        raise ValueError(f"seen names slots, received and queries, got {names!r:.200}")
    count = len(record.streams) - len(names)
    if count < 0 or (not names and count):
        raise ValueError(f"there are {len(names)} streams of rows and more, got {count}")
    own = record.streams[:count]
    found = dict(zip(names, record.streams[count:], strict=True))
    if not names:
        return record, None
    _check_rows(found, own)
    received = found["received"][..., 0] if "received" in found else None
    queries = (found["queries"],) if "queries" in found else ()
    return Record(record.state, own), Seen(
        found["slots"][..., 0].to(torch.int64), received, queries
    )


def _check_rows(found: dict[str, Tensor], own: Sequence[Tensor]) -> None:
    """Raise unless there are a slot and a sum for each row of each key head."""
    shapes = {tuple(each.shape[:3]) for each in own}
    rows = [found[name] for name in ("slots", "received") if name in found]
    shapes |= {tuple(each.shape[:3]) for each in rows}
    batch = {each.shape[0] for each in (*own, *found.values())}
    slots = found["slots"]
    if len(shapes) != 1 or len(batch) != 1 or any(each.shape[3] != 1 for each in rows):
        raise ValueError(f"each row of a key head has a slot, got {sorted(shapes)}")
    if slots.is_floating_point() or bool((slots.diff(dim=2) <= 0).any()) or bool((slots < 0).any()):
        raise ValueError("the slots of rows ascend from 0 or more, got others; save it again")


def gathered(stream: Tensor, rows: Int[Tensor, "B G m"], capacity: int) -> Tensor:
    """A buffer that begins with some rows of a stream, for each key head its own."""
    buffer, count = empty_like(stream, capacity), rows.shape[2]
    index = rows[..., None].expand(-1, -1, -1, stream.shape[3])
    buffer.narrow(2, 0, count).copy_(stream.gather(2, index))
    return buffer
