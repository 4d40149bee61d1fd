"""The slots of the queries and keys of a call: the rectangle of scores to compute."""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from regard.constants import Device


@dataclass(frozen=True)
class Span:
    """The slots of a call: queries `q_start..q_stop` by keys `kv_start..kv_stop`.

    A slot is a position in the sequence; stops are exclusive. In a ragged batch the queries of each
    row start at a different slot.

    Args:
        q_start: the slot of the first query; `[B]` integers if rows differ.
        q_stop: one past the last query; `[B]` if `q_start` is.
        kv_start: the slot of the first key.
        kv_stop: one past the last key.
        queries: the number of queries of a ragged span; read from the tensors if None.
        bounds: the smallest and largest `q_start` of a ragged span; read if None.

    Raises:
        ValueError: if a range ends before it starts, or rows differ in their number of queries.

    Examples:
        >>> from regard import Span
        >>> span = Span(4, 6, 0, 6)  # two queries after four cached tokens
        >>> span.num_queries, span.num_keys
        (2, 6)
    """

    q_start: int | Tensor
    q_stop: int | Tensor
    kv_start: int
    kv_stop: int
    queries: int | None = None
    bounds: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if not (self.kv_start <= self.kv_stop):
            self._refuse_order("keys", "kv", self.kv_start, self.kv_stop)
        starts, stops = isinstance(self.q_start, Tensor), isinstance(self.q_stop, Tensor)
        if starts != stops:
            raise ValueError(
                f"q_start and q_stop are both integers or both [B], got q_start={self.q_start}, "
                f"q_stop={self.q_stop}; give q_stop = q_start + L"
            )
        if starts:
            if self.queries is None or self.bounds is None:
                self._read()
        elif not (self.q_start <= self.q_stop):
            self._refuse_order("queries", "q", self.q_start, self.q_stop)

    @staticmethod
    def _refuse_order(what: str, name: str, start: int | Tensor, stop: int | Tensor) -> None:
        raise ValueError(
            f"{what} end before they start: {name}_start={start}, {name}_stop={stop}; "
            "give Span(cached, cached + L, 0, S)"
        )

    def _read(self) -> None:
        assert isinstance(self.q_start, Tensor)
        assert isinstance(self.q_stop, Tensor)
        if torch.compiler.is_compiling() or self.q_start.is_meta:
            raise ValueError(
                "q_start cannot be read inside a compiled graph, and queries or bounds are not "
                "given; make the span with Span.ragged(q_start, queries=..., bounds=...)"
            )
        counts = self.q_stop - self.q_start
        if counts.dim() != 1 or counts.numel() == 0 or bool((counts != counts[0]).any()):
            raise ValueError(
                "every row of a ragged span has the same number of queries, "
                f"got {counts.tolist()}; give q_stop = q_start + L, both [B]"
            )
        if int(counts[0]) < 0:
            raise ValueError(
                f"queries end before they start: q_start={self.q_start.tolist()}, "
                f"q_stop={self.q_stop.tolist()}; give q_stop = q_start + L"
            )
        low, high = int(self.q_start.min()), int(self.q_start.max())
        object.__setattr__(self, "q_start", self.q_start.clone())  # so that the bounds stay true
        object.__setattr__(self, "q_stop", self.q_stop.clone())
        object.__setattr__(self, "queries", int(counts[0]))
        object.__setattr__(self, "bounds", (low, high))

    @classmethod
    def ragged(
        cls,
        q_start: Int[Tensor, " B"],
        *,
        queries: int,
        kv_start: int,
        kv_stop: int,
        bounds: tuple[int, int],
    ) -> "Span":
        """A span whose rows start at different slots, made without reading a tensor.

        Args:
            q_start: `[B]` integers.
            queries: the number of queries in each row.
            kv_start: the slot of the first key.
            kv_stop: one past the last key.
            bounds: at most the smallest and at least the largest `q_start`.

        Examples:
            >>> starts = torch.tensor([3, 5])
            >>> span = Span.ragged(starts, queries=2, kv_start=0, kv_stop=7, bounds=(3, 5))
            >>> span.last_query, span.positions().tolist()
            (6, [[3, 4], [5, 6]])
        """
        return cls(q_start, q_start + queries, kv_start, kv_stop, queries, bounds)

    def part(self, first: int, stop: int, kv_start: int, kv_stop: int) -> "Span":
        """The span of some of the queries by other keys.

        Args:
            first: of the queries, counted from the first one.
            stop: one past the last of them.
            kv_start: the slot of the first key.
            kv_stop: one past the last key.

        Examples:
            >>> Span(4, 9, 0, 9).part(1, 3, 2, 7)
            Span(q_start=5, q_stop=7, kv_start=2, kv_stop=7, queries=None, bounds=None)
        """
        start = self.q_start + first
        if not isinstance(start, Tensor):
            return Span(start, self.q_start + stop, kv_start, kv_stop)
        assert self.bounds is not None
        bounds = (self.bounds[0] + first, self.bounds[1] + first)
        return Span(start, start + stop - first, kv_start, kv_stop, stop - first, bounds)

    @property
    def num_queries(self) -> int:
        """The number of queries, in each row."""
        if isinstance(self.q_start, Tensor):
            assert self.queries is not None
            return self.queries
        assert not isinstance(self.q_stop, Tensor)
        return self.q_stop - self.q_start

    @property
    def num_keys(self) -> int:
        """The number of keys."""
        return self.kv_stop - self.kv_start

    @property
    def first_query(self) -> int:
        """The smallest slot of a query."""
        if isinstance(self.q_start, Tensor):
            assert self.bounds is not None
            return self.bounds[0]
        return self.q_start

    @property
    def last_query(self) -> int:
        """The largest slot of a query."""
        if isinstance(self.q_start, Tensor):
            assert self.bounds is not None
            return self.bounds[1] + self.num_queries - 1
        assert not isinstance(self.q_stop, Tensor)
        return self.q_stop - 1

    def positions(self, device: Device = None) -> Int[Tensor, "*B L"]:
        """The slots of the queries, `[L]`, or `[B, L]` where rows differ."""
        if isinstance(self.q_start, Tensor):
            steps = torch.arange(self.num_queries, device=device)
            return self.q_start.to(steps.device, torch.int64)[:, None] + steps
        assert not isinstance(self.q_stop, Tensor)
        return torch.arange(self.q_start, self.q_stop, device=device)
