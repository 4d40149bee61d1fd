"""The ways to make a cache smaller, as rows of a frontier: quantise, evict, share heads, compress
into latents, and several of these together."""

from collections.abc import Callable, Sequence
from functools import partial

from regard.cache import Cache, KVCache, QuantizedCache
from regard.compare.candidates import CANDIDATES, Candidate, as_shipped
from regard.compare.shapes import bytes_of_caches, storage_in
from regard.names import FORMATS
from regard.plan.shapes import LayerShape
from regard.sparse import EvictingCache, ExpectedAttention, QuantizedEvicting, SnapKV, Streaming
from regard.sparse.scores import Score

SCORES: dict[str, Score] = {
    "expected attention": ExpectedAttention(),
    "last queries": SnapKV(),
    "streaming": Streaming(),
}
SHARES = (0.75, 0.5, 0.25)
USUAL = ("shipped", "int8", "k8v4", "k6v4", "k4v4", "latent-75", "latent-50")  # of `CANDIDATES`


def evicted(share: float, score: str = "expected attention", format: str = "") -> Candidate:
    """A row whose cache keeps a share of the tokens; in codes of a format if one is given.

    Args:
        share: of the tokens seen.
        score: a name of `SCORES`.
        format: of the rows that are kept, such as `"K8V4"`.

    Examples:
        >>> from regard.compare.methods import evicted
        >>> evicted(0.5, format="K8V4").name
        '{kind}, evicted to 50 %, K8V4'
    """
    by = "" if score == "expected attention" else f" by {score}"
    stored = f", {format}" if format else ""
    make: Callable[[], Cache] = partial(EvictingCache, share, SCORES[score])
    if format:
        make = partial(QuantizedEvicting, share, SCORES[score], format=format)
    return Candidate(
        f"evicted-{share:.0%}-{score}-{format}",
        f"{{kind}}, evicted to {share:.0%}{by}{stored}".replace("%", " %"),
        as_shipped,
        cache=make,
    )


def methods() -> tuple[Candidate, ...]:
    """The rows of a frontier without a budget, the shipped one first."""
    own = [each for key in USUAL for each in CANDIDATES if each.key == key]
    scores = [evicted(share, score) for score in SCORES for share in SHARES]
    together = [
        evicted(share, format=format) for format in ("K8V4", "K4V4") for share in (0.75, 0.5)
    ]
    return (*own, *scores, *together)


def within(
    budget: float, layers: Sequence[LayerShape], *, context: int, dtype: str
) -> tuple[Candidate, ...]:
    """The rows of a frontier whose caches have a share `budget` of the model's own bytes, or less.

    Each format is evicted to what is left of the budget; latents have the rank that it allows.

    Args:
        budget: a share in (0, 1).
        layers: the sizes of the model's layers.
        context: tokens.
        dtype: of the checkpoint.
    """
    plain = bytes_of_caches(layers, storage_in(KVCache()), context=context, dtype=dtype)
    found = [CANDIDATES[0]]
    for format in ("", *FORMATS):
        cache = QuantizedCache(format=format) if format else KVCache()
        share = bytes_of_caches(layers, storage_in(cache), context=context, dtype=dtype) / plain
        if share <= budget:
            found += [each for each in CANDIDATES if each.cache == format]
            continue
        kept = int(100 * budget / share) / 100
        if kept > 0:
            scores = SCORES if not format else ("expected attention",)
            found += [evicted(kept, score, format) for score in scores]
    latent = f"latent-{budget:.0%}".removesuffix("%")
    return (*found, *(each for each in CANDIDATES if each.key == latent))
