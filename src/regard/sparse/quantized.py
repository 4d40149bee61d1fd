"""A cache that keeps a budget of tokens in codes."""

from regard.cache.paging.formats import GROUP, PageFormat
from regard.cache.quantized import Quantizing
from regard.cache.saving import Record
from regard.sparse.evicting import RECENT, SINKS, Evicting
from regard.sparse.scores import ExpectedAttention, Score
from regard.sparse.seen import with_seen, without_seen


class QuantizedEvicting(Quantizing, Evicting):
    """An `EvictingCache` whose rows are codes of 8, 6 or 4 bits, as those of `QuantizedCache`.

    Scores read the dequantised rows.

    Args:
        budget: as of `EvictingCache`.
        score: as of `EvictingCache`.
        sinks: as of `EvictingCache`.
        recent: as of `EvictingCache`.
        bits: as of `QuantizedCache`.
        group: as of `QuantizedCache`.
        format: as of `QuantizedCache`.

    Raises:
        ValueError: as those of the two.

    Examples:
        >>> from regard.sparse import QuantizedEvicting
        >>> QuantizedEvicting(0.5, format="K8V4").bits
        4
    """

    def __init__(
        self,
        budget: int | float,
        score: Score = ExpectedAttention(),  # noqa: B008 (a value)
        sinks: int = SINKS,
        recent: int = RECENT,
        *,
        bits: int = 8,
        group: int = GROUP,
        format: str | PageFormat | None = None,
    ) -> None:
        own = {"budget": budget, "score": score, "sinks": sinks, "recent": recent}
        super().__init__(bits, group, format, **own)

    def record(self) -> Record:
        return with_seen(super().record(), self._seen)

    def fill(self, record: Record) -> None:
        rest, self._seen = without_seen(record)
        super().fill(rest)

    def __repr__(self) -> str:
        code = super()._code()
        return f"QuantizedEvicting({Evicting._code(self)}, {code})"
