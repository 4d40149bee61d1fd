"""The sentences under the table, which compare the rows that ran.

Every row in them comes with its cache, both perplexities and its decode speed. Quality is the worse
of the two perplexities: a cache may read a chunk's own tokens before they are rounded. A difference
that lies inside of its interval decides nothing, and is called none.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from regard.compare.measure import Row
from regard.turns import Ratio

NO_WORSE = 1.01  # of the shipped perplexity: up to it the quality counts as the same
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
    best, sentence = _of_memory(
        shipped, others, f"the shipped {dtype} cache".replace("  ", " "), reasons
    )
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
    best = min(good, key=_bytes, default=shipped)
    if _bytes(best) >= _bytes(shipped):
        least = min(others, key=_bytes)
        costs = _costs(least, shipped, cache, reasons)
        if len(others) == 1:
            return least, (
                f"For memory alone, {least.name} does not beat the attention as shipped: "
                f"it keeps {costs}."
            )
        return least, (
            "For memory alone, nothing here beats the attention as shipped: "
            f"the smallest of the others, {least.name}, keeps {costs}."
        )
    if len(others) == 1:
        return best, (
            f"For memory alone, {best.name} beats the attention as shipped: "
            f"it keeps {_costs(best, shipped, cache, reasons)}."
        )
    costs = _costs(best, shipped, cache, reasons)
    return best, f"For memory alone, {best.name} is the best of these: it keeps {costs}."


def _costs(row: Row, shipped: Row, cache: str, reasons: Mapping[str, str]) -> str:
    """Cache, perplexity and decode speed against the shipped row's, and why the speed differs."""
    size = f"{_bytes(row) / _bytes(shipped):.0%} of {cache}"
    quality = _change(row.perplexity_ratio, "{} perplexity", "{} in perplexity")
    if row.decode_perplexity_ratio is not None:
        decoded = _change(row.decode_perplexity_ratio, "{}", "{}")
        quality += "" if quality.startswith(decoded) else f" ({decoded} token by token)"
    return f"{size} at {quality} and decodes {_speed(row.decode_speed, reasons.get(row.name))}"


def _speed(speed: Ratio | None, reason: str | None) -> str:
    assert speed is not None
    if not speed.differs:
        return "with no measurable difference in speed"
    because = f", because {reason}" if reason else ""
    return f"at {speed.value:.2f}x the shipped speed{because}"


def _keeps_quality(row: Row) -> bool:
    """Whether neither perplexity was measured to be worse than the shipped row's."""
    ratios = (row.perplexity_ratio, row.decode_perplexity_ratio)
    return all(each.value <= NO_WORSE for each in ratios if each is not None and each.differs)


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
