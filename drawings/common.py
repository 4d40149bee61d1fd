"""What the drawings of the documents share: colours that read on white and on black, and saving."""

import argparse
from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib.figure import Figure

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
INK = "#7d8590"  # text and lines: a contrast above 3.8 on white and on black
FAINT = "#7d859040"  # grids, hidden cells, what is not meant to be looked at first
BLUE, AMBER, GREEN, RED, VIOLET = "#3b82f6", "#d97706", "#0f9d6c", "#dc4c4c", "#8b5cf6"
WIDTH = 7.2  # inches: a page is 720 px wide, and a phone shows half of it
SMALL, MEDIUM, LARGE = 9.0, 10.5, 12.0  # points; below SMALL nothing can be read on a phone

matplotlib.rcParams.update(
    {
        "svg.hashsalt": "regard",  # the same file from the same numbers
        "svg.fonttype": "none",  # text stays text: it can be searched, and read aloud
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans"],
        "font.size": MEDIUM,
        "text.color": INK,
        "axes.edgecolor": INK,
        "axes.labelcolor": INK,
        "axes.titlecolor": INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "xtick.color": INK,
        "ytick.color": INK,
        "grid.color": FAINT,
        "legend.frameon": False,
        "savefig.transparent": True,
    }
)


def save(figure: Figure, folder: Path, name: str) -> Path:
    """Write `name`.svg into a folder, without a date, so that the same picture is the same file."""
    path = folder / f"{name}.svg"
    figure.savefig(
        path, format="svg", metadata={"Date": None}, bbox_inches="tight", pad_inches=0.05
    )
    text = path.read_text(encoding="utf-8")
    path.write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n", encoding="utf-8")
    return path


def program(draw: Callable[[Path], list[Path]]) -> None:
    """Draw into docs/pictures, or into the folder that was given."""
    parser = argparse.ArgumentParser(description=draw.__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=PICTURES)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for path in draw(folder):
        print(path)
