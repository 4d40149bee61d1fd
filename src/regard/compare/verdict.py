"""The sentences under the table, which compare the rows that ran.

Every row in them comes with its cache, both perplexities and its decode speed. Quality is the worse
of the two perplexities: a cache may read a chunk's own tokens before they are rounded.
"""

from collections.abc import Sequence

from regard.compare.measure import Row

NO_WORSE = 1.01  # of the shipped perplexity: up to it the quality counts as the same
SLOWER = 0.95  # of the shipped decode speed: below it a difference is more than noise
NOTHING_BESIDE = "Only the attention as shipped ran, so there is nothing to compare it with."
NOTHING_SHIPPED = "The attention as shipped did not run, so there is nothing to compare with."
REASONS = {  # why a row decodes slowly, by a part of its name
    "latent": "its keys are rebuilt at every step",
    " cache": "dequantising its codes takes longer than reading fewer bytes saves at this length",
}


def verdict(rows: Sequence[Row], dtype: str = "") -> str:
    """Which row saves most memory without loss, and what the smallest latent costs.

    The row of the model as shipped has `shipped` in its name; its cache is in `dtype`.
    """
    ran = [row for row in rows if row.perplexity is not None]
    shipped = next((row for row in ran if "shipped" in row.name), None)
    if shipped is None:
        return NOTHING_SHIPPED
    others = [row for row in ran if row is not shipped]
    if not others:
        return NOTHING_BESIDE
    best, sentence = _of_memory(shipped, others, f"the shipped {dtype} cache".replace("  ", " "))
    latents = [row for row in others if "latent" in row.name]
    least = min(latents, key=_bytes, default=best)
    if least is best:
        return sentence
    return f"{sentence} The {least.name} keeps {_costs(least, shipped, 'it')}."


def _of_memory(shipped: Row, others: Sequence[Row], cache: str) -> tuple[Row, str]:
    """The smallest row of the same quality, or of all rows if none of those saves memory."""
    good = [row for row in others if _worse(row, shipped) <= NO_WORSE]
    best = min(good, key=_bytes, default=shipped)
    if _bytes(best) >= _bytes(shipped):
        least = min(others, key=_bytes)
        costs = _costs(least, shipped, cache)
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
            f"it keeps {_costs(best, shipped, cache)}."
        )
    costs = _costs(best, shipped, cache)
    return best, f"For memory alone, {best.name} is the best of these: it keeps {costs}."


def _costs(row: Row, shipped: Row, cache: str) -> str:
    """Cache, perplexity and decode speed against the shipped row's, and why a row is slower."""
    size = f"{_bytes(row) / _bytes(shipped):.0%} of {cache}"
    quality = _change(_ratio(row, shipped, "perplexity"), "{} perplexity")
    if row.decode_perplexity is not None:
        quality += _change(_ratio(row, shipped, "decode_perplexity"), " ({} token by token)")
    speed = _ratio(row, shipped, "decode_tokens_per_second")
    reasons = [why for part, why in REASONS.items() if part in row.name]
    because = f", because {' and '.join(reasons)}" if reasons and speed < SLOWER else ""
    return f"{size} at {quality} and decodes at {speed:.2f}x the shipped speed{because}"


def _worse(row: Row, shipped: Row) -> float:
    """Perplexity as a ratio of the shipped row's: the larger of prefill's and decoding's."""
    names = ("perplexity", "decode_perplexity")
    return max(_ratio(row, shipped, name) for name in names if getattr(row, name) is not None)


def _change(ratio: float, sentence: str) -> str:
    """The change in per cent, in a sentence."""
    more = ratio - 1
    return sentence.format(f"{more:+.1%}" if abs(more) >= 5e-4 else "the same")


def _bytes(row: Row) -> float:
    return _value(row, "cache_bytes_per_token")


def _ratio(row: Row, shipped: Row, name: str) -> float:
    return _value(row, name) / _value(shipped, name)


def _value(row: Row, name: str) -> float:
    value = getattr(row, name)
    assert value is not None
    return float(value)
