"""A page to explore attention: all heads at a glance, each map cell by cell, lines between tokens.

A map is stored as whole multiples of a step, in bytes that the browser inflates.
"""

import math
import zlib
from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, UInt8
from torch import Tensor

from regard.page.page import Section, file_beside, table, write_page
from regard.see.maps import AttentionMaps
from regard.words import counted

BUDGET = 1.7e6  # bytes of the maps in a page, so that the whole is below 2 MB
GRADES = (255, 127, 100, 63, 31)  # steps from 0 to 1; a code is one byte
THUMBNAIL = 16  # rows and columns of a map in the overview
LEVEL = 6  # of zlib: 9 saves 6 % of the bytes and takes 6 times as long
SHADES = 63  # steps of a thumbnail's square roots
STATISTICS = {  # of AttentionMaps: the heading, what a value is measured in, and digits
    "entropy": ("entropy", "nats", 2),
    "distance": ("distance", "tokens", 1),
    "sink_share": ("weight on the first token", "", 3),
    "previous_share": ("weight on the token before", "", 3),
    "self_share": ("weight on itself", "", 3),
    "learned_sink": ("weight on the learned sink", "", 3),
}


def write(
    maps: AttentionMaps,
    path: Path,
    *,
    title: str = "Where heads look",
    pairs: Sequence[tuple[int, int]] = (),
) -> None:
    """Write a page of all heads, with the maps of those that `maps` has.

    The heads of `maps.weights` can be opened; of the others the page shows a thumbnail and the
    statistics. SmolLM2's 270 maps of 256 tokens fit, so ask for all layers and heads up to there;
    of longer texts ask for some layers, heads or queries.

    Args:
        maps: from `regard.see.attention`.
        path: of the HTML file.
        title: the heading, as the model's name.
        pairs: layer and head of the maps that can be opened; all of `maps` if there are none.

    Raises:
        ValueError: if the maps are too many for a page of 2 MB, or hold NaN or infinity.
        OSError: if the file cannot be written.

    Examples:
        >>> import tempfile
        >>> import torch
        >>> from regard import Attention, Causal
        >>> from regard.see import attention
        >>> from regard.see.pages import head_maps
        >>> layer = Attention(8, 2, mask=Causal())
        >>> maps = attention(layer, torch.randn(1, 3, 8), layers=[0], names=["a", "b", "c"])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = Path(folder) / "heads.html"
        ...     head_maps.write(maps, file)
        ...     file.read_text()[:15]
        '<!doctype html>'
    """
    write_page(path, title, sections(maps, pairs))


def sections(maps: AttentionMaps, pairs: Sequence[tuple[int, int]] = ()) -> list[Section]:
    """The parts of the page, for `regard.page.page.page`."""
    data = data_of(maps, pairs)
    html = f"<style>\n{file_beside('heads.css')}</style>\n{_said(maps, data['steps'], pairs)}"
    html += file_beside("heads.html") + _statistics(maps)
    uses = ("cells.js", "token_lines.js", "overview.js")
    return [Section("heads", "Heads", html, data, "heads.js", uses)]


def data_of(maps: AttentionMaps, pairs: Sequence[tuple[int, int]] = ()) -> dict[str, Any]:
    """The data of the page's script.

    `maps` has for each layer the codes of its heads, compressed: a code times `1 / steps` is a
    weight. For each head and each key, the codes of the queries that may see it follow each other:
    those at or after the key if `causal`, else all.
    """
    visible = _visible(maps)
    steps, packed = _fitting(maps, visible)
    return {
        "tokens": list(maps.tokens),
        "layers": list(maps.layers),
        "heads": list(maps.heads),
        "pairs": [list(each) for each in pairs],
        "queries": list(maps.queries),
        "keys": list(maps.keys),
        "steps": steps,
        "causal": not bool(visible.all()),
        "maps": packed,
        "thumbnails": _thumbnails(maps.overview),
        "statistics": [_statistic(maps, name) for name in _shown(maps)],
    }


