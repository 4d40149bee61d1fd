"""A page of a frontier: the picture, and the table behind it."""

from html import escape
from pathlib import Path

from regard.compare.frontiers import HEADS, Frontier, cells
from regard.compare.measure import Row
from regard.page.page import Section, table, write_page
from regard.see.pages.scatter import scatter


def write_frontier(result: Frontier, path: Path) -> None:
    """Write a page of a frontier.

    Args:
        result: from `regard.compare.frontier`.
        path: of the HTML file.

    Raises:
        OSError: if the file cannot be written.
    """
    write_page(path, f"{result.model}: the smallest cache for a loss", sections_of(result))


def sections_of(result: Frontier) -> list[Section]:
    """The sections of the page."""
    ran = [row for row in result.rows if row.decode_perplexity is not None]
    drawn = scatter(
        Row(
            row.name,
            exact=False,
            cache_bytes_per_token=row.cache_bytes_per_token,
            perplexity=row.decode_perplexity,
        )
        for row in ran
    )
    picture = Section("picture", "Cache against decode perplexity", html=drawn)
    about = (
        f"{result.windows} windows of {result.context:,} tokens of {result.text}; "
        f"{result.questions} questions after compression"
    )
    rows = [[f"* {row.name}" if row.best else row.name, *cells(row)] for row in ran]
    measured = f"<p>{escape(result.verdict)}</p>\n" + table(about, ["method", *HEADS], rows)
    sections = [picture] if drawn else []
    return [*sections, Section("measured", "Measured", html=measured)]
