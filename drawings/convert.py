"""Draws what one token costs in the cache of a layer, before and after conversion, and the loss.

    python drawings/convert.py

The layer is one of SmolLM2-135M's, with random weights. Its conversions are made by the library,
and the bytes are those of their caches. Perplexities are read from docs/conversions.json, which
`python benchmarks/converting.py --corpora texts --docs` writes.
"""

import copy
import json
from pathlib import Path
from typing import NamedTuple

import torch
from common import AMBER, BLUE, FAINT, GREEN, INK, RED, SMALL, VIOLET, WIDTH, program, save
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from regard import (
    Causal,
    GroupedQueryAttention,
    KVCache,
    LatentKVAttention,
    MultiHeadLatentAttention,
    QuantizedCache,
    Rotary,
)
from regard.convert import decouple, latentize, regroup, target_of

MEASURED = Path(__file__).parents[1] / "docs" / "conversions.json"
TOKENS = 64  # in the caches that are measured
STORED = torch.float16  # of SmolLM2-135M's checkpoint
ROW, BAR = 1.0, 0.42  # heights


class Row(NamedTuple):
    """A kind of attention: how the command names it, its name in the JSON, and its cache."""

    title: str
    method: str
    pieces: list[tuple[str, float, str]]  # a label, bytes a token, a colour


def shipped() -> GroupedQueryAttention:
    """A layer of SmolLM2-135M's sizes: 9 query heads on 3 key heads of 64."""
    torch.manual_seed(0)
    rope = Rotary(64, theta=100_000.0)
    return GroupedQueryAttention(576, 9, 3, rope=rope, mask=Causal()).requires_grad_(False)


def bytes_a_token(layer, cache=None) -> float:
    """The bytes of the layer's cache, by token, in the checkpoint's dtype."""
    cache = KVCache() if cache is None else cache
    with torch.no_grad():
        x = torch.randn(1, TOKENS, layer.hidden_size, dtype=STORED)
        copy.deepcopy(layer).to(STORED)(x, cache=cache)
    return cache.nbytes / TOKENS


def heads(layer, nbytes: float) -> list[tuple[str, float, str]]:
    """Keys and values of each key head, which take equally much."""
    count = layer.num_kv_heads
    each = nbytes / (2 * count)
    keys, values = ([f"{name} {i + 1}" for i in range(count)] for name in ("key", "value"))
    return [(name, each, BLUE) for name in keys] + [(name, each, GREEN) for name in values]


def latent(layer, nbytes: float) -> list[tuple[str, float, str]]:
    """One latent for all heads; in DeepSeek's form a rotary key beside it."""
    if isinstance(layer, LatentKVAttention):
        return [("latent of keys and values", nbytes, VIOLET)]
    assert isinstance(layer, MultiHeadLatentAttention)
    width = layer.kv_lora_rank + layer.qk_rope_head_dim
    part = nbytes / width
    return [
        ("latent", part * layer.kv_lora_rank, VIOLET),
        ("rotary key", part * layer.qk_rope_head_dim, AMBER),
    ]


def rows() -> list[Row]:
    """The shipped layer, and what it can be converted to."""
    gqa, covariance = shipped(), torch.eye(576, dtype=torch.float64)
    half = target_of("mla", [gqa], budget=0.5)
    deepseek = target_of("mla", [gqa], budget=0.5, form="deepseek")
    mqa = regroup(gqa, 1, covariance=torch.eye(577, dtype=torch.float64)).layer
    joint = latentize(gqa, rank=half.rank, covariance=covariance).layer
    sizes = {"rank": deepseek.rank, "rope_dim": deepseek.rope_dim}
    mla = decouple(gqa, **sizes, covariance=covariance).layer
    int8 = bytes_a_token(gqa, QuantizedCache(bits=8))
    return [
        Row("as shipped: GQA, 3 key heads", "as shipped", heads(gqa, bytes_a_token(gqa))),
        Row("int8 cache, not converted", "int8 cache", heads(gqa, int8)),
        Row("--to mla --budget 0.5", "latent, 50%", latent(joint, bytes_a_token(joint))),
        Row(
            f"--to mla:{deepseek.rank}+{deepseek.rope_dim}",
            "DeepSeek's form, 50%",
            latent(mla, bytes_a_token(mla)),
        ),
        Row("--to mqa", "MQA, aligned", heads(mqa, bytes_a_token(mqa))),
    ]


