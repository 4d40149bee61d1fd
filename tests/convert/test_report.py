"""The report of a conversion: its ratio, its table, its card and its data."""

import json

from invented import CONVERSION
from regard.convert.report import card


def test_the_table_has_every_measurement_before_and_after():
    rows = CONVERSION.table()
    assert len(rows) == len(CONVERSION.after.perplexity) + 3
    assert [len(row) for row in rows] == [3] * len(rows)
    assert rows[-3:] == [
        ("cache bytes a token", "40,000", "20,000"),
        ("prefill speed", "615 tokens/s", "same (0.90-1.02)"),
        ("decode speed", "19.7 tokens/s", "0.86 (0.84-0.88)"),
    ]


def test_the_card_shows_the_table_and_how_to_load():
    text = card(CONVERSION)
    assert all(" | ".join(row) in text for row in CONVERSION.table())
    assert ("AutoModelForCausalLM" in text) is CONVERSION.stock


def test_the_data_is_json():
    data = json.loads(json.dumps(CONVERSION.as_dict(), allow_nan=False))
    assert data["ratio"] == CONVERSION.ratio and data["into"] == str(CONVERSION.target)
