"""Draws measured errors of attention against float64, and the bounds of the numeric contract.

python drawings/precision.py
python drawings/precision.py --measure      # measures anew first, and writes precision.json
"""

import json
import random
import sys
from pathlib import Path

import torch
from common import AMBER, BLUE, FAINT, GREEN, INK, MEDIUM, PICTURES, WIDTH, program, save
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from regard import EVERYTHING, Causal, attend

MEASURED = PICTURES / "precision.json"
CALLS = 150  # of each kind
BACKENDS = ("auto", "sdpa", "grouped", "fused", "blocked", "eager")
KINDS = {
    "float32": (torch.float32, "strict"),
    "bfloat16": (torch.bfloat16, "strict"),
    "bfloat16, fast": (torch.bfloat16, "fast"),
}


def definition(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> tuple[Tensor, float]:
    """Attention in float64, and S: the largest sum of |scale q_i k_i| over visible keys."""
    q, k, v = q.double() * q.shape[-1] ** -0.5, k.double(), v.double()
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    weights = (q @ k.mT).masked_fill(~keep, -torch.inf).softmax(-1)
    return weights @ v, (q.abs() @ k.abs().mT)[..., keep].max().item()


def one_call(seed: int, dtype: torch.dtype, precision: str) -> dict[str, float | str] | None:
    """A random call's error in units of u vmax, and its S; None if its backend objects."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    groups, size, dim = rng.choice((1, 2, 4)), rng.choice((1, 2, 4)), rng.choice((32, 64, 128))
    queries, keys = rng.choice((1, 4, 64, 300)), rng.randint(1, 700)
    queries = keys if rng.random() < 0.5 else min(queries, keys)
    mask = Causal() if queries == keys else EVERYTHING
    q = torch.randn(1, groups * size, queries, dim) * 10 ** rng.uniform(-2, 1.5)
    q, k, v = (x.to(dtype) for x in (q, *torch.randn(2, 1, groups, keys, dim)))
    keep = torch.ones(queries, keys, dtype=torch.bool)
    expected, largest = definition(q, k, v, keep.tril() if queries == keys else keep)
    backend = "blocked" if precision == "fast" else rng.choice(BACKENDS)
    try:
        out = attend(q, k, v, mask=mask, backend=backend, precision=precision)
    except ValueError:
        return None
    units = torch.finfo(dtype).eps / 2 * v.double().abs().max().item()
    error = (out.double() - expected).abs().max().item() / units
    return {"backend": backend, "S": float(f"{largest:.4g}"), "error": float(f"{error:.4g}")}


def measure() -> None:
    """Write the errors of random calls with fixed seeds to precision.json."""
    found = {}
    for name, (dtype, precision) in KINDS.items():
        calls = (one_call(seed, dtype, precision) for seed in range(4 * CALLS))
        found[name] = [call for call in calls if call is not None][:CALLS]
    lines = [
        f'  "{name}": [\n' + ",\n".join(f"    {json.dumps(call)}" for call in calls) + "\n  ]"
        for name, calls in found.items()
    ]
    MEASURED.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def bound(axes: Axes, name: str, sums: list[float], values: list[float], colour: str) -> None:
    axes.plot(sums, values, color=colour, linewidth=2)
    axes.annotate(
        name, (sums[-1], values[-1]), (-6, 5), textcoords="offset points", color=colour,
        size=MEDIUM, ha="right",
    )  # fmt: skip


def precision(folder: Path) -> Path:
    """A point is a call; lines are the bounds that the contract promises."""
    figure = Figure(figsize=(WIDTH, 3.8), layout="constrained")
    axes = figure.subplots()
    calls = json.loads(MEASURED.read_text(encoding="utf-8"))
    for (name, found), colour in zip(calls.items(), (GREEN, BLUE, AMBER), strict=True):
        points = [(call["S"], call["error"]) for call in found]
        axes.scatter(*zip(*points, strict=True), s=9, color=colour, lw=0, label=name)
    sums = [10 ** (n / 10) for n in range(-11, 28)]
    bound(axes, "1.5: bfloat16", [sums[0], sums[-1]], [1.5, 1.5], BLUE)
    bound(axes, "2 (1 + S): float32, fast  ", sums, [2 * (1 + each) for each in sums], INK)
    axes.set(xscale="log", yscale="log", xlabel="S, the largest sum of |scale q k|")
    axes.set(ylabel="error / (u max|V|)", ylim=(0.01, 3000))
    axes.set_xticks([0.1, 1, 10, 100], ["0.1", "1", "10", "100"])
    axes.set_yticks([0.1, 1, 10, 100, 1000], ["0.1", "1", "10", "100", "1,000"])
    axes.minorticks_off()
    axes.grid(color=FAINT)
    axes.legend(loc="upper left", markerscale=2)
    return save(figure, folder, "precision")


def draw(folder: Path) -> list[Path]:
    """The drawing of the numeric contract."""
    return [precision(folder)]


if __name__ == "__main__":
    if "--measure" in sys.argv:
        sys.argv.remove("--measure")
        measure()
    program(draw)
