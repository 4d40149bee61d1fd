"""Maps of attention as text: a character for each weight, and a table of the largest."""

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from regard.see.maps import AttentionMaps

SHADES = " ░▒▓█"  # of weights below 1/16, 1/8, 1/4, 1/2, and from there on
BOUNDS = (1 / 16, 1 / 8, 1 / 4, 1 / 2)
LABEL = 12  # characters of a token's name at most
BAR = "█"


def map_text(maps: AttentionMaps, layer: int, head: int, *, width: int = 80) -> str:
    """One map as text: a line for each query, a column for each key, two characters wide if all
    keys fit so.

    Args:
        maps: the maps.
        layer: one of `maps.layers`.
        head: one of `maps.heads`.
        width: columns of the terminal; keys beyond are left out, the last ones are shown.

    Raises:
        ValueError: if the map was not computed.

    Examples:
        >>> import torch
        >>> from regard import Attention, Causal
        >>> from regard.see import attention
        >>> layer = Attention(4, 1, mask=Causal())
        >>> torch.nn.init.zeros_(layer.q_proj.weight)[0, 0].item()
        0.0
        >>> maps = attention(layer, torch.randn(1, 3, 4), layers=[0], names=["a", " b", "c"])
        >>> print(map_text(maps, 0, 0))
        0 a  ██
        1 b  ████
        2 c  ▓▓▓▓▓▓
    """
    number = len(str(len(maps.tokens) - 1))
    labels = [f"{at:>{number}} {readable(maps.tokens[at])}" for at in maps.queries]
    longest = max(map(len, labels), default=0)
    room = max(1, width - longest - 2)
    weights = maps.map(layer, head)[:, -room:]
    wide = 2 if 2 * weights.shape[1] <= room else 1
    rows = (shaded(row, wide) for row in weights)
    lines = (f"{label:<{longest}}  {row}" for label, row in zip(labels, rows, strict=True))
    return "\n".join(line.rstrip() for line in lines)


def shaded(row: Float[Tensor, " K"], wide: int = 1) -> str:
    """A shade of text for each weight, `wide` characters wide."""
    shades = (SHADES[sum(weight >= bound for bound in BOUNDS)] for weight in row.tolist())
    return "".join(shade * wide for shade in shades)


def readable(token: str, most: int = LABEL) -> str:
    """A token's name in one line: spaces around it are cut, control characters are escaped."""
    shown = token.strip(" ") or token
    shown = "".join(each if each.isprintable() else ascii(each)[1:-1] for each in shown)
    return shown if len(shown) <= most else shown[: most - 1] + "…"


def bar(share: float, width: int = 10) -> str:
    """A bar for a share of 1.

    Examples:
        >>> bar(0.5, 4)
        '██'
    """
    return BAR * round(width * max(0.0, min(1.0, share)))


def best(
    values: Float[Tensor, "layers heads"], n: int, *, least: bool = False
) -> Sequence[tuple[int, int, float]]:
    """The heads with the largest values, or the least: layer, head and value.

    Examples:
        >>> import torch
        >>> best(torch.tensor([[0.5, 1.0], [0.0, 2.0]]), 2)
        [(1, 1, 2.0), (0, 1, 1.0)]
    """
    flat = values.flatten()
    found = flat.topk(min(n, len(flat)), largest=not least)
    heads = values.shape[1]
    return [
        (at // heads, at % heads, value)
        for at, value in zip(found.indices.tolist(), found.values.tolist(), strict=True)
    ]
