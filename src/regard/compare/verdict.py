"""The sentences under the table, which compare the rows that ran.

Every row in them comes with its cache, both perplexities and its decode speed. Quality is the worse
of the two perplexities: a cache may read a chunk's own tokens before they are rounded. A difference
that lies inside of its interval is called none; a wide interval does not show that there is none.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from regard.compare.measure import Row
from regard.turns import Ratio

NO_WORSE = 1.01  # of the shipped perplexity: the quality is the same unless more was measured, and
UNKNOWN = 1.05  # more than this cannot be excluded
NOTHING_BESIDE = "Only the attention as shipped ran, so there is nothing to compare it with."
NOTHING_SHIPPED = "The attention as shipped did not run, so there is nothing to compare with."
_NONE: Mapping[str, str] = MappingProxyType({})


def verdict(rows: Sequence[Row], dtype: str = "", reasons: Mapping[str, str] = _NONE) -> str:
    """Name the row that saves most memory without loss, and the costs of the smallest latent.

    The row of the model as shipped has `shipped` in its name; its cache is in `dtype`. Ratios of
    the other rows are to it. `reasons` of decode speeds are by the names of rows.
    """
    ran = [row for row in rows if row.perplexity is not None]
    shipped = next((row for row in ran if "shipped" in row.name), None)
    if shipped is None:
        return NOTHING_SHIPPED
    others = [row for row in ran if row is not shipped]
    if not others:
        return NOTHING_BESIDE
    cache = f"the shipped {dtype} cache".replace("  ", " ")
    best, sentence = _of_memory(shipped, others, cache, reasons)
    latents = [row for row in others if "latent" in row.name]
    least = min(latents, key=_bytes, default=best)
    if least is best:
        return sentence
    return f"{sentence} The {least.name} keeps {_costs(least, shipped, 'it', reasons)}."


def _of_memory(
    shipped: Row, others: Sequence[Row], cache: str, reasons: Mapping[str, str]
) -> tuple[Row, str]:
    """The smallest row of the same quality, or of all rows if none of those saves memory."""
    good = [row for row in others if _keeps_quality(row)]
    best, alone = min(good, key=_bytes, default=shipped), len(others) == 1
    saves = _bytes(best) < _bytes(shipped)
    row = best if saves else min(others, key=_bytes)
    shipped_wins = "nothing here beats the attention as shipped: the smallest of the others, {},"
    if alone:
        said = f"{row.name} {'beats' if saves else 'does not beat'} the attention as shipped: it"
    else:
        said = f"{row.name} is the best of these: it" if saves else shipped_wins.format(row.name)
    return row, f"For memory alone, {said} keeps {_costs(row, shipped, cache, reasons)}."


def _costs(row: Row, shipped: Row, cache: str, reasons: Mapping[str, str]) -> str:
    """Cache, perplexity and decode speed against the shipped row's, and why the speed differs; of a
    perplexity that differs by chance perhaps, how much worse it may be."""
    size = f"{_bytes(row) / _bytes(shipped):.0%} of {cache}"
    quality = _change(row.perplexity_ratio, "{} perplexity", "{} in perplexity")
    if row.decode_perplexity_ratio is not None:
        decoded = _change(row.decode_perplexity_ratio, "{}", "{}")
        quality += "" if quality.startswith(decoded) else f" ({decoded} token by token)"
    ratios = (row.perplexity_ratio, row.decode_perplexity_ratio)
    worst = max((each.high for each in ratios if each and not each.differs), default=1.0)
    if worst > UNKNOWN:
        quality += f" (up to {worst - 1:+.1%} is possible)"
    return f"{size} at {quality} and decodes {_speed(row.decode_speed, reasons.get(row.name))}"


def _speed(speed: Ratio | None, reason: str | None) -> str:
    assert speed is not None
    if not speed.differs:
        return "with no measurable difference in speed"
    because = f", because {reason}" if reason else ""
    return f"at {speed.value:.2f}x the shipped speed{because}"


def _keeps_quality(row: Row) -> bool:
    """Whether both perplexities are known well enough, and neither was measured to be worse than
    the shipped row's."""
    ratios = [each for each in (row.perplexity_ratio, row.decode_perplexity_ratio) if each]
    same = (each.value <= NO_WORSE or not each.differs for each in ratios)
    return all(same) and all(each.high <= UNKNOWN for each in ratios)


def _change(ratio: Ratio | None, sentence: str, none: str) -> str:
    """The change in per cent, in a sentence; another sentence if no change was measured."""
    assert ratio is not None
    more = ratio.value - 1
    if abs(more) < 5e-4:
        return sentence.format("the same")
    if not ratio.differs:
        return none.format("no measurable difference")
    return sentence.format(f"{more:+.1%}")


def _bytes(row: Row) -> float:
    assert row.cache_bytes_per_token is not None
    return row.cache_bytes_per_token
