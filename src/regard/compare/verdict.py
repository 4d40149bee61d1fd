"""The one honest sentence under the table, made from its numbers."""

from collections.abc import Sequence

from regard.compare.measure import Row

NO_WORSE = 1.01  # a perplexity within 1 % of the shipped one counts as the same quality


def verdict(rows: Sequence[Row]) -> str:
    """What the table shows: which row is the smallest without loss, and what latents cost.

    The first row is the model as shipped.
    """
    shipped, *others = [row for row in rows if row.perplexity is not None]
    good = [row for row in others if _ratio(row, shipped, "perplexity") <= NO_WORSE]
    smallest = min(good, key=lambda row: _value(row, "cache_bytes_per_token"), default=shipped)
    share = _ratio(smallest, shipped, "cache_bytes_per_token")
    if share < 1:
        first = (
            f"For memory alone, {_plain(smallest)} is the best of these: {share:.0%} of the shipped "
            f"cache at {_change(smallest, shipped)} perplexity"
        )
    else:
        first = "None of these saves memory without loss"
    latents = [row for row in others if "latent" in row.name]
    if not latents:
        return f"{first}."
    least = min(latents, key=lambda row: _value(row, "cache_bytes_per_token"))
    speed = _ratio(least, shipped, "decode_tokens_per_second")
    cache = _ratio(least, shipped, "cache_bytes_per_token")
    return (
        f"{first}; {_plain(least)} keeps {cache:.0%} of it at {_change(least, shipped)} perplexity "
        f"and decodes at {speed:.2f}x the shipped speed, because its keys are rebuilt at every step."
    )


def _plain(row: Row) -> str:
    return f"the {row.name.replace(',', ' with') if 'int8' in row.name else row.name}"


def _change(row: Row, shipped: Row) -> str:
    return f"{_ratio(row, shipped, 'perplexity') - 1:+.1%}"


def _ratio(row: Row, shipped: Row, name: str) -> float:
    return _value(row, name) / _value(shipped, name)


def _value(row: Row, name: str) -> float:
    value = getattr(row, name)
    assert value is not None
    return float(value)
