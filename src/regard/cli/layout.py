"""A table that fits the width of the terminal: no word is broken, and no cell is cut.

The first of three layouts that fits: one line for each row; the same in several tables below each
other, each with some of the columns; one line for each cell.
"""

from collections.abc import Sequence
from itertools import pairwise

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from regard.cli.terminal import printable, say
from regard.page.readable import are_words

GAP = 2  # spaces between columns, and before lines below a first cell
READABLE = 20  # characters of a line of wrapped words at least
TALLEST = 4  # lines of a cell, about, from which the width of sentences follows

Cells = list[list[Text]]


def tabulate(console: Console, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print the rows, whose cells may have rich's markup, in the first layout that fits.

    Cells of words may take several lines and are aligned left, as is the first column; numbers are
    aligned right. A first cell that is the same as the one above is shown once.

    Args:
        console: as wide as the tables may be.
        heads: of the columns; a heading may take several lines.
        rows: their cells.
    """
    cells = [[Text.from_markup(printable(cell)) for cell in row] for row in rows]
    columns = [_Column(head, [row[at] for row in cells], at == 0) for at, head in enumerate(heads)]
    tables = _packed(columns, console.width)
    if all(_across([each.least for each in table]) <= console.width for table in tables):
        for number, table in enumerate(tables):
            if number:
                console.print()
            console.print(_table(table, console.width))
    else:
        _print_listed(console, heads, _without_repeats(cells))


class _Column:
    """A heading with the cells below it, and the width in which no word is broken."""

    def __init__(self, head: str, cells: list[Text], first: bool) -> None:
        self.head = head
        self.words = first or are_words([cell.plain for cell in cells])
        self.cells = [row[0] for row in _without_repeats([[cell] for cell in cells])]
        if not first:
            self.cells = cells
        self.longest = max((cell.cell_len for cell in cells), default=0)
        self.least = max((cell_len(word) for word in head.split()), default=0)
        if self.words:
            words = (word for cell in cells for word in cell.plain.split())
            some_lines = min(self.longest, max(READABLE, -(-self.longest // TALLEST)))
            self.least = max(self.least, some_lines, *map(cell_len, words), 0)
        else:
            self.least = max(self.least, self.longest)

    @property
    def head_in_two_lines(self) -> int:
        """The width in which the heading takes two lines at most."""
        words = self.head.split()
        cuts = ((words[:at], words[at:]) for at in range(1, len(words) + 1))
        return min((max(cell_len(" ".join(line)) for line in cut) for cut in cuts), default=0)


def _packed(columns: Sequence[_Column], width: int) -> list[list[_Column]]:
    """The columns of each table: the first, and as many of the others as fit."""
    first, *others = columns
    tables = [[first]]
    for column in others:
        wide = _across([each.least for each in (*tables[-1], column)]) > width
        if wide and len(tables[-1]) > 1:
            tables.append([first])
        tables[-1].append(column)
    return tables


def _across(widths: Sequence[int]) -> int:
    return sum(widths) + GAP * (len(widths) - 1)


def _table(columns: Sequence[_Column], width: int) -> Table:
    """The columns; the rest of the line goes to wrapped words first, then to headings."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, GAP, 0, 0))
    spare, widths = width - _across([each.least for each in columns]), dict[_Column, int]()
    for column in sorted(columns, key=lambda each: not each.words):
        wanted = max(column.longest, column.head_in_two_lines)
        widths[column] = min(max(column.least, wanted), column.least + spare)
        spare -= widths[column] - column.least
    for column in columns:
        align = "left" if column.words else "right"
        table.add_column(column.head, width=widths[column], justify=align)  # type: ignore[arg-type]
    for row in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*row)
    return table


def _print_listed(console: Console, heads: Sequence[str], cells: Cells) -> None:
    """First cells on their own lines; below them one line for each other cell, heading first."""
    for first, *others in cells:
        say(console, first.plain)
        for head, cell in zip(heads[1:], others, strict=True):
            say(console, f"{head} {cell.plain}".strip(), bold=head, indent=GAP)


def _without_repeats(cells: Cells) -> Cells:
    """The rows; a first cell that is the same as the one above is empty."""
    once = [list(row) for row in cells]
    for before, row in reversed(list(pairwise(once))):
        if row[0] == before[0]:
            row[0] = Text()
    return once
