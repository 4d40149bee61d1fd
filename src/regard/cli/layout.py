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


def tabulate(console: Console, heads: Sequence[str], rows: Sequence[Sequence[str | Text]]) -> None:
    """Print the rows in the first layout that fits the console.

    Cells of words may take several lines and are aligned left, as is the first column; numbers are
    aligned right. A heading may take several lines. A first cell that is the same as the one above
    is shown once.
    """
    cells = [
        [Text(printable(cell)) if isinstance(cell, str) else cell for cell in row] for row in rows
    ]
    for before, row in reversed(list(pairwise(cells))):
        if row[0] == before[0]:
            row[0] = Text()
    columns = [_Column(head, [row[at] for row in cells], at == 0) for at, head in enumerate(heads)]
    tables = _packed(columns, console.width)
    if any(_across(table) > console.width for table in tables):
        _print_listed(console, heads, cells)
        return
    for number, table in enumerate(tables):
        if number:
            console.print()
        console.print(_table(table, console.width))


class _Column:
    """A heading with the cells below it, and the width in which no word is broken."""

    def __init__(self, head: str, cells: list[Text], first: bool) -> None:
        self.head, self.cells = head, cells
        self.words = first or are_words([cell.plain for cell in cells])
        self.longest = max((cell.cell_len for cell in cells), default=0)
        wide = [cell_len(word) for word in head.split()]
        if self.words:
            wide += [cell_len(word) for cell in cells for word in cell.plain.split()]
            wide.append(min(self.longest, max(READABLE, -(-self.longest // TALLEST))))
        else:
            wide.append(self.longest)
        self.least = max(wide, default=0)

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
        if _across([*tables[-1], column]) > width and len(tables[-1]) > 1:
            tables.append([first])
        tables[-1].append(column)
    return tables


def _across(columns: Sequence[_Column]) -> int:
    """The least width of a table."""
    return sum(column.least for column in columns) + GAP * (len(columns) - 1)


def _table(columns: Sequence[_Column], width: int) -> Table:
    """The columns; the rest of the line goes to wrapped words first, then to headings."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, GAP, 0, 0))
    spare, widths = width - _across(columns), dict[_Column, int]()
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


def _print_listed(console: Console, heads: Sequence[str], cells: Sequence[Sequence[Text]]) -> None:
    """First cells on their own lines; below them one line for each other cell, heading first."""
    for first, *others in cells:
        say(console, first.plain)
        for head, cell in zip(heads[1:], others, strict=True):
            say(console, f"{head} {cell.plain}".strip(), bold=head, indent=GAP)
