"""A prepared call run on keys in several parts."""

import random

import pytest

from cases import Case, draw_case
from contract import compare
from regard import (
    Part,
    prepare,
)
from session import LONG

EACH = 50


BATCHES = 400 if LONG else 40


def cut(case: Case, rng: random.Random) -> list[tuple[int, int]]:
    """Where the keys are split: up to four pieces, some of them empty."""
    stop = case.sizes.keys
    cuts = sorted(rng.randint(0, stop) for _ in range(rng.randint(0, 3)))
    return list(zip([0, *cuts], [*cuts, stop], strict=True))


@pytest.mark.parametrize("batch", range(BATCHES // 4))
def test_a_call_runs_on_keys_in_parts_as_on_the_whole(batch):
    """What a paged cache does: the keys come in pieces, some of them empty, masks and all."""
    for seed in range(20_000_000 + batch * EACH, 20_000_000 + (batch + 1) * EACH):
        case, rng = draw_case(seed), random.Random(f"pieces {seed}")
        call = prepare(case.q, case.k, case.v, **case.given)
        first = case.sizes.kv_start
        parts = tuple(
            Part(first + a, first + b, (case.k[:, :, a:b], case.v[:, :, a:b]))
            for a, b in cut(case, rng)
        )
        compare(call.run(case.q, parts), case, what="parts")