def _fitting(maps: AttentionMaps, visible: Bool[Tensor, "Q K"]) -> tuple[int, list[str]]:
    """The finest grade whose compressed codes fit in a page, and the codes of each layer."""
    if not maps.weights.isfinite().all():
        raise ValueError("a page shows finite weights, got NaN or infinity; find where they begin")
    if not maps.weights.numel():
        return GRADES[0], []
    columns = maps.weights.mT[..., visible.mT]  # neighbours in a column are alike: smaller by 7 %
    for steps in GRADES:
        packed = [_packed((layer * steps).round().to(torch.uint8)) for layer in columns]
        size = sum(map(len, packed))
        if size <= BUDGET:
            return steps, packed
    of = f"{counted(len(maps.layers), 'layer')} of {counted(len(maps.heads), 'head')}"
    raise ValueError(
        f"a page holds {BUDGET / 1e6:g} MB of maps; {of} over {counted(len(maps.keys), 'token')} "
        f"take {size / 1e6:.1f} MB: choose fewer layers, heads or queries"
    )


def _visible(maps: AttentionMaps) -> Bool[Tensor, "Q K"]:
    """Keys up to the query, if no weight is on a later one; else all."""
    later = torch.tensor(maps.keys)[None] > torch.tensor(maps.queries)[:, None]
    bidirectional = (maps.weights != 0).flatten(0, 1).any(0)[later].any()
    return torch.ones_like(later) if bidirectional else ~later


def _thumbnails(overview: Float[Tensor, "layers heads rows columns"]) -> dict[str, Any]:
    """Smaller maps of all heads: square roots of the cells, a byte each."""
    rows, columns = (min(THUMBNAIL, size) for size in overview.shape[-2:])
    pooled = torch.nn.functional.adaptive_avg_pool2d(overview, (rows, columns))
    share = pooled * (overview.shape[-1] / columns)  # a cell is a sum over its keys
    codes = (share.clamp(0, 1).sqrt() * SHADES).round().to(torch.uint8)
    return {"rows": rows, "columns": columns, "shades": SHADES + 1, "codes": _packed(codes)}


def _packed(codes: UInt8[Tensor, "..."]) -> str:
    return b64encode(zlib.compress(codes.contiguous().numpy().tobytes(), LEVEL)).decode()


def _shown(maps: AttentionMaps) -> list[str]:
    """The statistics that are worth a column: the learned sink's only where there is one."""
    return [name for name in STATISTICS if name != "learned_sink" or maps.learned_sink.any()]


def _statistic(maps: AttentionMaps, name: str) -> dict[str, Any]:
    heading, unit, digits = STATISTICS[name]
    values = [[_number(value) for value in layer] for layer in getattr(maps, name).tolist()]
    return {"name": heading, "unit": unit, "digits": digits, "values": values}


def _number(value: float) -> float | None:
    """A number with as many digits as a page shows, at most; None is one that is not finite."""
    return round(value, 4) if math.isfinite(value) else None


def _statistics(maps: AttentionMaps) -> str:
    """The table behind the overview."""
    names = _shown(maps)
    head = ["layer.head", *(_heading(name) for name in names)]
    layers, heads = maps.entropy.shape
    values = {name: getattr(maps, name).tolist() for name in names}
    rows = [
        [
            f"{layer}.{head}",
            *(f"{values[name][layer][head]:.{STATISTICS[name][2]}f}" for name in names),
        ]
        for layer in range(layers)
        for head in range(heads)
    ]
    drawn = table("Means over the queries; a click on a heading sorts", head, rows)
    return (
        f'<details id="heads-table"><summary>The statistics as a table</summary>{drawn}</details>'
    )


def _heading(name: str) -> str:
    heading, unit, _ = STATISTICS[name]
    return f"{heading} ({unit})" if unit else heading


def _said(maps: AttentionMaps, steps: int, pairs: Sequence[tuple[int, int]]) -> str:
    """A paragraph on the maps of the page and their precision."""
    layers, heads = maps.entropy.shape
    of = f"{counted(layers, 'layer')} of {counted(heads, 'head')}"
    stored = len(pairs) or len(maps.layers) * len(maps.heads)
    opened = stored if maps.weights.numel() else 0
    which = "every map" if opened == layers * heads else counted(opened, "map")
    exact = (
        f" Weights are rounded to multiples of 1/{steps}: they differ from the computed ones by "
        f"{0.5 / steps:.4f} at most."
    )
    return (
        f"<p>{counted(len(maps.tokens), 'token')}; {of}, {which} of which can be opened."
        f"{exact if opened else ''}</p>"
    )
