"""Maps of attention as SVG and PNG files, by matplotlib."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from regard.see.figures import GAP, cells, figure, inked, picture
from regard.see.map_text import readable
from regard.see.maps import AttentionMaps
from regard.whole_file import write_whole

GREY = "#7d8590"  # text: a contrast above 3.8 on white and on black
LABELLED = 32  # tokens whose names fit beside a map
ACROSS = 3  # maps in a row of the picture
MOST = 24  # maps in a picture at most
SIDE = 3.4  # inches of a map
HEAD = 0.28  # inches of a head in the overview


def draw(maps: AttentionMaps, path: Path, heads: Sequence[tuple[int, int]] = ()) -> None:
    """Write maps of heads, or the overview of all if none is named, as SVG or PNG.

    Opacity is the square root of a weight, so that small ones are visible. An SVG is transparent.

    Args:
        maps: the maps.
        path: the file.
        heads: layer and head of each map to draw.

    Raises:
        ValueError: if the name ends in neither, or there are more than 24 maps.
        ImportError: if matplotlib is missing.
    """
    if path.suffix not in (".svg", ".png"):
        raise ValueError(f"a picture is .svg or .png, got {str(path)!r}")
    drawn = _maps(maps, heads) if heads else overview(maps)
    write_whole(path, picture(drawn, path.suffix[1:], bbox_inches="tight"))


def overview(maps: AttentionMaps) -> Any:
    """A figure of all heads: layers down, heads across."""
    layers, heads, rows, columns = maps.overview.shape
    plane = cells(maps.overview)
    inch = HEAD / max(rows, columns)
    drawn = figure(0.6 + inch * plane.shape[1], 0.6 + inch * plane.shape[0])
    axes = drawn.subplots()
    axes.imshow(inked(plane).numpy(), interpolation="nearest")
    every = 1 if max(layers, heads) <= 16 else 4
    for names, size, count in (("x", columns, heads), ("y", rows, layers)):
        ticks = range(0, count, every)
        where = [at * (size + GAP) + (size - 1) / 2 for at in ticks]
        axes.set(**{f"{names}ticks": where, f"{names}ticklabels": list(ticks)})
    axes.set_xlabel("head", color=GREY)
    axes.set_ylabel("layer", color=GREY)
    _plain(axes)
    return drawn


def _maps(maps: AttentionMaps, chosen: Sequence[tuple[int, int]]) -> Any:
    """A figure of these maps."""
    if len(chosen) > MOST:
        raise ValueError(f"a picture has {MOST} maps at most, got {len(chosen)}; choose fewer")
    across = min(ACROSS, len(chosen))
    down = -(-len(chosen) // across)
    drawn = figure(SIDE * across, SIDE * down)
    grid = drawn.subplots(down, across, squeeze=False).flatten()
    for axes in grid[len(chosen) :]:
        axes.set_visible(False)
    for axes, (layer, head) in zip(grid, chosen, strict=False):
        axes.imshow(inked(maps.map(layer, head)).numpy(), interpolation="nearest")
        axes.set_title(f"layer {layer}, head {head}", color=GREY, fontsize=10)
        _name(axes, maps)
        _plain(axes)
    drawn.tight_layout()
    return drawn


def _name(axes: Any, maps: AttentionMaps) -> None:
    """Names of the tokens beside a map, or the numbers of the first and last."""
    for names, chosen in (("x", maps.keys), ("y", maps.queries)):
        at = list(range(len(chosen)))
        said = [readable(maps.tokens[token]).replace("$", r"\$") for token in chosen]
        if len(chosen) > LABELLED:
            at, said = [0, len(chosen) - 1], [str(chosen[0]), str(chosen[-1])]
        axes.set(**{f"{names}ticks": at, f"{names}ticklabels": said})
    if len(maps.keys) <= LABELLED:
        axes.tick_params("x", rotation=90)


def _plain(axes: Any) -> None:
    """Grey names, no frame."""
    axes.tick_params(colors=GREY, length=0, labelsize=8)
    for side in axes.spines.values():
        side.set_visible(False)
