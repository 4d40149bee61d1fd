"""Draws which heads meet in MHA, GQA, MQA and MLA, and the work of MLA's two forms.

python drawings/attentions.py
"""

from pathlib import Path

import torch
from common import AMBER, BLUE, FAINT, GREEN, INK, LARGE, MEDIUM, SMALL, WIDTH, program, save
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from regard import Attention, Causal, KVCache, MultiHeadLatentAttention, Rotary, Span, attend

HEADS, HEAD_DIM = 16, 128  # of DeepSeek-V2-Lite
MLA = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
KEYS = [2**n for n in range(4, 17)]


def layers() -> list[nn.Module]:
    """MHA, GQA and MQA of the same heads, and MLA."""
    mask, rope = Causal(), Rotary(HEAD_DIM)
    with torch.device("meta"):
        shared: list[nn.Module] = [
            Attention(2048, HEADS, num_kv_heads=n, head_dim=HEAD_DIM, rope=rope, mask=mask)
            for n in (HEADS, 4, 1)
        ]
        latent = MultiHeadLatentAttention(2048, HEADS, rope=Rotary(64), mask=mask, **MLA)
    return [*shared, latent]


def cached(layer: nn.Module) -> int:
    """The numbers that a layer caches for a token."""
    cache = KVCache()
    layer(torch.zeros(1, 1, 2048, device="meta"), cache=cache)
    return cache.nbytes // 4


def key_head_of_each_query_head(num_kv_heads: int) -> list[int]:
    """Read from the output: the values of every key head are a different unit vector."""
    q, k = torch.zeros(1, HEADS, 1, 16), torch.zeros(1, num_kv_heads, 1, 16)
    v = torch.eye(num_kv_heads)[None, :, None]
    return attend(q, k, v).flatten(0, 2).argmax(-1).tolist()


def box(axes: Axes, x: float, y: float, width: float, text: str, colour: str, full: bool) -> None:
    """A box centred at x; filled if it is cached."""
    style = {"boxstyle": "round,pad=0,rounding_size=0.08", "linewidth": 1.2, "edgecolor": colour}
    face = colour if full else "none"
    linestyle = "-" if full or colour == BLUE else (0, (2, 1.5))
    patch = FancyBboxPatch(
        (x - width / 2, y), width, 0.42, facecolor=face, linestyle=linestyle, **style
    )
    axes.add_patch(patch)
    ink = "#ffffff" if full else colour
    axes.text(x, y + 0.19, text, ha="center", va="center", size=SMALL, color=ink)


def queries(axes: Axes, y: float) -> None:
    for head in range(HEADS):
        box(axes, head + 0.5, y, 0.42, "q", BLUE, full=False)


def keys_and_values(axes: Axes, x: float, y: float, full: bool) -> None:
    box(axes, x - 0.23, y, 0.42, "k", AMBER, full)
    box(axes, x + 0.23, y, 0.42, "v", GREEN, full)


def title(axes: Axes, y: float, layer: nn.Module, what: str) -> None:
    axes.text(0.05, y, layer.kind, size=LARGE, weight="bold", va="baseline")
    axes.text(1.75, y, what, size=MEDIUM, va="baseline")
    amount = f"{cached(layer):,} numbers a token"
    axes.text(HEADS - 0.05, y, amount, size=MEDIUM, va="baseline", ha="right")


def shared_heads(axes: Axes, top: float, layer: nn.Module) -> None:
    """The query heads of a layer above its key/value heads."""
    number = layer.num_kv_heads
    noun = "key/value head" if number == 1 else "key/value heads"
    title(axes, top, layer, f"{number} {noun}")
    queries(axes, top - 0.75)
    place = [(g + 0.5) * HEADS / number for g in range(number)]
    for head, g in enumerate(key_head_of_each_query_head(number)):
        axes.plot([head + 0.5, place[g]], [top - 0.77, top - 1.45], color=INK, linewidth=0.8)
    for x in place:
        keys_and_values(axes, x, top - 1.9, full=True)


def latent_heads(axes: Axes, top: float, layer: nn.Module) -> None:
    """Query heads above the keys and values that are rebuilt from what MLA caches."""
    title(axes, top, layer, "1 latent, 1 rotary key")
    queries(axes, top - 0.75)
    rank, rotary = layer.kv_lora_rank, layer.qk_rope_head_dim
    width = 0.6 * HEADS * rank / (rank + rotary)
    latent, key = 0.4 * HEADS, 0.4 * HEADS + width / 2 + 2.1
    for head in range(HEADS):
        x, share = head + 0.5, (head + 0.5) / HEADS - 0.5
        axes.plot([x, x], [top - 0.77, top - 1.15], color=INK, linewidth=0.8)
        keys_and_values(axes, x, top - 1.6, full=False)
        ends = ((latent + share * 0.9 * width, x, GREEN), (key + share * 2.6, x - 0.23, AMBER))
        for end, start, colour in ends:
            axes.plot([start, end], [top - 1.62, top - 2.46], color=colour, linewidth=0.6)
    box(axes, latent, top - 2.9, width, f"latent, {rank}", GREEN, full=True)
    box(axes, key, top - 2.9, 3.4, f"rotary key, {rotary}", AMBER, full=True)


