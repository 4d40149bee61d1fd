"""Which backend runs, why the others do not, and that they say so in the same words."""

import pytest
import torch

from regard import Causal, Padding, SlidingWindow, Span, explain, prepare
from regard.ops.backends import BACKENDS, tiled
from regard.ops.choose import objection_of, seconds_of

HALF_PREFILL = "tiled" if tiled._machine_objection() is None else "sdpa"


def call(queries=1, keys=4096, heads=32, kv_heads=8, dim=128, dtype=torch.float32, **options):
    q = torch.empty(1, heads, queries, dim, dtype=dtype)
    k = torch.empty(1, kv_heads, keys, dim, dtype=dtype)
    options.setdefault("span", Span(keys - queries, keys, 0, keys))
    return prepare(q, k, k, **options)


@pytest.mark.parametrize(
    ("made", "name"),
    [
        (lambda: call(mask=Causal()), "fused"),
        (lambda: call(mask=Causal(), dtype=torch.bfloat16), "fused"),
        (lambda: call(mask=Causal(), dtype=torch.float16), "grouped"),
        (lambda: call(mask=Causal(), dim=44), "grouped"),
        (lambda: call(queries=4096, mask=Causal()), "sdpa"),
        (lambda: call(queries=4096, mask=Causal(), dtype=torch.bfloat16), HALF_PREFILL),
        (lambda: call(queries=100, keys=512, softcap=30.0), "eager"),
        (lambda: call(queries=1024, keys=1024, softcap=30.0), "blocked"),
        (lambda: call(queries=4096, mask=Causal() & SlidingWindow(1024)), "blocked"),
        (lambda: call(softcap=30.0), "grouped"),
        (lambda: call(keys=0, span=Span(0, 1, 0, 0)), "eager"),
        (lambda: call(kv_heads=1, dim=576, heads=16), "fused"),
    ],
)
def test_the_cheapest_without_an_objection_runs(made, name):
    assert made().name == name


OBJECTIONS = {
    ("sdpa", "no softcap"): {"softcap": 30.0},
    ("sdpa", "no sinks"): {"sinks": torch.zeros(32)},
    ("sdpa", "at least one query"): {"keys": 0, "span": Span(0, 1, 0, 0)},
    ("blocked", "at least one query"): {"keys": 0, "span": Span(0, 1, 0, 0)},
    ("grouped", "at least one query"): {"keys": 0, "span": Span(0, 1, 0, 0)},
    ("grouped", "few queries"): {"queries": 100},
    ("grouped", "no dropout"): {"dropout": 0.5},
    ("fused", "at least one query"): {"keys": 0, "span": Span(0, 1, 0, 0)},
    ("fused", "few queries"): {"queries": 100},
    ("fused", "neither dropout"): {"dropout": 0.5},
    ("fused", "nor softcap"): {"softcap": 30.0},
    ("fused", "on a CPU"): {"dtype": torch.float16},
    ("fused", "multiples of 8"): {"dim": 44},
    ("tiled", "bfloat16 on a CPU"): {"queries": 64},
    ("flex", "at least one query"): {"keys": 0, "span": Span(0, 1, 0, 0)},
    ("flex", "no dropout"): {"dropout": 0.5},
}


@pytest.mark.parametrize(("name", "words"), OBJECTIONS)
def test_every_objection_is_an_error_and_an_explanation(name, words):
    options = OBJECTIONS[name, words]
    with pytest.raises(ValueError, match=f"backend='{name}' cannot run this call.*{words}"):
        call(backend=name, **options)
    assert f"{name:<8} objects: " in explain(call(**options))
    assert words in explain(call(**options))


def test_the_table_is_in_order_of_preference():
    names = ["sdpa", "grouped", "fused", "tiled", "blocked", "flex", "eager"]
    assert list(BACKENDS) == names
    able = [name for name in names if BACKENDS[name].objection(call(queries=2).call) is None]
    assert able == [name for name in names if name != "tiled"]  # which is for bfloat16


def test_only_visible_keys_are_read():
    made = call(mask=Causal() & Padding.from_lengths([4096]), span=Span(9, 10, 0, 4096))
    assert (made.span.kv_start, made.span.kv_stop) == (0, 10)
    assert "10 are read" in explain(made)


def test_the_copies_of_keys_in_parts_are_estimated():
    """All side by side, some pages at a time, or none where pages are read as they lie."""
    for queries in (1, 64):
        with torch.no_grad():
            whole, parted = (call(queries, in_parts=each).call for each in (False, True))
        for name, backend in BACKENDS.items():
            if objection_of(whole, name) is None:
                more = seconds_of(parted, backend) - seconds_of(whole, backend)
                assert more > 0 or backend.reads_pages


def test_a_long_chunk_over_pages_pays_for_no_mask_over_the_past():
    """Its keys are read in pieces, of which only the last hides any from a query."""
    with torch.no_grad():
        whole, parted = (
            call(512, 16384, mask=Causal(), heads=8, kv_heads=2, in_parts=each).call
            for each in (False, True)
        )
    made = BACKENDS["sdpa"]
    copied = made._replace(partial_objection=lambda call: "copied")
    assert seconds_of(parted, made) < seconds_of(whole, made) < seconds_of(parted, copied)


def test_half_precision_that_is_computed_in_float32_is_estimated_so():
    with torch.no_grad():
        half, full = (
            call(512, dtype=each, in_parts=True).call for each in (torch.float16, torch.float32)
        )
    blocked = BACKENDS["blocked"]
    assert seconds_of(half, blocked) == seconds_of(full, blocked)
    half, full = (each.but(in_parts=False) for each in (half, full))
    assert seconds_of(half, blocked, partial=True) == seconds_of(full, blocked)
    assert seconds_of(half, blocked) != seconds_of(full, blocked)
