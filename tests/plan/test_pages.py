"""Pages of a row and their tokens, counted one by one."""

from dataclasses import replace
from itertools import product

from regard.plan.pages import coded_keys, coded_tokens, pages
from regard.plan.shapes import LayerShape
from regard.plan.sizes import TOKENS

LAYER = LayerShape(hidden_size=8, num_heads=2, num_kv_heads=1, head_dim=4, v_head_dim=4)
CONTEXTS = [*range(1, 15), 29, 64]


def coded_slots(tokens, size):
    """Slots of full pages after the first."""
    return [slot for slot in range(tokens) if 1 <= slot // size < tokens // size]


def test_tokens_in_codes_are_those_of_full_pages_after_the_first():
    faults = []
    for context, size in product(CONTEXTS, (1, 4, 5)):
        at = {"context": context, "cp": 1, "page_size": size}
        for needed in (1, 3, context):
            slots = [s for s in coded_slots(context, size) if s >= context - needed]
            tokens = coded_tokens(TOKENS * 0 + min(needed, context)).evaluate(**at)
            if tokens != len(slots):
                faults.append((at, needed, tokens, slots))
        if coded_keys(TOKENS + 1).evaluate(**at) != len(coded_slots(context, size)):
            faults.append(at)
    assert faults == []


def test_pages_are_open_or_codes_and_those_before_a_window_are_released():
    size, faults = 4, []
    for context, window in product(CONTEXTS, (None, 1, 3, 9)):
        tokens = context + 1
        needed = 0 if window is None else max(0, tokens + 1 - window)
        kept = [page for page in range(-(-tokens // size)) if (page + 1) * size > needed]
        coded = [page for page in kept if 1 <= page < tokens // size]
        counts = [
            each.evaluate(context=context, cp=1, page_size=size, window=window or 0)
            for each in pages(replace(LAYER, window=window))
        ]
        if counts != [len(kept) - len(coded), len(coded)]:
            faults.append((context, window, counts))
    assert faults == []
