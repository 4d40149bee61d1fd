"""The closing sentences: for any rows, they compare those that ran, with all that they cost, and
decide nothing from a difference that was not measured."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.compare.measure import Row
from regard.compare.verdict import NOTHING_BESIDE, NOTHING_SHIPPED, verdict
from regard.turns import Ratio

STEP = 19.7  # tokens a second of the shipped row


def around(value, share, pairs=24):
    return Ratio(value, value * (1 - share), value * (1 + share), pairs)


def row(name, size, perplexity, speed, decoded=None, *, noise=0.02, error=0.0):
    """A row beside one of a perplexity of 13.546, or 12.6 token by token."""
    return Row(
        name,
        False,
        cache_bytes_per_token=size,
        perplexity=perplexity,
        decode_perplexity=decoded,
        perplexity_ratio=around(perplexity / 13.546, error),
        decode_perplexity_ratio=None if decoded is None else around(decoded / 12.6, error),
        decode_tokens_per_second=speed,
        decode_speed=around(speed / STEP, noise),
    )


SHIPPED = row("GQA, as shipped", 46_080.0, 13.546, 19.7)
INT8 = row("GQA, int8 cache", 12_240.0, 13.538, 14.8)
INT4 = row("GQA, int4 cache", 7_200.0, 14.463, 12.4)
MHA = row("MHA, spelled out", 138_240.0, 13.546, 17.1)
MQA = row("MQA, aligned", 15_360.0, 25.335, 20.0)
FULL = row("joint latent, full rank", 46_200.0, 13.546, 8.6)
LATENT = row("joint latent, 50 %", 23_160.0, 14.703, 11.5)
DEEPSEEK = row("DeepSeek's MLA, 50 %, int8 cache", 6_120.0, 16.632, 12.7)
REFUSED = Row("joint latent, 75 %", False, remark="no place for qk_norm")
OTHERS = (INT8, INT4, MHA, MQA, FULL, LATENT, DEEPSEEK, REFUSED)


def test_the_best_row_comes_with_its_cache_its_perplexity_and_its_speed():
    text = verdict([SHIPPED, *OTHERS], "float32", {INT8.name: "its steps are long"})
    assert text == (
        "For memory alone, GQA, int8 cache is the best of these: it keeps 27% of the shipped "
        "float32 cache at -0.1% perplexity and decodes at 0.75x the shipped speed, because "
        "its steps are long. The joint latent, 50 % keeps 50% of it at +8.5% perplexity and "
        "decodes at 0.58x the shipped speed."
    )


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([SHIPPED], NOTHING_BESIDE),
        ([SHIPPED, REFUSED], NOTHING_BESIDE),
        ([REFUSED, INT8], NOTHING_SHIPPED),
        ([], NOTHING_SHIPPED),
        (
            [SHIPPED, INT8],
            "For memory alone, GQA, int8 cache beats the attention as shipped: it keeps 27% of the "
            "shipped cache at -0.1% perplexity and decodes at 0.75x the shipped speed.",
        ),
        (
            [SHIPPED, MQA],
            "For memory alone, MQA, aligned does not beat the attention as shipped: it keeps 33% "
            "of the shipped cache at +87.0% perplexity and decodes with no measurable difference "
            "in speed.",
        ),
        (
            [SHIPPED, MHA],
            "For memory alone, MHA, spelled out does not beat the attention as shipped: it keeps "
            "300% of the shipped cache at the same perplexity and decodes at 0.87x the shipped "
            "speed.",
        ),
        (
            [SHIPPED, MHA, LATENT],
            "For memory alone, nothing here beats the attention as shipped: the smallest of the "
            "others, joint latent, 50 %, keeps 50% of the shipped cache at +8.5% perplexity and "
            "decodes at 0.58x the shipped speed.",
        ),
    ],
)
def test_few_rows_are_compared_with_the_shipped_one(rows, text):
    assert verdict(rows) == text


def test_both_perplexities_are_in_the_sentence_and_the_worse_one_decides():
    pages = row("GQA, K4V4 cache", 6_480.0, 13.546, STEP, decoded=13.0)
    int8 = row("GQA, int8 cache", 12_240.0, 13.546, STEP, decoded=12.6)
    assert verdict([SHIPPED, pages, int8]).startswith(
        "For memory alone, GQA, int8 cache is the best of these: it keeps 27% of the shipped cache "
        "at the same perplexity and decodes"
    )
    assert "at the same perplexity (+3.2% token by token) and" in verdict([SHIPPED, pages])


@pytest.mark.parametrize(("error", "best"), [(0.02, "K4V4"), (0.04, "int8")])
def test_a_perplexity_inside_its_interval_decides_nothing(error, best):
    """1.2 % more may be chance: the row counts as no worse, and the sentence says so, unless the
    interval is so wide that 5 % more may be true."""
    pages = row("GQA, K4V4 cache", 6_480.0, 13.7, STEP, decoded=12.75, error=error)
    int8 = row("GQA, int8 cache", 12_240.0, 13.546, STEP, decoded=12.6)
    said = verdict([SHIPPED, pages, int8])
    assert said.startswith(f"For memory alone, GQA, {best} cache is the best of these: it keeps")
    assert ("at no measurable difference in perplexity" in said) is (best == "K4V4")


def test_a_row_of_unknown_quality_says_how_much_worse_it_may_be():
    """So that nobody reads: no difference was measured, and it does not beat the shipped row."""
    pages = row("GQA, K4V4 cache", 6_480.0, 13.7, STEP, decoded=12.75, error=0.04)
    ratios = (pages.perplexity_ratio, pages.decode_perplexity_ratio)
    worst = max(each.high for each in ratios if not each.differs) - 1
    text = verdict([SHIPPED, pages])
    assert "does not beat the attention as shipped" in text
    assert f"no measurable difference in perplexity (up to {worst:+.1%} is possible)" in text


def test_a_perplexity_that_is_not_a_number_is_worse():
    broken = row("GQA, K4V4 cache", 6_480.0, 13.5, STEP, decoded=float("nan"))
    assert "GQA, int8 cache is the best" in verdict([SHIPPED, broken, INT8])


@pytest.mark.parametrize(("speed", "noise"), [(0.97, 0.04), (0.63, 0.8), (1.05, 0.06)])
def test_a_speed_inside_its_quartiles_is_no_difference_and_has_no_reason(speed, noise):
    int8 = row("GQA, int8 cache", 12_240.0, 13.538, speed * STEP, noise=noise)
    text = verdict([SHIPPED, int8], reasons={"GQA, int8 cache": "of the weather"})
    assert text.endswith("decodes with no measurable difference in speed.")
    assert "because" not in text


@given(
    st.permutations(OTHERS).flatmap(lambda rows: st.integers(0, len(rows)).map(lambda n: rows[:n]))
)
def test_rows_that_did_not_run_are_not_compared(rows):
    text = verdict([SHIPPED, *rows], "float32")
    ran = [each for each in rows if not each.remark]
    named = [each for each in OTHERS if each.name in text]
    assert set(map(id, named)) <= set(map(id, ran))
    assert bool(named) == bool(ran)
    assert ("is the best of these" in text) <= (len(ran) > 1)
    assert ("latent" in text) == any("latent" in each.name for each in ran)
    speeds = re.findall(r"decodes at ([\d.]+)x the shipped speed", text)
    shown = [each.decode_speed for each in named if each.decode_speed.differs]
    assert sorted(speeds) == sorted(f"{each.value:.2f}" for each in shown)
    assert text.count("no measurable difference in speed") == len(named) - len(shown)
    assert text.count(" perplexity") == len(named)
    good = [each for each in ran if each.perplexity <= 1.01 * SHIPPED.perplexity]
    best = min((SHIPPED, *good), key=lambda each: each.cache_bytes_per_token)
    assert best.name in text or best is SHIPPED
    assert ("nothing here beats" in text) == (best is SHIPPED and len(ran) > 1)
    assert ("does not beat" in text) == (best is SHIPPED and len(ran) == 1)
    assert text.endswith(".") and "  " not in text
