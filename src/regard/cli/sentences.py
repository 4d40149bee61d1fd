"""Sentences on a terminal: lines end between words."""

import textwrap


def wrapped(text: str, width: int, *, margin: str = "") -> str:
    """The text in lines of so many columns; a word longer than the line stays whole.

    Examples:
        >>> print(wrapped("one two three", 8, margin=" "))
         one two
         three
    """
    return "\n".join(
        line
        for given in text.splitlines()
        for line in textwrap.wrap(
            given,
            width,
            initial_indent=margin,
            subsequent_indent=margin,
            break_long_words=False,
            break_on_hyphens=False,
        )
    )


def printable(text: str) -> str:
    """The text with control characters, which could move a terminal's cursor, as their escapes.

    Examples:
        >>> print(printable("a\\x1b[31mb"))
        a\\x1b[31mb
    """
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)
