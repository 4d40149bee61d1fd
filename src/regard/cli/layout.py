"""A table in as many columns as the terminal has: no word is broken, and no cell is cut.

The plainest of three layouts that fits: a line a row; the first cell on a line of its own, above
the others; a line a cell.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from regard.cli.terminal import say

GAP = 2  # spaces between columns, and before what stands under a first cell
READABLE = 20  # columns that wrapped words get at least: fewer read badly
TALLEST = 4  # lines of a cell, about: sentences get as many columns as that takes

Cells = list[list[Text]]


@dataclass(frozen=True)
class Column:
    """A column's heading, and how its cells are set.

    Args:
        head: the heading; it may take several lines.
        words: whether cells are words that may take several lines. Other cells take one line.
        left: whether cells that take one line are set to the left, as names are.
    """

    head: str
    words: bool = False
    left: bool = False


def tabulate(console: Console, columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    """Print the rows, whose cells may have rich's markup, in the plainest layout that fits.

    A first cell that is the same as the one above is shown once.
    """
    cells = [[Text.from_markup(cell) for cell in row] for row in rows]
    least = [_least(column, at, cells) for at, column in enumerate(columns)]
    if _across(least) <= console.width:
        widths = _grown(columns, cells, least, console.width)
        console.print(_table(columns, widths, _said_once(cells)))
    elif GAP + _across(least[1:]) <= console.width:
        _print_stacked(console, columns, cells, least)
    else:
        _print_listed(console, columns, cells)


def _across(widths: Sequence[int]) -> int:
    return sum(widths) + GAP * (len(widths) - 1)


def _least(column: Column, at: int, cells: Cells) -> int:
    """The fewest columns in which no word is broken."""
    head = max(map(cell_len, column.head.split()), default=0)
    longest = max((row[at].cell_len for row in cells), default=0)
    if not column.words:
        return max(head, longest)
    word = max((cell_len(word) for row in cells for word in row[at].plain.split()), default=0)
    return max(head, word, min(longest, max(READABLE, -(-longest // TALLEST))))


def _grown(columns: Sequence[Column], cells: Cells, least: Sequence[int], width: int) -> list[int]:
    """The widths with what is spare given away: to wrapped words first, then to headings."""
    widths, spare = list(least), width - _across(least)
    for at in sorted(range(len(columns)), key=lambda at: not columns[at].words):
        longest = max((row[at].cell_len for row in cells), default=0)
        more = min(spare, max(longest, _two_lines(columns[at].head)) - widths[at])
        widths[at] += max(0, more)
        spare -= max(0, more)
    return widths


def _two_lines(head: str) -> int:
    """The width in which a heading takes two lines at most."""
    words = head.split()
    cuts = ((words[:at], words[at:]) for at in range(1, len(words) + 1))
    return min((max(cell_len(" ".join(line)) for line in cut) for cut in cuts), default=0)


def _table(columns: Sequence[Column], widths: Sequence[int], cells: Cells) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, GAP, 0, 0))
    for column, width in zip(columns, widths, strict=True):
        left = column.words or column.left
        table.add_column(column.head, width=width, justify="left" if left else "right")
    for row in cells:
        table.add_row(*row)
    return table


def _print_stacked(
    console: Console, columns: Sequence[Column], cells: Cells, least: Sequence[int]
) -> None:
    """First cells on lines of their own; the others under them, in columns."""
    first, *others = columns
    widths = _grown(others, [row[1:] for row in cells], least[1:], console.width - GAP)
    if first.head:
        say(console, first.head, style="bold")
    console.print(_under(_table(others, widths, [])))
    for row, shown in zip(cells, _said_once(cells), strict=True):
        say(console, shown[0].plain)
        table = _table(others, widths, [row[1:]])
        table.show_header = False
        console.print(_under(table))


def _under(table: Table) -> Padding:
    return Padding(table, (0, 0, 0, GAP), expand=False)


def _print_listed(console: Console, columns: Sequence[Column], cells: Cells) -> None:
    """First cells on lines of their own; under them a line for each other cell, heading first."""
    for first, *others in _said_once(cells):
        say(console, first.plain)
        for column, cell in zip(columns[1:], others, strict=True):
            say(console, f"{column.head} {cell.plain}".strip(), bold=column.head, indent=GAP)


def _said_once(cells: Cells) -> Cells:
    """The rows; a first cell that is the same as the one above is empty."""
    said = [list(row) for row in cells]
    for before, row in reversed(list(pairwise(said))):
        if row[0] == before[0]:
            row[0] = Text()
    return said
