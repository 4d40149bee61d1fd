"""Pages, and the table of the pages of one row of a batch."""

from dataclasses import dataclass, field
from typing import Any

from regard.cache.paging.slabs import Slab


class Page:
    """`page_size` tokens of one row of one layer.

    Attributes:
        slab: where it lies.
        index: its number in the slab.
        references: the number of tables that it is in.
        sealed: whether it is full, and so immutable: others may share it.
        used: when it was last used, in operations of its pool.
        node: its place among stored prefixes; None if it is in none.
    """

    __slots__ = ("index", "node", "references", "sealed", "slab", "used")

    def __init__(self, slab: Slab, index: int) -> None:
        self.slab, self.index = slab, index
        self.references, self.used = 0, 0
        self.sealed = False
        self.node: Any = None

    @property
    def start(self) -> int:
        """The number of its first token in the slab."""
        return self.index * self.slab.page_size

    @property
    def is_private(self) -> bool:
        """Whether one table alone has it."""
        return self.references == 1 and self.node is None

    def __repr__(self) -> str:
        state = "sealed" if self.sealed else "open"
        return f"Page({self.index}, {state}, references={self.references})"


@dataclass
class PageTable:
    """The pages of one row, in order.

    Attributes:
        pages: without those before a window.
        first: the number of pages before them.
    """

    pages: list[Page] = field(default_factory=list)
    first: int = 0

    @property
    def stop(self) -> int:
        """One past the number of the last page."""
        return self.first + len(self.pages)

    def at(self, number: int) -> Page | None:
        """The page of that number; None if the row does not have it."""
        index = number - self.first
        return self.pages[index] if 0 <= index < len(self.pages) else None

    def copied(self) -> "PageTable":
        return PageTable(list(self.pages), self.first)
