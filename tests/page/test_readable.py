"""Figures for reading, held against the same in the browser."""

import random

import pytest

from regard.page.page import Section, page
from regard.page.readable import readable_bytes, readable_seconds


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (1023, "1,023 B"),
        (1024, "1 KiB"),
        (1126, "1.10 KiB"),
        (1152, "1.13 KiB"),  # exactly halfway between 1.12 and 1.13
        (10 << 20, "10 MiB"),
        (99_999, "97.7 KiB"),
        (100_500, "98.1 KiB"),
        (1 << 70, "1,024 EiB"),
    ],
)
def test_bytes(value, text):
    assert readable_bytes(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0 ns"), (1e-6, "1 µs"), (2.5e-4, "250 µs"), (61.25, "61.3 s"), (1234.5, "1,235 s")],
)
def test_seconds(value, text):
    assert readable_seconds(value) == text


def test_a_browser_writes_the_same(open_page):
    rng = random.Random(3)
    whole = [rng.randrange(2 ** rng.randrange(1, 53)) for _ in range(400)]
    whole += [1 << power for power in range(53)]
    whole += [1152 << power for power in range(0, 40, 3)]  # halves
    times = [rng.random() * 10 ** rng.randrange(-10, 4) for _ in range(400)]
    opened = open_page(page("Figures", [Section("a", "A")]))
    script = "([whole, times]) => [whole.map(regard.bytes), times.map(regard.seconds)]"
    found = opened.page.evaluate(script, [whole, times])
    assert found == [list(map(readable_bytes, whole)), list(map(readable_seconds, times))]
