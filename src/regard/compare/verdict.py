"""The one honest sentence under the table, made from its numbers."""

from collections.abc import Sequence

from regard.compare.measure import Row

NO_WORSE = 1.01  # a perplexity within 1 % of the shipped one counts as the same quality


def verdict(rows: Sequence[Row], dtype: str = "") -> str:
    """What the table shows: what saves memory without loss, and what latents cost.

    The first row is the model as shipped, whose cache is in `dtype`.
    """
    shipped, *others = [row for row in rows if row.perplexity is not None]
    good = [row for row in others if _ratio(row, shipped, "perplexity") <= NO_WORSE]
    smallest = min(good, key=_bytes, default=shipped)
    sentence = "For memory alone, nothing here beats the attention as shipped"
    if _bytes(smallest) < _bytes(shipped):
        kept, change = _kept(smallest, shipped), _change(smallest, shipped)
        sentence = (
            f"For memory alone, {smallest.name} is the best of these: {kept} of the shipped "
            f"{dtype} cache at {change} perplexity"
        )
    latents = [row for row in others if "latent" in row.name]
    if not latents:
        return f"{sentence}."
    least = min(latents, key=_bytes)
    speed = _ratio(least, shipped, "decode_tokens_per_second")
    return (
        f"{sentence}. A {least.name} keeps {_kept(least, shipped)} of it at "
        f"{_change(least, shipped)} perplexity and decodes at {speed:.2f}x the shipped speed, "
        "because its keys are rebuilt at every step."
    )


def _bytes(row: Row) -> float:
    return _value(row, "cache_bytes_per_token")


def _kept(row: Row, shipped: Row) -> str:
    return f"{_bytes(row) / _bytes(shipped):.0%}"


def _change(row: Row, shipped: Row) -> str:
    return f"{_ratio(row, shipped, 'perplexity') - 1:+.1%}"


def _ratio(row: Row, shipped: Row, name: str) -> float:
    return _value(row, name) / _value(shipped, name)


def _value(row: Row, name: str) -> float:
    value = getattr(row, name)
    assert value is not None
    return float(value)