def heads(folder: Path) -> Path:
    """Filled boxes are cached; dashed ones are rebuilt when they are read."""
    rows = [0.0, -2.75, -5.5, -8.25]
    figure = Figure(figsize=(WIDTH, WIDTH * 11.8 / HEADS))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, HEADS), ylim=(-11.2, 0.5), aspect="equal")
    axes.axis("off")
    *shared, latent = layers()
    for top, layer in zip(rows, shared, strict=False):
        shared_heads(axes, top, layer)
    latent_heads(axes, rows[-1], latent)
    return save(figure, folder, "attentions-heads")


def deepseek_v3(form: str) -> MultiHeadLatentAttention:
    options = {"rope": Rotary(64), "mask": Causal(), "form": form, "backend": "eager"}
    with torch.device("meta"):
        return MultiHeadLatentAttention(7168, 128, q_lora_rank=1536, **MLA, **options)


def work(form: str, queries: int, keys: int) -> float:
    """Operations of a layer of DeepSeek-V3, in units of 1e9, as torch counts them."""
    layer, cache = deepseek_v3(form), KVCache()
    with torch.device("meta"), torch.no_grad(), FlopCounterMode(display=False) as counter:
        cache.update(torch.zeros(1, 1, keys - queries, 576))
        layer(torch.zeros(1, queries, 7168), cache=cache)
    return counter.get_total_flops() / 1e9


def first_expanded(keys: int) -> int:
    """The least number of queries for which the layer chooses the expanded form."""
    layer = deepseek_v3("auto")
    spans = (Span(keys - queries, keys, 0, keys) for queries in range(1, keys))
    return next(s.num_queries for s in spans if layer.choose(s).name == "expanded")


def work_of_one_query(axes: Axes) -> None:
    for form, colour in (("expanded", BLUE), ("absorbed", AMBER)):
        done = [work(form, 1, keys) for keys in KEYS]
        axes.plot(KEYS, done, color=colour, linewidth=2)
        at = {"xy": (KEYS[-3], done[-3]), "xytext": (-4, 6), "textcoords": "offset points"}
        axes.annotate(form, **at, color=colour, ha="right")
    axes.set(title="1 query", xlabel="keys", ylabel="operations, 1e9", xscale="log", yscale="log")
    axes.set_xticks([16, 256, 4096, 65536], ["16", "256", "4,096", "65,536"])
    axes.set_yticks([1, 10, 100, 1000], ["1", "10", "100", "1,000"])


def work_of_many_queries(axes: Axes, keys: int = 8192) -> None:
    counts, switch = [2**n for n in range(12)], first_expanded(keys)
    ratio = [work("absorbed", n, keys) / work("expanded", n, keys) for n in counts]
    axes.plot(counts, ratio, color=GREEN, linewidth=2)
    axes.axhline(1, color=INK, linewidth=0.8)
    axes.axvline(switch, color=INK, linestyle=(0, (2, 2)))
    axes.annotate(
        f"from {switch} queries on\nthe layer expands",
        (switch, 0.012), (-4, 0), textcoords="offset points", ha="right", size=SMALL,
    )  # fmt: skip
    axes.set(title=f"{keys:,} keys", xlabel="queries", ylabel="absorbed over expanded")
    axes.set(xscale="log", yscale="log")
    axes.set_xticks([1, 16, 256, 2048], ["1", "16", "256", "2,048"])
    axes.set_yticks([0.01, 0.1, 1], ["0.01", "0.1", "1"])


def forms(folder: Path) -> Path:
    """The work of both forms against the number of keys, and their ratio against the queries."""
    figure = Figure(figsize=(WIDTH, 3.2), layout="constrained")
    panels = figure.subplots(1, 2)
    for axes, panel in zip(panels, (work_of_one_query, work_of_many_queries), strict=True):
        panel(axes)
        axes.minorticks_off()
        axes.grid(color=FAINT)
    return save(figure, folder, "attentions-forms")


def draw(folder: Path) -> list[Path]:
    """The drawings of the guide to MHA, GQA, MQA and MLA."""
    return [heads(folder), forms(folder)]


if __name__ == "__main__":
    program(draw)
