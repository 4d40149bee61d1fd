"""Pages in files: what caches and pools store of them, with tables that name them by number.

Pages are written as they are stored, codes with their scales, and each of them once, however many
rows share it.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.cache.files import Stacked, is_naturals
from regard.cache.paging.bookkeeping import Kind, Pages
from regard.cache.paging.formats import PageFormat
from regard.cache.paging.pages import Page
from regard.cache.paging.slabs import Outline, Slab, coded
from regard.cache.rotation import blocks_of
from regard.cache.saving import outlines_from, outlines_text

Outlines = tuple[Outline, ...]


class Group(NamedTuple):
    """Pages of one kind, in a row of numbers."""

    outlines: Outlines  # of its kind
    codes: bool  # whether they are stored as codes
    size: int  # pages

    @property
    def stored(self) -> Outlines:
        """The outlines of what is stored."""
        return self.outlines if self.codes else tuple(each.plain for each in self.outlines)

    def shapes(self, page_size: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """The shapes and dtypes of the tensors of a file that hold these pages."""
        return [
            ((self.size, *shape), dtype)
            for each in self.stored
            for shape, dtype in each.buffers(page_size)
        ]


class Numbered:
    """Pages with a number each, for a file.

    Args:
        pool: of the pages.
        pages: in any order; one may come several times.
        empty: the kind of a cache that has rows, and may have no page: it is stored as a group of
            0 pages then, which has the shapes and dtypes of the streams.
    """

    def __init__(self, pool: Pages, pages: Iterable[Page], empty: Kind | None = None) -> None:
        found: dict[tuple[Outlines, bool], dict[Page, None]] = {}
        for page in pages:
            kind = pool.kind_with(page.slab)
            codes = kind.open is not kind.sealed and page.slab is not kind.open
            found.setdefault((kind.sealed.outlines, codes), {})[page] = None
        if empty is not None and not found:
            found[empty.sealed.outlines, False] = {}
        self._page_size = pool.page_size
        self._pages = [list(each) for each in found.values()]
        self.numbers = {page: n for n, page in enumerate(p for each in self._pages for p in each)}
        self.groups = [
            Group(*key, len(pages)) for key, pages in zip(found, self._pages, strict=True)
        ]

    def text(self) -> list[dict[str, Any]]:
        """The groups, for JSON."""
        return [
            {
                "outlines": outlines_text([each.empty(1, 0) for each in group.outlines]),
                "rotations": [list(each.rotation) for each in group.outlines],
                "codes": group.codes,
                "count": group.size,
            }
            for group in self.groups
        ]

    def streams(self) -> tuple[Stacked | Tensor, ...]:
        """What the pages store, group by group."""
        if not self.numbers:
            shapes = (each for group in self.groups for each in group.shapes(self._page_size))
            return tuple(torch.empty(shape, dtype=dtype, device="cpu") for shape, dtype in shapes)
        return tuple(
            Stacked(buffer)
            for pages in self._pages
            for buffer in zip(*(page.slab.stored(page.index) for page in pages), strict=True)
        )


def groups_from(value: Any, form: PageFormat, page_size: int, device: torch.device) -> list[Group]:
    """The groups that JSON describes.

    Args:
        value: of the JSON of a file.
        form: of the pool.
        page_size: of the pool.
        device: of its pages.

    Raises:
        ValueError: if it describes none, or pages that the pool would store otherwise.
    """
    if not isinstance(value, list):
        raise ValueError(f"groups of pages are a list, got {value!r:.200}")
    groups = [_group(each, form, page_size, device) for each in value]
    if len({group[:2] for group in groups}) != len(groups):
        raise ValueError("pages of one kind are one group")
    if len(groups) > 1 and not all(group.size for group in groups):
        raise ValueError("a group of 0 pages is the only one")
    return groups


def _group(value: Any, form: PageFormat, page_size: int, device: torch.device) -> Group:
    names = {"outlines", "rotations", "codes", "count"}
    if not isinstance(value, dict) or set(value) != names:
        raise ValueError(f"a group of pages has {', '.join(sorted(names))}, got {value!r:.200}")
    likes, rotations = outlines_from(value["outlines"], ()), value["rotations"]
    if not isinstance(rotations, list) or len(rotations) != len(likes) or not likes:
        raise ValueError(f"a group has a rotation for each stream, got {rotations!r:.200}")
    count, codes = value["count"], value["codes"]
    if not is_naturals([count]) or codes not in (0, 1) or (codes and not count):
        raise ValueError(f"a group has a count of pages, and codes or not, got {value!r:.200}")
    outlines = tuple(
        _outline(index, like, rotation, form, page_size, device)
        for index, (like, rotation) in enumerate(zip(likes, rotations, strict=True))
    )
    if codes and all(each.bits is None for each in outlines):
        raise ValueError(f"pages of format {form.name!r} have no codes")
    if count and not any(each.heads * each.width for each in outlines):
        raise ValueError(f"pages have numbers, so that a file bounds their count, got {count}")
    return Group(outlines, bool(codes), count)


def _outline(
    index: int,
    like: Tensor,
    rotation: Any,
    form: PageFormat,
    page_size: int,
    device: torch.device,
) -> Outline:
    _, heads, _, width = like.shape
    known = is_naturals(rotation) and tuple(rotation) == blocks_of(min(sum(rotation), width))
    blocks = tuple(rotation) if known else ()
    found = coded(Outline(heads, width, like.dtype, device), index, form, page_size, blocks)
    rotated = found.bits is not None and found.bits < 8 and found.run == 1
    if not known or (rotation and not rotated):
        raise ValueError(
            f"{width} channels in {found.bits or 'no'} bits are not rotated in blocks "
            f"{rotation!r:.99}"
        )
    return found


def check_shapes(groups: Sequence[Group], page_size: int, found: Sequence[Any]) -> None:
    """Raise unless tensors of a file hold the pages of these groups.

    Args:
        groups: of the file.
        page_size: of the pool.
        found: what has a shape and a dtype for each tensor.

    Raises:
        ValueError: naming what differs.
    """
    expected = [each for group in groups for each in group.shapes(page_size)]
    got = [(tuple(each.shape), each.dtype) for each in found]
    if expected != got:
        raise ValueError(f"pages are stored as {expected!r:.200}, got {got!r:.200}")


def taken(
    pool: Pages,
    groups: Sequence[Group],
    streams: Iterator[Iterable[Tensor]],
    *,
    offloaded: bool = False,
) -> list[Page]:
    """New pages of a pool, with one reference each, that hold what a file does; lock held.

    Args:
        pool: with the lock held.
        groups: of the file, whose shapes have been checked.
        streams: of each tensor of the file its pages.
        offloaded: whether they go where the pool offloads pages to, if it does: sealed ones may.

    Raises:
        ValueError: if the pool has too few pages left; nothing changes then.
    """
    slabs = [_slab(pool.kind_of(group.outlines), group.codes) for group in groups]
    if offloaded and pool.offloading is not None:
        slabs = [pool.offloading.cold_of(slab) for slab in slabs]
    needed = [slab for slab, each in zip(slabs, groups, strict=True) for _ in range(each.size)]
    pool.reserve(needed)
    pages: list[Page] = []
    try:
        for slab, group in zip(slabs, groups, strict=True):
            pages += [pool.take(slab) for _ in range(group.size)]
            if group.size:
                _fill(pages[-group.size :], slab, streams)
    except BaseException:
        for page in pages:
            pool.release(page)
        raise
    return pages


def _slab(kind: Kind, codes: bool) -> Slab:
    return kind.sealed if codes else kind.open


def _fill(pages: Sequence[Page], slab: Slab, streams: Iterator[Iterable[Tensor]]) -> None:
    """Write what the next tensors of a file hold to these pages."""
    for index in range(len(slab.stored(pages[0].index))):
        for page, values in zip(pages, next(streams), strict=True):
            slab.stored(page.index)[index].copy_(values)
