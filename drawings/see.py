"""Draws where the heads of SmolLM2-135M look: an overview of all, and the maps of three.

python drawings/see.py

The numbers are in docs/see.json. If that file is missing, the model is run and the file written.
"""

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path

import torch
from common import BLUE, INK, PICTURES, program

import regard.hf
from regard.see import attention
from regard.see.map_text import best, readable

NAME = "see"
TEXT = "The capital of France is Paris, and the capital of Italy is Rome"
DATA = PICTURES.parent / "see.json"
CELLS = 16  # of a head in the overview, each way: pairs of those of AttentionMaps are joined
LEVELS = 7  # of opacity, which is the square root of a weight; a digit each
PROMPT = PICTURES.parents[1] / "CONTRIBUTING.md"  # the text of the overview
TOKENS = 256
WIDE = 720  # pixels of the picture, as of a page
ROW, LABEL = 13, 58  # pixels of a token's row, and of its name
FONT = 'font-family="DejaVu Sans, sans-serif"'


def measured() -> dict[str, object]:
    """The overview of all heads on a long text; and on a short one the head that looks most at the
    previous token, at the first one, and at what followed the same token before."""
    model, tokenizer = regard.hf.smollm2()
    ids = tokenizer(PROMPT.read_text(encoding="utf-8"), return_tensors="pt")["input_ids"]
    overview = attention(model, ids[:, :TOKENS]).overview
    pairs = overview.unflatten(2, (CELLS, -1)).mean(3).unflatten(3, (CELLS, -1)).sum(4)
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"]
    names = [tokenizer.decode([each]) for each in ids[0].tolist()]
    maps = attention(model, ids, layers=range(len(overview)), names=names)
    found = [
        ("previous token", maps.previous_share),
        ("first token", maps.sink_share),
        ("after the same token", after_the_same(names, maps.weights)),
    ]
    heads = [(says, *best(values, 1)[0][:2]) for says, values in found]
    return {
        "overview": [["".join(map(digits, head)) for head in layer] for layer in pairs],
        "tokens": [readable(name) for name in names],
        "heads": [(says, layer, head) for says, layer, head in heads],
        "maps": [[digits(row) for row in maps.map(layer, head)] for _, layer, head in heads],
    }


def after_the_same(names: Sequence[str], weights: torch.Tensor) -> torch.Tensor:
    """Of each head, the mean weight on the token that followed an earlier, equal token."""
    pairs = [
        (query, key + 1)
        for query in range(len(names))
        for key in range(query - 1)
        if names[key] == names[query]
    ]
    return torch.stack([weights[:, :, query, key] for query, key in pairs]).mean(0)


def digits(row: torch.Tensor) -> str:
    """Square roots of weights, as a digit each."""
    levels = (row.clamp(0, 1).sqrt() * (LEVELS - 1)).round().int()
    return "".join(map(str, levels.tolist()))


def cells(rows: Sequence[str], x: int, y: int) -> dict[str, list[str]]:
    """Runs of equal cells at a place, as pieces of a path, by their level."""
    pieces: dict[str, list[str]] = {str(level): [] for level in range(1, LEVELS)}
    for down, row in enumerate(rows):
        start = 0
        for at in range(1, len(row) + 1):
            if at == len(row) or row[at] != row[start]:
                if row[start] != "0":
                    long = at - start
                    pieces[row[start]].append(f"M{x + start} {y + down}h{long}v1h-{long}z")
                start = at
    return pieces


def painted(drawn: Sequence[dict[str, list[str]]]) -> str:
    """Cells as one path a level."""
    paths = []
    for level in map(str, range(1, LEVELS)):
        path = "".join(piece for each in drawn for piece in each[level])
        paths.append(f'<path fill-opacity="{int(level) / (LEVELS - 1):.2f}" d="{path}"/>')
    return "".join(paths)


def text(x: float, y: float, words: str, *, anchor: str = "start", size: int = 12) -> str:
    place = f'x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" font-size="{size}"'
    return f"<text {place}>{escape(words)}</text>"


def all_heads(overview: Sequence[Sequence[str]], top: int) -> tuple[str, int]:
    """Layers across, heads down; and where the picture goes on."""
    step, left = CELLS + 2, 30
    rows = [
        cells([head[at : at + CELLS] for at in range(0, len(head), CELLS)], layer * step, at * step)
        for layer, heads in enumerate(overview)
        for at, head in enumerate(heads)
    ]
    scale = (WIDE - left) / (step * len(overview))
    high = round(scale * step * len(overview[0]))
    place = f'transform="translate({left} {top + 30}) scale({scale:.4f})" fill="{BLUE}"'
    says = f"all {len(overview)} layers across, {len(overview[0])} heads down, {TOKENS} tokens"
    names = [text(0, top + 12, says, size=14)]
    for layer in range(0, len(overview), 5):
        names.append(text(left + scale * step * layer + 10, top + 27, str(layer), anchor="middle"))
    for head in range(0, len(overview[0]), 4):
        names.append(text(left - 8, top + 46 + scale * step * head, str(head), anchor="end"))
    return f"<g {place}>{painted(rows)}</g>{''.join(names)}", top + 30 + high


def one_map(rows: Sequence[str], tokens: Sequence[str], title: str, x: int, top: int) -> str:
    """The map of one head, with the names of its rows; its columns are the same tokens."""
    names = [
        text(x + LABEL - 5, top + 30 + ROW * (at + 0.8), token, anchor="end")
        for at, token in enumerate(tokens)
    ]
    place = f'transform="translate({x + LABEL} {top + 30}) scale({ROW})" fill="{BLUE}"'
    heading = text(x + LABEL, top + 18, title)
    return f"<g {place}>{painted([cells(rows, 0, 0)])}</g>{heading}{''.join(names)}"


def draw(folder: Path) -> list[Path]:
    if not DATA.exists():
        DATA.write_text(
            json.dumps(measured(), indent=0, ensure_ascii=False) + "\n", encoding="utf-8"
        )
    data = json.loads(DATA.read_text(encoding="utf-8"))
    overview, top = all_heads(data["overview"], 0)
    parts, top = [overview], top + 14
    for at, (says, layer, head) in enumerate(data["heads"]):
        title = f"{layer}.{head}: {says}"
        parts.append(one_map(data["maps"][at], data["tokens"], title, at * WIDE // 3, top))
    high = top + 34 + ROW * len(data["tokens"])
    box = f'viewBox="0 0 {WIDE} {high}" width="{WIDE}" height="{high}"'
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" {box} fill="{INK}" {FONT}>'
    path = folder / f"{NAME}.svg"
    path.write_text("\n".join((svg, *parts, "</svg>")) + "\n", encoding="utf-8")
    return [path]


if __name__ == "__main__":
    program(draw)
