"""A table that fits the width of the terminal: no word is broken, and no cell is cut.

The first of four layouts that fits: one line for each row; the same in several tables, below each
other, of the columns of one group or more; the first cell of a row on its own line, above the
others; one line for each cell.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from regard.cli.sentences import printable
from regard.cli.terminal import say

GAP = 2  # spaces between columns, and before lines below a first cell
READABLE = 20  # characters of a line of wrapped words at least
TALLEST = 4  # lines of a cell, about, from which the width of sentences follows

Cells = list[list[Text]]


@dataclass(frozen=True)
class Column:
    """A column's heading, and how its cells are set.

    Args:
        head: the heading; it may take several lines.
        words: whether cells are words that may take several lines. Other cells take one line.
        left: whether cells that take one line are set to the left, as names are.
        group: its subject. Columns of one group that follow each other stay in one table.
    """

    head: str
    words: bool = False
    left: bool = False
    group: str = ""


def tabulate(console: Console, columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    """Print the rows, whose cells may have rich's markup, in the first layout that fits.

    A first cell that is the same as the one above is shown once.
    """
    cells = [[Text.from_markup(printable(cell)) for cell in row] for row in rows]
    least = [_least(column, at, cells) for at, column in enumerate(columns)]
    tables = _packed(columns, least, console.width)
    if all(_across([least[at] for at in each]) <= console.width for each in tables):
        _print_tables(console, columns, cells, least, tables)
    elif GAP + _across(least[1:]) <= console.width:
        _print_stacked(console, columns, cells, least)
    else:
        _print_listed(console, columns, cells)


def _packed(columns: Sequence[Column], least: Sequence[int], width: int) -> list[list[int]]:
    """The columns of each table: the first, and as many groups of the others as fit."""
    tables: list[list[int]] = [[0]]
    for _, group in groupby(range(1, len(columns)), key=lambda at: columns[at].group):
        more = list(group)
        if len(tables[-1]) > 1 and _across([least[at] for at in tables[-1] + more]) > width:
            tables.append([0])
        tables[-1] += more
    return tables


def _print_tables(
    console: Console,
    columns: Sequence[Column],
    cells: Cells,
    least: Sequence[int],
    tables: Sequence[Sequence[int]],
) -> None:
    """A line for each row, in each table, with an empty line between tables."""
    for number, table in enumerate(tables):
        if number:
            console.print()
        some = [columns[at] for at in table]
        texts = [[row[at] for at in table] for row in cells]
        widths = _grown(some, texts, [least[at] for at in table], console.width)
        console.print(_table(some, widths, _without_repeats(texts)))


def _across(widths: Sequence[int]) -> int:
    return sum(widths) + GAP * (len(widths) - 1)


def _least(column: Column, at: int, cells: Cells) -> int:
    """The smallest width in which no word is broken."""
    head = max(map(cell_len, column.head.split()), default=0)
    longest = max((row[at].cell_len for row in cells), default=0)
    if not column.words:
        return max(head, longest)
    word = max((cell_len(word) for row in cells for word in row[at].plain.split()), default=0)
    return max(head, word, min(longest, max(READABLE, -(-longest // TALLEST))))


def _grown(columns: Sequence[Column], cells: Cells, least: Sequence[int], width: int) -> list[int]:
    """Distribute the rest of a line over the columns: first to wrapped words, then to headings."""
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
    """First cells on their own lines; the others below them, in columns."""
    first, *others = columns
    widths = _grown(others, [row[1:] for row in cells], least[1:], console.width - GAP)
    if first.head:
        say(console, first.head, style="bold")
    console.print(_under(_table(others, widths, [])))
    for row, shown in zip(cells, _without_repeats(cells), strict=True):
        say(console, shown[0].plain)
        table = _table(others, widths, [row[1:]])
        table.show_header = False
        console.print(_under(table))


def _under(table: Table) -> Padding:
    return Padding(table, (0, 0, 0, GAP), expand=False)


def _print_listed(console: Console, columns: Sequence[Column], cells: Cells) -> None:
    """First cells on their own lines; below them one line for each other cell, heading first."""
    for first, *others in _without_repeats(cells):
        say(console, first.plain)
        for column, cell in zip(columns[1:], others, strict=True):
            say(console, f"{column.head} {cell.plain}".strip(), bold=column.head, indent=GAP)


def _without_repeats(cells: Cells) -> Cells:
    """The rows; a first cell that is the same as the one above is empty."""
    once = [list(row) for row in cells]
    for before, row in reversed(list(pairwise(once))):
        if row[0] == before[0]:
            row[0] = Text()
    return once
