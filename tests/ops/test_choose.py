"""Which backend runs, why the others do not, and that they say so in the same words."""

import pytest
import torch

from regard import Causal, Padding, SlidingWindow, Span, attend, attend_partial, explain, prepare
from regard.ops.backends import BACKENDS


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
        (lambda: call(mask=Causal(), dim=40), "grouped"),
        (lambda: call(queries=4096, mask=Causal()), "sdpa"),
        (lambda: call(queries=4096, mask=Causal(), dtype=torch.bfloat16), "sdpa"),
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
    ("fused", "multiples of 16"): {"dim": 40},
}


@pytest.mark.parametrize(("name", "words"), OBJECTIONS)
def test_every_objection_is_an_error_and_an_explanation(name, words):
    options = OBJECTIONS[name, words]
    with pytest.raises(ValueError, match=f"backend='{name}' cannot run this call.*{words}"):
        call(backend=name, **options)
    assert f"{name:<8} objects: " in explain(call(**options))
    assert words in explain(call(**options))


def test_grouped_has_no_gradient_in_half_precision():
    q = torch.randn(1, 2, 1, 4, dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(ValueError, match="no gradient in half precision"):
        attend(q, q, q, backend="grouped")


def test_a_part_needs_a_log_sum_exp():
    q = torch.randn(1, 2, 3, 4)
    with pytest.raises(ValueError, match="sdpa gives no log-sum-exp"):
        attend_partial(q, q, q, backend="sdpa")


def test_the_table_is_in_order_of_preference():
    assert list(BACKENDS) == ["sdpa", "grouped", "fused", "blocked", "eager"]
    assert all(backend.objection(call(queries=2).call) is None for backend in BACKENDS.values())


def test_only_keys_in_sight_are_read():
    made = call(mask=Causal() & Padding.from_lengths([4096]), span=Span(9, 10, 0, 4096))
    assert (made.span.kv_start, made.span.kv_stop) == (0, 10)
    assert "10 are read" in explain(made)


@pytest.mark.parametrize("keys", [1023, 1024, 1025, 2049])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("joined", [True, False])
def test_one_key_head_is_split_and_merged(keys, dtype, joined):
    """Long enough for pieces, with and without a remainder, against the definition."""
    torch.manual_seed(keys)
    q = torch.randn(1, 6, 1, 24).to(dtype)
    kv = torch.randn(1, 1, keys, 24).to(dtype)
    v = kv[..., :16] if joined else torch.randn(1, 1, keys, 24).to(dtype)
    made = prepare(q, kv, v, backend="grouped")
    from regard import Part

    streams = (kv,) if joined else (kv, v)
    with torch.no_grad():
        got = made.run(q, (Part(0, keys, streams),))
        halves = made.run(
            q,
            tuple(
                Part(a, b, tuple(s[:, :, a:b] for s in streams)) for a, b in ((0, 700), (700, keys))
            ),
        )
    want = attend(q.double(), kv.double(), v.double(), scale=24**-0.5, backend="eager")
    unit = torch.finfo(dtype).eps / 2
    largest = (q.double().abs() @ kv.double().abs().mT).max() * 24**-0.5
    half = dtype.itemsize < 4
    bound = (1.5 if half else 2 * (1 + largest)) * unit * v.double().abs().max()
    assert (got.double() - want).abs().max() <= bound
    assert (halves.double() - want).abs().max() <= bound
