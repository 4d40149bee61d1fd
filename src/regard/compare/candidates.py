"""The attentions that a model is compared with, as data: a new one is an entry here."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import nn

from regard.attention import Attention
from regard.cache import Cache, KVCache
from regard.convert import Moments, as_latent, latentize, spell_out
from regard.quantized import QuantizedCache

Conversion = Callable[[Attention, Moments], nn.Module]


@dataclass(frozen=True)
class Candidate:
    """One row of the comparison.

    Args:
        name: what it is called.
        convert: makes it from the layer as shipped and the moments of what that layer reads. A
            `ValueError` says why it cannot be made of this model, and becomes the row's remark.
        cache: makes one layer's cache.
        exact: whether nothing but rounding is lost.
    """

    name: str
    convert: Conversion
    cache: Callable[[], Cache] = KVCache
    exact: bool = False


def _as_shipped(layer: Attention, moments: Moments) -> nn.Module:
    return layer


def _spelled_out(layer: Attention, moments: Moments) -> nn.Module:
    if layer.kind == "MHA":
        raise ValueError("the model is MHA as shipped")
    return spell_out(layer)


def _latent(layer: Attention, moments: Moments) -> nn.Module:
    return as_latent(layer)


def _calibrated(layer: Attention, moments: Moments, *, percent: int) -> nn.Module:
    full = min(layer.hidden_size, 2 * layer.num_kv_heads * layer.head_dim)
    rank = max(1, full * percent // 100)
    return latentize(layer, rank=rank, covariance=moments.covariance).layer


CANDIDATES = (
    Candidate("{kind}, as shipped", _as_shipped, exact=True),
    Candidate("MHA, spelled out", _spelled_out, exact=True),
    Candidate("{kind}, int8 cache", _as_shipped, cache=partial(QuantizedCache, bits=8)),
    Candidate("joint latent, full rank", _latent, exact=True),
    Candidate("joint latent, 75 %", partial(_calibrated, percent=75)),
)
