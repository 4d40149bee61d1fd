"""Figures for reading: three digits and a unit. `page.js` has the same, and tests compare them."""

import re
from collections.abc import Iterable
from decimal import ROUND_HALF_UP, Decimal

BYTES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))  # smallest value, its unit


def readable_bytes(value: int) -> str:
    """Bytes in the largest unit of 1024 that they fill.

    Args:
        value: a number of bytes.

    Examples:
        >>> from regard.page.readable import readable_bytes
        >>> [readable_bytes(each) for each in (0, 1152, 4 << 30, 4321 << 20)]
        ['0 B', '1.13 KiB', '4 GiB', '4.22 GiB']
    """
    scaled, at = float(value), 0
    while at < len(BYTES) - 1 and scaled >= 1024:
        scaled /= 1024
        at += 1
    return f"{_digits(scaled)} {BYTES[at]}"


def readable_seconds(value: float) -> str:
    """A time in seconds, or in thousandths, millionths or billionths of it.

    Args:
        value: seconds.

    Examples:
        >>> from regard.page.readable import readable_seconds
        >>> [readable_seconds(each) for each in (2.0, 0.0125, 3.45e-05, 5e-10)]
        ['2 s', '12.5 ms', '34.5 µs', '0.50 ns']
    """
    unit, name = next((each for each in SECONDS if value >= each[0]), SECONDS[-1])
    return f"{_digits(value / unit)} {name}"


def three_digits(value: float) -> str:
    """Three digits of a number; of large numbers all digits before the point.

    Examples:
        >>> [three_digits(each) for each in (12_345.6, 1.2345, 0.0001234, 0.0)]
        ['12,346', '1.23', '1e-04', '0']
    """
    if value == 0 or value >= 100:
        return f"{value:,.0f}"
    return f"{value:,.3g}" if value >= 1e-3 else f"{value:.0e}"


def are_words(cells: Iterable[str]) -> bool:
    """Whether the cells of a column are words, which tables align left, and not numbers.

    Examples:
        >>> are_words(["GQA", "MQA"]), are_words(["12 ±1%", "any"]), are_words(["0-3, 5", "4"])
        (True, False, True)
    """
    found = list(cells)
    numbers = any(re.match(r"\s*[-+]?[\d.]", cell) for cell in found)
    return not numbers or any(", " in cell for cell in found)


def _digits(value: float) -> str:
    """Three digits, or a whole number; halves are rounded up, as browsers do."""
    places = 0 if value >= 100 or value.is_integer() else 1 if value >= 10 else 2
    rounded = Decimal(value).quantize(Decimal(1).scaleb(-places), ROUND_HALF_UP)
    return f"{rounded:,}"
