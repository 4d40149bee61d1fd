"""Output on a terminal: its width, wrapped sentences, and progress on stderr."""

import json
import logging
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleDimensions, RenderableType
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

PIPED = 100  # columns of a table where stdout is a file or a pipe
UNWRAPPED = 1_000_000  # columns where a file or a pipe gets each paragraph as one line
EVERY = 10  # seconds between two lines of progress in a pipe; shorter work prints none
WIDEST = 120  # columns at most: longer lines are hard to read


def wrapped(text: str, width: int, *, margin: str = "") -> str:
    """The text in lines of so many columns; a word longer than the line stays whole.

    Examples:
        >>> print(wrapped("one two three", 8, margin=" "))
         one two
         three
    """
    fill = textwrap.TextWrapper(
        width,
        initial_indent=margin,
        subsequent_indent=margin,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(line for given in text.splitlines() for line in fill.wrap(given))


def printable(text: str) -> str:
    """The text with control characters, which could move a terminal's cursor, as their escapes.

    Examples:
        >>> print(printable("a\\x1b[31mb"))
        a\\x1b[31mb
    """
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def stdout(piped: int = PIPED) -> Console:
    """Stdout, as wide as its terminal; a file or a pipe gets so many columns."""
    console = Console(highlight=False)
    dumb = console.is_dumb_terminal  # rich takes 80 columns for each
    columns = shutil.get_terminal_size().columns if dumb else console.width
    columns = min(columns, WIDEST) if console.is_terminal else piped
    console.size = ConsoleDimensions(columns, console.height)  # rich ignores a width alone, if dumb
    return console


def say(
    console: Console, sentence: str, *, style: str = "", bold: str = "", indent: int = 0
) -> None:
    """Print a sentence, wrapped between words; `bold` is its beginning, if that is to be bold.

    It may quote a file: characters that control a terminal are printed as their escapes.
    """
    lines, bold = wrapped(printable(sentence), console.width, margin=" " * indent), printable(bold)
    if not lines:
        return
    text = Text(lines, style=style)
    text.stylize("bold", 0, indent + len(bold) if bold else 0)
    console.print(text, soft_wrap=True)


def print_lines(console: Console, text: str) -> None:
    """Print lines, long ones wrapped on a terminal, with control characters as their escapes."""
    for line in map(printable, text.splitlines()):
        whole = cell_len(line) <= console.width or not console.is_terminal
        line = line if whole else wrapped(line, console.width)
        console.print(line, markup=False, soft_wrap=True)


def print_json(data: Any, indent: int | None = 2) -> None:
    """Print data as JSON on stdout, with every control character as its escape."""
    text = json.dumps(data, indent=indent, allow_nan=False)
    print(text.replace("\x7f", r"\u007f"))  # the only one that `json` lets through


def print_measured(data: Mapping[str, Any]) -> None:
    """Print measurements as JSON, with the name of the processor that they were made on."""
    from regard.rates import processor_name

    print_json({"processor": processor_name(), **data})


def remarks(console: Console, heading: str, reasons: Mapping[str, str]) -> None:
    """Below a table: why rows are missing. Rows with the same reason share a sentence."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name)
    if names:
        console.print(f"\n[bold]{heading}[/bold]")
    for reason, missing in names.items():
        say(console, f"{'; '.join(missing)}: {reason.rstrip('.')}.", indent=2)


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Show on stderr what the program waits for, until it is done.

    The line is erased afterwards, so text on stdout must end with a newline before.
    """
    with _progress() as bar:
        bar.add_task(printable(what), total=None)
        yield


@contextmanager
def progress_bar() -> Iterator["Bar | Lines"]:
    """A bar on stderr, erased when the work is done; a total of 0 means not known yet.

    Where stderr is a file or a pipe, a line every few seconds that says what is done next.
    """
    if not Console(stderr=True).is_terminal:
        yield Lines()
        return
    logger = logging.getLogger("regard")
    with _progress(BarColumn(bar_width=20)) as drawn:
        logger.addHandler(bar := Bar(drawn))
        try:
            yield bar
        finally:
            logger.removeHandler(bar)


class Bar(logging.Handler):
    """Progress on a terminal: a bar, and above it the table of all that is finished.

    Notices of the library, such as that it compiles, take the place of the present step's name.
    """

    def __init__(self, progress: "_Progress") -> None:
        super().__init__()
        self._progress = progress
        self._task = progress.add_task("loading", total=None)

    def emit(self, record: logging.LogRecord) -> None:
        """Replace the name of the present step until the next step begins."""
        self._progress.update(self._task, description=printable(record.getMessage()))

    def __call__(self, what: str, done: int, total: int) -> None:
        self._progress.update(
            self._task, description=printable(what), completed=done, total=total or None
        )

    def finished(self, line: str, table: Callable[[Console], None]) -> None:
        """Show a table of all that is finished, in place of the one before."""
        console = Console(highlight=False, width=min(self._progress.console.width, WIDEST))
        with console.capture() as drawn:
            table(console)
        self._progress.above = Text.from_ansi(drawn.get())
        self._progress.refresh()


class Lines:
    """Progress in a file or a pipe, on stderr: a line for each finished row, and between them at
    most one in `EVERY` seconds."""

    def __init__(self) -> None:
        self._started = self._latest = time.monotonic()

    def __call__(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._latest >= EVERY:
            share = f", {done} of {total}" if total else ""
            self._print(now, f"{share}: {what}")

    def finished(self, line: str, table: Callable[[Console], None]) -> None:
        """Print the line of a row that is finished."""
        self._print(time.monotonic(), f": {line}")

    def _print(self, now: float, line: str) -> None:
        self._latest = now
        line = f"regard: {now - self._started:.0f} s{line}"
        print(printable(line), file=sys.stderr, flush=True)


class _Progress(Progress):
    """A progress bar with a table above it."""

    above: RenderableType = ""

    def get_renderables(self) -> Iterator[RenderableType]:
        """The table above the bar, if there is one, and the bar."""
        if self.above:
            yield self.above
        yield from super().get_renderables()


def _progress(*columns: ProgressColumn) -> _Progress:
    """One line on stderr: the current step, shortened to fit, and the time so far."""
    console = Console(stderr=True)
    console.width = min(console.width, PIPED)
    whole = Column(ratio=1, no_wrap=True, overflow="ellipsis")
    what = TextColumn("{task.description}", markup=False, table_column=whole)
    times = (TimeElapsedColumn(), TimeRemainingColumn()) if columns else (TimeElapsedColumn(),)
    return _Progress(what, *columns, *times, console=console, transient=True, expand=True)
