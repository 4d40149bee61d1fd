"""The attentions that a model is compared with, as data; a new one is an entry of `CANDIDATES`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from regard.cache import Cache, KVCache
from regard.cache.quantized import QuantizedCache
from regard.convert.targets import Target, check_fits, target_of
from regard.layers.attention import Attention

Aim = Callable[[Sequence[Attention]], Target | None]


@dataclass(frozen=True)
class Candidate:
    """One row of the comparison.

    Args:
        key: its name in `--attention`.
        name: its name in the table; `{kind}` stands for the model's own.
        aim: returns the target of the conversion; None for the model's own attention. The message
            of a `ValueError`, if the model cannot have that attention, is the row's remark.
        cache: builds one layer's cache.
        exact: whether only rounding is lost.
        usual: whether it is a row if the user chose none.
    """

    key: str
    name: str
    aim: Aim
    cache: Callable[[], Cache] = KVCache
    exact: bool = False
    usual: bool = True


def _as_shipped(shipped: Sequence[Attention]) -> None:
    return None


def _heads(shipped: Sequence[Attention], *, to: str) -> Target:
    if to == "mha" and shipped[0].kind == "MHA":
        raise ValueError("the model is MHA as shipped")
    return target_of(to, shipped)


def _half_the_heads(shipped: Sequence[Attention]) -> Target:
    heads = shipped[0].num_kv_heads
    fewer = next((n for n in range(heads // 2, 1, -1) if heads % n == 0), None)
    if fewer is None:
        raise ValueError(f"{heads} key heads have no divisor between 1 and themselves")
    return target_of(f"gqa:{fewer}", shipped)


def _full_latent(shipped: Sequence[Attention]) -> Target:
    first = shipped[0]
    full = min(first.hidden_size, 2 * first.num_kv_heads * first.head_dim)
    target = Target("exact-rope", rank=full)
    for layer in shipped:
        check_fits(target, layer)
    return target


def _latent(shipped: Sequence[Attention], *, budget: float) -> Target:
    return target_of("mla", shipped, form="exact-rope", budget=budget)


def _deepseek(shipped: Sequence[Attention], *, budget: float, portable: bool = False) -> Target:
    return target_of("mla", shipped, form="deepseek", budget=budget, portable=portable)


INT8 = partial(QuantizedCache, bits=8)
INT4 = partial(QuantizedCache, bits=4, group=32)
_SHARES = (("75", 0.75), ("50", 0.5), ("25", 0.25))

CANDIDATES = (
    Candidate("shipped", "{kind}, as shipped", _as_shipped, exact=True),
    Candidate("int8", "{kind}, int8 cache", _as_shipped, cache=INT8),
    Candidate("int4", "{kind}, int4 cache", _as_shipped, cache=INT4),
    Candidate("mha", "MHA, spelled out", partial(_heads, to="mha"), exact=True),
    Candidate("gqa", "GQA, half the key heads", _half_the_heads, usual=False),
    Candidate("mqa", "MQA, aligned", partial(_heads, to="mqa")),
    Candidate("latent-100", "joint latent, full rank", _full_latent, exact=True),
    *(
        Candidate(
            f"latent-{name}",
            f"joint latent, {name} %",
            partial(_latent, budget=share),
            usual=name != "25",
        )
        for name, share in _SHARES
    ),
    *(
        Candidate(
            f"deepseek-{name}",
            f"DeepSeek's MLA, {name} %",
            partial(_deepseek, budget=share),
            usual=name == "50",
        )
        for name, share in (("100", 1.0), *_SHARES[:2])
    ),
    *(
        Candidate(
            f"portable-{name}",
            f"DeepSeek's MLA, {name} %, portable",
            partial(_deepseek, budget=share, portable=True),
            usual=False,
        )
        for name, share in _SHARES[:2]
    ),
    Candidate(
        "latent-50-int8",
        "joint latent, 50 %, int8 cache",
        partial(_latent, budget=0.5),
        cache=INT8,
        usual=False,
    ),
    Candidate(
        "deepseek-50-int8",
        "DeepSeek's MLA, 50 %, int8 cache",
        partial(_deepseek, budget=0.5),
        cache=INT8,
    ),
)


def chosen(keys: Sequence[str]) -> tuple[Candidate, ...]:
    """The candidates of these keys, the shipped one first; the usual ones if there are none.

    Raises:
        ValueError: if a key is unknown.
    """
    if not keys:
        return tuple(each for each in CANDIDATES if each.usual)
    known = {each.key: each for each in CANDIDATES}
    unknown = [key for key in keys if key not in known]
    if unknown:
        raise ValueError(f"{', '.join(unknown)}: attentions to compare are {', '.join(known)}")
    wanted = {"shipped", *keys}
    return tuple(each for each in CANDIDATES if each.key in wanted)
