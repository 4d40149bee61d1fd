"""The slots of the queries and keys of a call: the rectangle of scores to compute."""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from regard.constants import Device


@dataclass(frozen=True)
class Span:
    """Queries `q_start..q_stop` by keys `kv_start..kv_stop`; slots are positions in the sequence.

    In a ragged batch, the queries of each row start at a different slot. `q_start` and `q_stop` are
    then `[B]` tensors, `queries` is the number of queries, and `bounds` are the smallest and
    largest start, as Python integers. If these are not given, the tensors are read.

    Raises:
        ValueError: if a range ends before it starts, or rows differ in their number of queries.

    >>> Span(4, 6, 0, 6).num_queries
    2
    """

    q_start: int | Tensor
    q_stop: int | Tensor
    kv_start: int
    kv_stop: int
    queries: int | None = None
    bounds: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        starts, stops = isinstance(self.q_start, Tensor), isinstance(self.q_stop, Tensor)
        if starts != stops:
            raise ValueError(
                f"q_start and q_stop are both integers or both [B], got q_start={self.q_start}, "
                f"q_stop={self.q_stop}; give q_stop = q_start + L"
            )
        if not starts:
            self._check_order("queries", "q", self.q_start, self.q_stop)
        elif self.queries is None or self.bounds is None:
            self._read()
        self._check_order("keys", "kv", self.kv_start, self.kv_stop)

    @staticmethod
    def _check_order(what: str, name: str, start: int | Tensor, stop: int | Tensor) -> None:
        if start > stop:
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

        `bounds` are at most the smallest and at least the largest `q_start`.

        >>> starts = torch.tensor([3, 5])
        >>> span = Span.ragged(starts, queries=2, kv_start=0, kv_stop=7, bounds=(3, 5))
        >>> span.last_query, span.positions().tolist()
        (6, [[3, 4], [5, 6]])
        """
        return cls(q_start, q_start + queries, kv_start, kv_stop, queries, bounds)

    @property
    def num_queries(self) -> int:
        if isinstance(self.q_start, Tensor):
            assert self.queries is not None
            return self.queries
        assert not isinstance(self.q_stop, Tensor)
        return self.q_stop - self.q_start

    @property
    def num_keys(self) -> int:
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
