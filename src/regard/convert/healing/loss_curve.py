"""A picture of the loss during healing."""

from pathlib import Path
from typing import Any

from regard.convert.healing.heal import Healed

ALIGNING, IMITATING = "#8a8f98", "#2a7f62"  # colours of the stages
SMOOTH = 20  # segments of the run whose means are drawn over the single steps


def draw_losses(healed: Healed, path: Path) -> None:
    """Write the loss of every step as a .png, .svg or .pdf, a panel for each stage.

    Args:
        healed: from `heal`.
        path: the file to write.

    Raises:
        ImportError: if matplotlib is missing.
        ValueError: if there was no step.

    Examples:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from regard.convert import Healed, draw_losses
        >>> healed = Healed(losses=(0.9, 0.4, 0.3), aligned=0, seconds=60.0, tokens=4608)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     draw_losses(healed, Path(folder, "losses.svg"))
        ...     Path(folder, "losses.svg").stat().st_size > 0
        True
    """
    if not healed.losses:
        raise ValueError("no step was made, so there is no loss to draw")
    try:
        from matplotlib.figure import Figure  # not pyplot, which keeps a state of its own
    except ImportError as error:
        raise ImportError(
            "a picture needs matplotlib: python -m pip install 'regard[bench]'"
        ) from error
    stages = [
        (healed.losses[: healed.aligned], "layers alone: relative error", ALIGNING),
        (healed.losses[healed.aligned :], "predictions: nats a token, and layers", IMITATING),
    ]
    drawn = [stage for stage in stages if stage[0]]
    figure = Figure(figsize=(4.6 * len(drawn), 3.2), layout="constrained")
    for place, (losses, title, colour) in enumerate(drawn, start=1):
        axes = figure.add_subplot(1, len(drawn), place)
        _panel(axes, losses, title, colour)
    figure.suptitle(
        f"{healed.steps:,} steps, {healed.tokens:,} tokens, {healed.seconds / 60:.1f} min"
    )
    figure.savefig(path, dpi=130)


def _panel(axes: Any, losses: tuple[float, ...], title: str, colour: str) -> None:
    axes.plot(losses, color=colour, lw=0.8, alpha=0.4)
    width = max(1, len(losses) // SMOOTH)
    pieces = [losses[i : i + width] for i in range(0, len(losses), width)]
    middles = [i * width + (len(piece) - 1) / 2 for i, piece in enumerate(pieces)]
    axes.plot(middles, [sum(piece) / len(piece) for piece in pieces], color=colour, lw=2)
    axes.set_title(title, loc="left", fontsize=9)
    axes.set_xlabel("step", fontsize=8)
    axes.set_ylim(bottom=0)
    axes.tick_params(labelsize=7)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
