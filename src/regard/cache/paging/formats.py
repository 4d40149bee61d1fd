"""Formats of sealed pages: full precision, or codes of 8, 6 or 4 bits."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from regard.cache.rotation import blocks_of

GROUP = 64  # channels with one scale and one zero, which take 32 bits: half a bit a channel
BY_CHANNEL_FROM = 32  # tokens of a page: scales and zeros of its channels are a bit a number then


class PageFormat(NamedTuple):
    """A format: the bits of keys and of values; None where they are stored in full precision.

    Attributes:
        name: `"plain"`, or the bits, as in `"K8V4"`.
        key_bits: bits of a key's channel.
        value_bits: bits of a value's channel.
        group: channels of a token and head with one scale and one zero.
        rotates: whether streams of fewer than 8 bits are rotated before they are quantised, where
            tokens have scales.
        by_channel_from: in pages of so many tokens or more, at least 2, keys (or one joined latent)
            of fewer than 8 bits have a scale and a zero for each channel of a page, in place of
            each token: in keys a few channels are far larger than others in all tokens, in values
            they are not (KIVI, Liu et al. 2024, arXiv:2402.02750). None: in no pages.

    Examples:
        >>> from regard.cache import PageFormat, PagePool
        >>> mine = PageFormat("K6V4, groups of 32", 6, 4, group=32)
        >>> PagePool(num_pages=8, format=mine).format.value_bits
        4
    """

    name: str
    key_bits: int | None = None
    value_bits: int | None = None
    group: int = GROUP
    rotates: bool = True
    by_channel_from: int | None = BY_CHANNEL_FROM

    def bits_of_stream(self, index: int) -> int | None:
        """The bits of a stream: keys, or one joined latent, come first, then values."""
        return self.key_bits if index == 0 else self.value_bits

    def rotation_of(
        self, index: int, count: int, width: int, pieces: Sequence[int] | None
    ) -> tuple[int, ...]:
        """The blocks of channels of a stream that are rotated: none in 8 bits.

        One stream alone holds keys of which the first channels are values. It is rotated only where
        the layer that reads it has announced the widths of the pieces that it consists of, and then
        only the first of them: rotary keys have few channels, and need their precision most.
        `count` is the number of streams of an update, integer ones too.
        """
        bits = self.bits_of_stream(index)
        if not self.rotates or bits is None or bits == 8 or (count == 1 and not pieces):
            return ()
        return blocks_of(pieces[0] if count == 1 and pieces else width)

    def shares(self, index: int, page_size: int) -> tuple[int, int]:
        """The numbers of tokens and of channels of a stream that share a scale and a zero.

        The stream of index 0 holds keys, or one joined latent; then come values.
        """
        bits, least = self.bits_of_stream(index), self.by_channel_from
        few = bits is not None and bits < 8
        if index == 0 and few and least is not None and page_size >= max(2, least):
            return page_size, 1
        return 1, self.group


PLAIN = PageFormat("plain")
_BITS = re.compile(r"K(8|6|4)V(8|6|4)")


def format_of(name: "str | PageFormat") -> PageFormat:
    """The format of that name: `"plain"`, or `K{8|6|4}V{8|6|4}`, such as `"K8V4"`.

    Args:
        name: of the format, in upper or lower case; a format is returned as it is.

    Raises:
        ValueError: if the name is none of these.

    Examples:
        >>> from regard.cache import format_of
        >>> form = format_of("K8V4")
        >>> form.key_bits, form.value_bits
        (8, 4)
    """
    if isinstance(name, PageFormat):
        return name
    if isinstance(name, str) and name.lower() == "plain":
        return PLAIN
    code = str(name).upper()
    found = _BITS.fullmatch(code) if isinstance(name, str) else None
    if found is None:
        raise ValueError(
            f"format={name!r} is neither 'plain' nor K{{8|6|4}}V{{8|6|4}}, the bits of keys and of "
            "values; give 'K8V4', say"
        )
    return PageFormat(code, int(found[1]), int(found[2]))
