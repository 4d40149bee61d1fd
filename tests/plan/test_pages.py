"""Pages of a row and their tokens, counted one by one."""

from dataclasses import replace

import pytest

from regard.plan.pages import coded_keys, coded_tokens, pages
from regard.plan.shapes import LayerShape
from regard.plan.sizes import TOKENS

LAYER = LayerShape(hidden_size=8, num_heads=2, num_kv_heads=1, head_dim=4, v_head_dim=4)
CONTEXTS = [*range(1, 15), 29, 64]


def coded_slots(tokens, size):
    """Slots of full pages after the first."""
    return [slot for slot in range(tokens) if 1 <= slot // size < tokens // size]


@pytest.mark.parametrize("size", [1, 4, 5])
@pytest.mark.parametrize("context", CONTEXTS)
def test_tokens_in_codes_are_those_of_full_pages_after_the_first(context, size):
    for needed in (1, 3, context):
        slots = [s for s in coded_slots(context, size) if s >= context - needed]
        found = coded_tokens(TOKENS * 0 + min(needed, context))
        assert found.evaluate(context=context, cp=1, page_size=size) == len(slots)
    keys = coded_keys(TOKENS + 1).evaluate(context=context, cp=1, page_size=size)
    assert keys == len(coded_slots(context, size))


@pytest.mark.parametrize("window", [None, 1, 3, 9])
@pytest.mark.parametrize("context", CONTEXTS)
def test_pages_are_open_or_codes_and_those_before_a_window_are_released(context, window):
    size, tokens = 4, context + 1
    needed = 0 if window is None else max(0, tokens + 1 - window)
    held = [page for page in range(-(-tokens // size)) if (page + 1) * size > needed]
    coded = [page for page in held if 1 <= page < tokens // size]
    found = [
        each.evaluate(context=context, cp=1, page_size=size, window=window or 0)
        for each in pages(replace(LAYER, window=window))
    ]
    assert found == [len(held) - len(coded), len(coded)]
