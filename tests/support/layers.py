"""Small layers of every kind, in float64, with odd sizes and norm weights that are not one."""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn

from regard import (
    Alibi,
    Attention,
    Causal,
    Chunked,
    KVCache,
    LatentKVAttention,
    MultiHeadLatentAttention,
    PagedCache,
    PagePool,
    QuantizedCache,
    RelativeBias,
    Rotary,
    SlidingCache,
    SlidingWindow,
    StaticCache,
)

WIDTH = 12
WINDOW = Causal() & SlidingWindow(3)


def attention(heads: int = 4, **options) -> Attention:
    """Causal and rotated by default; head sizes do not depend on the width."""
    plain = {"mask": Causal(), "rope": Rotary(6), "head_dim": 6}
    return Attention(WIDTH, heads, **{**plain, **options})


def latent(**options) -> MultiHeadLatentAttention:
    """MLA whose values have another width than its keys."""
    plain = {
        "kv_lora_rank": 7,
        "q_lora_rank": 5,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 5,
        "rope": Rotary(4, pairing="pairs"),
        "mask": Causal(),
    }
    return MultiHeadLatentAttention(WIDTH, 3, **{**plain, **options})


def everything_at_once(**options) -> Attention:
    """Sinks, softcap, score bias, window, QK-norm, GQA, partial rotation, biases and a gate."""
    return attention(
        6,
        num_kv_heads=2,
        bias=True,
        qk_norm="head",
        rope=Rotary(4),
        mask=WINDOW,
        score_bias=RelativeBias(6, num_buckets=8, max_distance=6, bidirectional=False),
        softcap=4.0,
        sinks=True,
        gate="channel",
        **options,
    )


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "MHA": attention,
    "GQA": lambda: attention(6, num_kv_heads=2, qk_norm="head"),
    "MQA": lambda: attention(num_kv_heads=1, bias=True, gate="head"),
    "chunked": lambda: attention(mask=Causal() & Chunked(3)),
    "alibi": lambda: attention(score_bias=Alibi.for_heads(4), softcap=3.0, qk_norm="width"),
    "window": lambda: attention(num_kv_heads=2, mask=WINDOW, sinks=True),
    "everything": everything_at_once,
    "MLA": latent,
    "MLA expanded": lambda: latent(form="expanded", q_lora_rank=None),
    "MLA absorbed": lambda: latent(form="absorbed"),
    "MLA window": lambda: latent(mask=WINDOW),
    "MLA plain": lambda: latent(latent_norm=False, scale=0.3, form="absorbed"),
    "latent KV": lambda: LatentKVAttention(
        WIDTH,
        4,
        num_kv_heads=2,
        head_dim=6,
        kv_lora_rank=7,
        rope=Rotary(6),
        mask=Causal(),
    ),
    "latent KV, normed": lambda: LatentKVAttention(
        WIDTH,
        4,
        num_kv_heads=2,
        head_dim=6,
        kv_lora_rank=7,
        rope=Rotary(6),
        mask=Causal(),
        qk_norm="head",
        norm_eps=0.1,
    ),
}
WINDOWED = ("window", "everything", "MLA window")

CACHES: dict[str, Callable[[], object]] = {
    "growing": KVCache,
    "static": lambda: StaticCache(128),
    "sliding": lambda: SlidingCache(3),
    "int8": lambda: QuantizedCache(bits=8, group=4),
    "int4": lambda: QuantizedCache(bits=4, group=4),
    "pages": lambda: PagedCache(PagePool(99, page_size=4)),
    "pages, window": lambda: PagedCache(PagePool(99, page_size=2), window=3),
}
NARROW = ("sliding", "pages, window")  # for layers with a window
ROUNDING = ("int8", "int4")  # that agree with themselves, token by token
PAIRS = [
    (layer, cache)
    for layer in LAYERS
    for cache in CACHES
    if cache not in NARROW or layer in WINDOWED
]


def make(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """The layer of that name, its weights drawn wide and its norms off one, in eval mode."""
    torch.manual_seed(len(name))
    return scattered(LAYERS[name]()).to(dtype).eval()


def scattered(layer: nn.Module) -> nn.Module:
    """Every parameter drawn anew, so that no zero or one hides a missing one."""
    for name, parameter in layer.named_parameters():
        spread = 0.3 if parameter.dim() > 1 else 0.5
        centre = 1.0 if "norm" in name else 0.0
        nn.init.normal_(parameter, centre, spread)
    return layer


def inputs(batch: int, tokens: int, seed: int = 0) -> Tensor:
    """Hidden states large enough for peaked weights."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, tokens, WIDTH, dtype=torch.float64, generator=generator) * 1.5


def run_in_pieces(layer: nn.Module, x: Tensor, cache: object, cuts: list[int]) -> Tensor:
    """The tokens of `x`, given to the layer in pieces that end at `cuts`."""
    edges = [0, *sorted(cuts), x.shape[1]]
    pairs = pairwise(edges)
    return torch.cat([layer(x[:, a:b], cache=cache) for a, b in pairs if b > a], dim=1)


def assert_same(a: Tensor, b: Tensor, tolerance: float = 1e-11) -> None:
    """Equal to rounding in float64."""
    assert a.shape == b.shape
    assert torch.isfinite(a).all()
    assert torch.isfinite(b).all()
    scale = 1 + b.abs().max().item() if b.numel() else 1.0
    assert (a - b).abs().max().item() <= tolerance * scale if b.numel() else True
