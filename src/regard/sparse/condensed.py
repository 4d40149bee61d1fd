"""condense: keep the tokens to which a model attends while it repeats the text.

While a model repeats a text that it has read, it attends to all that it needs to know of it. Tokens
without attention then are of no use later, whatever the question (KVzip, Kim et al. 2025,
arXiv:2505.23416). Heads differ: of some a few tokens are enough, others look all of them up. So all
heads of all layers share one budget, and each keeps as many tokens as it needs.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.cache.streams import check_whole
from regard.sparse.condensing import CondensingCache
from regard.sparse.evicting import RECENT, SINKS


@torch.no_grad()
def condense(
    caches: Iterable[object],
    repeat: Callable[[], object],
    budget: int | float,
    *,
    sinks: int = SINKS,
    recent: int = RECENT,
) -> None:
    """Evict the tokens of a model's caches to which it attends least while it repeats the text.

    Every row of a key head is scored by the most attention of one query of the repeated text, the
    mean over the query heads of its group. The rows of the highest scores, of all key heads of all
    layers together, stay. In a batch a key head keeps the mean number over the rows of the batch.

    Args:
        caches: of all layers; those that are no `CondensingCache` stay as they are.
        repeat: lets the model read the text once more, as if it followed the text, and returns the
            caches to their length.
        budget: rows of each key head on average, a whole number, or a share of the tokens seen.
        sinks: tokens at the start of each row of the batch that stay in every head.
        recent: tokens at the end that do.

    Raises:
        ValueError: if a number is out of its range, no cache is a `CondensingCache` with tokens, or
            `repeat` reads no text, or leaves the caches at another length. Nothing is evicted then.

    Examples:
        >>> from regard import KVCache
        >>> from regard.sparse import condense
        >>> condense([KVCache()], lambda: None, 0.5)
        Traceback (most recent call last):
        ...
        ValueError: no cache is a CondensingCache that holds tokens, got KVCache()
    """
    every = list(caches)
    own = [each for each in every if isinstance(each, CondensingCache) and each.length]
    if not own:
        got = ", ".join(dict.fromkeys(map(repr, every)))
        raise ValueError(f"no cache is a CondensingCache that holds tokens, got {got:.200}")
    check_whole("sinks", sinks, least=0)
    check_whole("recent", recent, least=1)
    if not isinstance(budget, float):
        check_whole("budget", budget, least=1)
    elif not 0.0 < budget <= 1.0:
        raise ValueError(f"budget is a share in (0, 1] or a whole number, got {budget}")
    lengths = [each.length for each in own]
    for each in own:
        each.observe()
    try:
        repeat()
    finally:
        attention = [each.observed() for each in own]
    if lengths != (now := [each.length for each in own]):
        raise ValueError(f"repeat() leaves caches of {lengths} tokens as they are, got {now}")
    noted = [each for of_layer in attention for each in of_layer]
    if not any(bool(each.any()) for each in noted):
        raise ValueError(
            "repeat() lets the model read the text into these caches; no layer attended"
        )
    scores = [_with_ends(each, sinks, recent) for each in noted]
    each_head = budget if isinstance(budget, int) else budget * max(lengths)
    kept = iter(_highest(scores, round(each_head * len(scores))))
    for cache in own:
        cache.keep([next(kept) for _ in cache.rows])


def _with_ends(scores: Float[Tensor, "B _"], sinks: int, recent: int) -> Float[Tensor, "B _"]:
    """Scores without a bound for the first and last rows; padding, which no query sees, has 0."""
    seen = scores > 0
    last = seen.flip(1).cumsum(1).flip(1) <= recent
    return scores.masked_fill(seen & ((seen.cumsum(1) <= sinks) | last), torch.inf)


def _highest(scores: Sequence[Float[Tensor, "B _"]], count: int) -> list[Int[Tensor, "B _"]]:
    """For each head the numbers of its rows that are among the `count` of the highest scores of all
    heads, in ascending order."""
    together = torch.cat([each.to(scores[0].device) for each in scores], 1)
    highest = together.topk(min(count, together.shape[1]), 1).indices
    among = torch.zeros_like(together, dtype=torch.bool).scatter_(1, highest, True)
    found = []
    for each, mine in zip(scores, among.split([x.shape[1] for x in scores], 1), strict=True):
        rows = max(1, round(float(mine.sum(1).double().mean())))
        found.append(each.topk(rows, 1).indices.sort(1).values)
    return found
