"""The attentions that a model is compared with, as data; a new one is an entry of `CANDIDATES`.

The rows of a frontier are ways to make a cache smaller: quantise, evict, share heads, compress into
latents, and several of these together.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from regard.cache import Cache, KVCache, PagedCache, PagePool, QuantizedCache
from regard.compare.shapes import bytes_of_caches, storage_in
from regard.convert.targets import Target, target_of
from regard.layers.attention import Attention
from regard.names import FORMATS
from regard.plan.shapes import LayerShape
from regard.sparse import (
    CondensingCache,
    EvictingCache,
    ExpectedAttention,
    QuantizedEvicting,
    SnapKV,
    Streaming,
)
from regard.sparse.evicting import RECENT, SINKS
from regard.sparse.scores import Score
from regard.words import one_of

Choose = Callable[[Sequence[Attention], torch.dtype], Target | None]


@dataclass(frozen=True)
class Candidate:
    """One row of the comparison: an attention that a model can be converted to, and its cache.

    Args:
        key: its name in `--attention`.
        name: its name in the table; `{kind}` stands for the model's own.
        choose: returns the target of the conversion, from the model's layers and the dtype of the
            checkpoint; None for the model's own attention. If the model cannot have that attention,
            the message of its `ValueError` is the row's remark.
        cache: the name of a cache, as `regard.hf.cache` takes it, but for `"growing"`, `"static"`
            and `"paged"`; or a function that builds one layer's.
        exact: whether only rounding is lost.
        condense: the share of the tokens that stay once a text is read, of a `CondensingCache`.
        few: whether it is a row if the user names none.
        usual: whether it is among the rows of `--attention all`.

    Examples:
        >>> from functools import partial
        >>> from regard import QuantizedCache
        >>> from regard.compare import Candidate
        >>> int8 = Candidate("mine", "{kind}, int8 cache", choose=lambda layers, dtype: None,
        ...     cache=partial(QuantizedCache, bits=8, group=32))  # or "int8", with windows
        >>> int8.cache()
        QuantizedCache(bits=8, group=32)
    """

    key: str
    name: str
    choose: Choose
    cache: str | Callable[[], Cache] = "auto"
    exact: bool = False
    condense: float | None = None
    few: bool = False
    usual: bool = True


def as_shipped(shipped: Sequence[Attention], dtype: torch.dtype) -> None:
    """No conversion: the model's own attention."""


def _heads(shipped: Sequence[Attention], dtype: torch.dtype, *, kind: str) -> Target:
    if all(layer.kind == kind for layer in shipped):
        raise ValueError(f"the model is {kind} as shipped")
    return target_of(kind.lower(), shipped)


