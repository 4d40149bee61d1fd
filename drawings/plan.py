"""Draw docs/pictures/plan.svg: figures of one cache. `python drawings/plan.py`

The ideal, what regard's caches allocate, whole blocks, and keys and values of every head, for the
sizes of DeepSeek-V3 and of Gemma 3 27B, as `regard.plan` computes them.
"""

from dataclasses import replace
from pathlib import Path

from common import BLUE, GREEN, INK, RED, SMALL, WIDTH, program, save
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from regard.plan.cost import cost_of
from regard.plan.planning import plan
from regard.plan.shapes import STORAGES, LayerShape, ModelShape

CONTEXTS = [1 << n for n in range(9, 18)]  # tokens
GIBIBYTE = 1 << 30
MLA = LayerShape(
    hidden_size=7168,
    num_heads=128,
    num_kv_heads=128,
    head_dim=192,
    v_head_dim=128,
    kv_lora_rank=512,
    q_lora_rank=1536,
    qk_rope_head_dim=64,
)
FULL = LayerShape(hidden_size=5376, num_heads=32, num_kv_heads=16, head_dim=128, v_head_dim=128)
WINDOW = replace(FULL, window=1024)
MODELS = {
    "61 layers of MLA(512+64)": (MLA,) * 61,
    "52 windows of 1,024, 10 full layers": ((WINDOW,) * 5 + (FULL,)) * 10 + (WINDOW,) * 2,
}
LINES = {
    "ideal": (INK, "-"),
    "regard": (BLUE, "-"),
    "blocks of 64": (GREEN, "--"),
    "every head": (RED, "-."),
}


def figures(layers: tuple[LayerShape, ...], context: int) -> dict[str, float]:
    """GiB of each figure."""
    model = ModelShape(
        name="",
        architecture="",
        layers=layers,
        hidden_size=layers[0].hidden_size,
        dtype="bfloat16",
    )
    row = plan(model, context=context, attentions=["shipped"], block=64).rows[0]
    expanded = replace(model, layers=tuple(replace(each, kv_lora_rank=None) for each in layers))
    sizes = {
        "ideal": row.cost.cache_bytes,
        "regard": row.cost.allocated_bytes,
        "blocks of 64": row.block_bytes or 0,
        "every head": cost_of(expanded, STORAGES["plain"], context=context).cache_bytes,
    }
    return {name: size / GIBIBYTE for name, size in sizes.items()}


def panel(axes: Axes, title: str, layers: tuple[LayerShape, ...]) -> None:
    """One model."""
    found = [figures(layers, context) for context in CONTEXTS]
    for name, (colour, style) in LINES.items():
        sizes = [each[name] for each in found]
        axes.plot(CONTEXTS, sizes, color=colour, linestyle=style, linewidth=1.8, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(CONTEXTS[1::3], [f"{context // 1024}K" for context in CONTEXTS[1::3]])
    axes.set_title(title, fontsize=SMALL)
    axes.set_xlabel("tokens")
    axes.grid(visible=True)


def draw(folder: Path) -> list[Path]:
    """Draw both models side by side."""
    figure = Figure(figsize=(WIDTH, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for axes, (title, layers) in zip((left, right), MODELS.items(), strict=True):
        panel(axes, title, layers)
    left.set_ylabel("GiB of cache")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return [save(figure, folder, "plan")]


if __name__ == "__main__":
    program(draw)
