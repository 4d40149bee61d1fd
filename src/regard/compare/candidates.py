"""The attentions that a model is compared with, as data; a new one is an entry of `CANDIDATES`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from regard.cache import Cache
from regard.convert.targets import Target, target_of
from regard.layers.attention import Attention
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
    few: bool = False
    usual: bool = True


def as_shipped(shipped: Sequence[Attention], dtype: torch.dtype) -> None:
    """No conversion: the model's own attention."""


def _mha(shipped: Sequence[Attention], dtype: torch.dtype) -> Target:
    if shipped[0].kind == "MHA":
        raise ValueError("the model is MHA as shipped")
    return target_of("mha", shipped)


def _half_the_heads(shipped: Sequence[Attention], dtype: torch.dtype) -> Target:
    heads = shipped[0].num_kv_heads
    fewer = next((n for n in range(heads // 2, 1, -1) if heads % n == 0), None)
    if fewer is None:
        raise ValueError(f"{heads} key heads have no divisor between 1 and themselves")
    return target_of(f"gqa:{fewer}", shipped)


def _mqa(shipped: Sequence[Attention], dtype: torch.dtype) -> Target:
    return target_of("mqa", shipped)


def _mla(shipped: Sequence[Attention], dtype: torch.dtype, **options: Any) -> Target:
    return target_of("mla", shipped, dtype=dtype, stored=dtype, **options)


LATENT = partial(_mla, form="exact-rope")
DEEPSEEK = partial(_mla, form="deepseek")
_SHARES = (("75", 0.75), ("50", 0.5), ("25", 0.25))

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
CANDIDATES = (
    Candidate("shipped", "{kind}, as shipped", as_shipped, exact=True, few=True),
    Candidate("int8", "{kind}, int8 cache", as_shipped, cache="int8", few=True),
    Candidate("int4", "{kind}, int4 cache", as_shipped, cache="int4"),
    *(
        Candidate(
            name.lower(),
            f"{{kind}}, {name} cache",
            as_shipped,
            cache=name,
            few=name == "K8V4",
            usual=name != "K4V4",
        )
        for name in ("K8V4", "K6V4", "K4V4")
    ),
    Candidate("mha", "MHA, spelled out", _mha, exact=True),
    Candidate("gqa", "GQA, half the key heads", _half_the_heads, usual=False),
    Candidate("mqa", "MQA, aligned", _mqa, few=True),
    Candidate("latent-100", "joint latent, full rank", partial(LATENT, budget=1.0), exact=True),
    *(
        Candidate(
            f"latent-{name}",
            f"joint latent, {name} %",
            partial(LATENT, budget=share),
            few=name == "50",
            usual=name != "25",
        )
        for name, share in _SHARES
    ),
    *(
        Candidate(
            f"deepseek-{name}",
            f"DeepSeek's MLA, {name} %",
            partial(DEEPSEEK, budget=share),
            few=name == "50",
            usual=name == "50",
        )
        for name, share in (("100", 1.0), *_SHARES[:2])
    ),
    *(
        Candidate(
            f"portable-{name}",
            f"DeepSeek's MLA, {name} %, portable",
            partial(DEEPSEEK, budget=share, portable=True),
            usual=False,
        )
        for name, share in _SHARES[:2]
    ),
    Candidate(
        "latent-50-int8",
        "joint latent, 50 %, int8 cache",
        partial(LATENT, budget=0.5),
        cache="int8",
        usual=False,
    ),
    Candidate(
        "deepseek-50-int8",
        "DeepSeek's MLA, 50 %, int8 cache",
        partial(DEEPSEEK, budget=0.5),
        cache="int8",
    ),
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