def _half_the_heads(shipped: Sequence[Attention], dtype: torch.dtype) -> Target:
    heads = shipped[0].num_kv_heads
    fewer = next((n for n in range(heads // 2, 1, -1) if heads % n == 0), None)
    if fewer is None:
        raise ValueError(f"{heads} key heads have no divisor between 1 and themselves")
    return target_of(f"gqa:{fewer}", shipped)


def _mla(shipped: Sequence[Attention], dtype: torch.dtype, **options: Any) -> Target:
    return target_of("mla", shipped, dtype=dtype, stored=dtype, **options)


LATENT = partial(_mla, form="exact-rope")
DEEPSEEK = partial(_mla, form="deepseek")
PORTABLE = partial(DEEPSEEK, portable=True)


def _codes(name: str, **shown: bool) -> Candidate:
    """A row with a quantised cache."""
    return Candidate(name.lower(), f"{{kind}}, {name} cache", as_shipped, cache=name, **shown)


def _share(key: str, name: str, choose: Callable[..., Target], **more: Any) -> Candidate:
    """A row whose latent takes N % of the shipped cache, N being the number in its key."""
    share = int(key.split("-")[1])
    return Candidate(key, name.format(N=share), partial(choose, budget=share / 100), **more)


def _in_int8(row: Candidate, **shown: bool) -> Candidate:
    """The row with an int8 cache."""
    name = f"{row.name}, int8 cache"
    return Candidate(f"{row.key}-int8", name, row.choose, cache="int8", **shown)


MEANT = {  # names that other commands have, or that are often written: the row that is meant
    "mla": "deepseek-50",
    "deepseek": "deepseek-50",
    "latent": "latent-50",
    "joint latent": "latent-50",
    "portable": "portable-50",
    "auto": "shipped",
    "growing": "shipped",
    "plain": "shipped",
    "quantized": "int8",
    **{f"mla-{name}": f"deepseek-{name}" for name in ("75", "50", "25")},
}

ALL = "all"  # in `--attention`: every usual row
JOINT, MLA = "joint latent, {N} %", "DeepSeek's MLA, {N} %"
CANDIDATES = (
    Candidate("shipped", "{kind}, as shipped", as_shipped, exact=True, few=True),
    _codes("int8", few=True),
    _codes("int4"),
    _codes("K8V4", few=True),
    _codes("K6V4"),
    _codes("K4V4", usual=False),
    Candidate("mha", "MHA, spelled out", partial(_heads, kind="MHA"), exact=True),
    Candidate("gqa", "GQA, half the key heads", _half_the_heads, usual=False),
    Candidate("mqa", "MQA, aligned", partial(_heads, kind="MQA"), few=True),
    Candidate("latent-100", "joint latent, full rank", partial(LATENT, budget=1.0), exact=True),
    _share("latent-75", JOINT, LATENT),
    latent_50 := _share("latent-50", JOINT, LATENT, few=True),
    _share("latent-25", JOINT, LATENT, usual=False),
    _share("deepseek-100", MLA, DEEPSEEK, usual=False),
    _share("deepseek-75", MLA, DEEPSEEK, usual=False),
    deepseek_50 := _share("deepseek-50", MLA, DEEPSEEK, few=True),
    _share("portable-75", f"{MLA}, portable", PORTABLE, usual=False),
    _share("portable-50", f"{MLA}, portable", PORTABLE, usual=False),
    _in_int8(latent_50, usual=False),
    _in_int8(deepseek_50),
)


def chosen(keys: Sequence[str]) -> tuple[Candidate, ...]:
    """The candidates of these keys, the shipped one first; a few of them if there are none.

    Args:
        keys: of `CANDIDATES`; `"all"` stands for the usual ones.

    Raises:
        ValueError: if a key is unknown. Upper and lower case are one.

    Examples:
        >>> from regard.compare import chosen
        >>> [each.name for each in chosen(["mqa"])]
        ['{kind}, as shipped', 'MQA, aligned']
    """
    if not keys:
        return tuple(each for each in CANDIDATES if each.few)
    known = [*(each.key for each in CANDIDATES), ALL]
    wanted = {"shipped", *(one_of("attention", key, known, MEANT) for key in keys)}
    if ALL in wanted:
        wanted |= {each.key for each in CANDIDATES if each.usual}
    return tuple(each for each in CANDIDATES if each.key in wanted)


# ---- the rows of a frontier ----

SCORES: dict[str, Score] = {
    "expected attention": ExpectedAttention(),
    "last queries": SnapKV(),
    "streaming": Streaming(),
}
SHARES = (0.75, 0.5, 0.25)
MOST_PAGES = 1 << 30  # of a layer: they are allocated when they are needed
DECODED = 64  # tokens at the end of each window that are given one at a time
USUAL = ("shipped", "int8", "k8v4", "k6v4", "k4v4", "latent-75", "latent-50")  # of `CANDIDATES`


def evicted(share: float, score: str = "expected attention", format: str = "") -> Candidate:
    """A row whose cache keeps a share of the tokens seen, by a score of `SCORES`; in codes of a
    format, such as `"K8V4"`, if one is given.

    Examples:
        >>> from regard.compare.candidates import evicted
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


def condensed(share: float, format: str = "") -> Candidate:
    """A row whose cache is condensed to a share of the tokens once a text is read.

    Examples:
        >>> from regard.compare.candidates import condensed
        >>> condensed(0.25, "K8V4").name
        '{kind}, condensed to 25 %, K8V4'
    """
    return Candidate(
        f"condensed-{share:.0%}-{format}",
        f"{{kind}}, condensed to {share:.0%}{f', {format}' if format else ''}".replace("%", " %"),
        as_shipped,
        cache=partial(CondensingCache, format or None),
        condense=share,
    )


def in_pages(format: str) -> Candidate:
    """A row whose cache has its full pages in codes, but for the first one.

    Examples:
        >>> from regard.compare.candidates import in_pages
        >>> in_pages("K4V4").name
        '{kind}, K4V4 in pages'
    """
    name, cache = f"{{kind}}, {format} in pages", partial(_in_pages, format)
    return Candidate(f"pages-{format}", name, as_shipped, cache=cache)


def _in_pages(format: str) -> Cache:
    return PagedCache(PagePool(MOST_PAGES, format=format))


def methods() -> tuple[Candidate, ...]:
    """The rows of a frontier without a budget, the shipped one first."""
    own = [each for key in USUAL for each in CANDIDATES if each.key == key]
    own += [in_pages(format) for format in ("K8V4", "K4V4")]
    scores = [evicted(share, score) for score in SCORES for share in SHARES]
    together = [
        evicted(share, format=format) for format in ("K8V4", "K4V4") for share in (0.75, 0.5)
    ]
    read = [condensed(share, format) for format in ("", "K8V4") for share in (0.5, 0.25)]
    return (*own, *scores, *together, *read)


def within(
    budget: float, layers: Sequence[LayerShape], *, context: int, dtype: str
) -> tuple[Candidate, ...]:
    """The rows of a frontier whose caches have a share `budget` of the model's own bytes, or less.

    Each format is evicted to what is left of the budget; latents have the rank that it allows.
    `dtype` is that of the checkpoint.
    """
    plain = bytes_of_caches(layers, storage_in(KVCache()), context=context, dtype=dtype)

    def share_of(cache: Cache) -> float:
        held = context - 1  # tokens, when the last one is predicted
        own = bytes_of_caches(layers, storage_in(cache), context=held, dtype=dtype)
        return own / bytes_of_caches(layers, storage_in(KVCache()), context=held, dtype=dtype)

    pages = [format for format in FORMATS if share_of(_in_pages(format)) <= budget]
    found = [CANDIDATES[0], *map(in_pages, pages)]
    for format in ("", *FORMATS):
        cache = QuantizedCache(format=format) if format else KVCache()
        share = share_of(cache)
        if share <= budget:
            found += [each for each in CANDIDATES if each.cache == format]
            continue
        # layers with a window hold no more than it, so their bytes shrink less than others'
        fewest, fitting = SINKS + RECENT + 1, budget * plain
        held = {kept / 100: max(fewest, context * kept // 100) for kept in range(1, 100)}
        shares = [
            kept
            for kept, tokens in held.items()
            if bytes_of_caches(layers, storage_in(cache), context=tokens, dtype=dtype) <= fitting
        ]
        if shares:
            scores = SCORES if not format else ("expected attention",)
            found += [evicted(shares[-1], score, format) for score in scores]
            read = context - DECODED  # tokens that are condensed: those decoded are all held
            percent = int(100 * (shares[-1] * context - DECODED) / read)
            if percent * read > 100 * fewest:
                found.append(condensed(percent / 100, format))
    latent = f"latent-{budget:.0%}".removesuffix("%")
    return (*found, *(each for each in CANDIDATES if each.key == latent))