def bar(axes: Axes, row: Row, y: float, whole: float, ratio: float) -> None:
    """One kind of attention: its name, its size and loss, and the cache to scale."""
    total = sum(size for _, size, _ in row.pieces)
    axes.text(0, y + BAR + 0.13, row.title, weight="bold")
    said = f"{total:,.0f} bytes, {100 * total / whole:.0f} %; perplexity {ratio:.2f}x"
    axes.text(whole, y + BAR + 0.13, said, ha="right")
    left = 0.0
    for label, size, colour in row.pieces:
        axes.add_patch(Rectangle((left, y), size, BAR, fc=colour + "30", ec=colour, lw=1.2))
        if size > whole / 9:
            axes.text(left + size / 2, y + BAR / 2, label, ha="center", va="center", size=SMALL)
        left += size
    axes.add_patch(Rectangle((0, y), whole, BAR, fc="none", ec=FAINT, lw=1.0, ls=":"))


def cache(folder: Path) -> Path:
    """Bytes a token and layer, as boxes."""
    found = {row["method"]: row["ratio"] for row in json.loads(MEASURED.read_text())["results"]}
    drawn = rows()
    whole = sum(size for _, size, _ in drawn[0].pieces)
    figure = Figure(figsize=(WIDTH, 0.68 * len(drawn)))
    axes = figure.add_axes((0, 0, 1, 1))
    for place, row in enumerate(drawn):
        bar(axes, row, -place * ROW, whole, found[row.method])
    axes.set_xlim(-whole * 0.005, whole * 1.005)
    axes.set_ylim(-(len(drawn) - 1) * ROW - 0.05, BAR + 0.48)
    axes.axis("off")
    return save(figure, folder, "convert-cache")


def curve(axes: Axes, found: dict, start: str, colour: str, label: str) -> None:
    """A method at every size that was measured."""
    shares = [name for name in found if name.removeprefix(start).rstrip(" %").isdigit()]
    points = sorted((found[name]["cache"] * 100, found[name]["ratio"]) for name in shares)
    axes.plot(*zip(*points, strict=True), "o-", color=colour, lw=1.8, ms=5)
    axes.annotate(
        label, points[0], textcoords="offset points", xytext=(9, 2), color=colour, size=SMALL
    )


def loss(folder: Path) -> Path:
    """Perplexity over the model's own, against the size of the cache."""
    found = {row["method"]: row for row in json.loads(MEASURED.read_text())["results"]}
    figure = Figure(figsize=(WIDTH, 3.0))
    axes = figure.add_subplot()
    curve(axes, found, "latent, ", VIOLET, "joint latent")
    curve(axes, found, "DeepSeek's form, ", AMBER, "DeepSeek's form")
    single = {
        "int8 cache": (GREEN, "int8 cache", (-18, -15)),
        "int4 cache": (GREEN, "int4 cache", (-10, 8)),
        "MQA, aligned": (RED, "MQA", (9, -3)),
    }
    for name, (colour, label, at) in single.items():
        point = (found[name]["cache"] * 100, found[name]["ratio"])
        axes.plot(*point, "D", color=colour, ms=6)
        axes.annotate(label, point, textcoords="offset points", xytext=at, color=colour, size=SMALL)
    axes.set_xlim(0, 104)
    axes.set_ylim(0.8, 2.45)
    axes.set_xticks(range(0, 101, 25), [f"{x} %" for x in range(0, 101, 25)])
    axes.set_yticks([1, 1.5, 2], ["1.0x", "1.5x", "2.0x"])
    axes.axhline(1, color=INK, lw=0.8, ls=":")
    axes.grid(axis="y")
    axes.set_xlabel("cache, of the shipped size")
    axes.set_ylabel("perplexity")
    return save(figure, folder, "convert-loss")


def draw(folder: Path) -> list[Path]:
    """Draw both pictures."""
    return [cache(folder), loss(folder)]


if __name__ == "__main__":
    program(draw)
