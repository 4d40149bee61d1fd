"""Writes source text in which any one place can be replaced by a wrong one."""

import textwrap
from collections.abc import Iterable


class Pen:
    """Writes the right text everywhere, or the wrong one in the places of one fault.

    Args:
        fault: the name of the fault, or "" to write right code.

    >>> pen = Pen("scale_missing")
    >>> pen("scores / math.sqrt(d)", scale_missing="scores"), pen("q", other="k")
    ('scores', 'q')
    >>> sorted(pen.offered)
    ['other', 'scale_missing']
    """

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.offered: set[str] = set()

    def __call__(self, right: str, **wrong: str) -> str:
        """The right text, or the wrong one of this pen's fault."""
        self.offered |= wrong.keys()
        return wrong.get(self.fault, right)


def block(lines: Iterable[str], depth: int = 0) -> str:
    """Lines (or groups of lines) as one text, without the empty ones."""
    text = "\n".join(line for line in lines if line.strip())
    return textwrap.indent(text, "    " * depth)
