"""Which backend runs, why the others do not, and that they say so in the same words."""

import os
import subprocess
import sys

import pytest
import torch

import regard.rates as speed
from regard import Causal, Padding, SlidingWindow, Span, explain, prepare
from regard.cache.codes import QuantizedStream
from regard.cache.paging.reading import PagedStream
from regard.cache.parts import TENSORS, Storage
from regard.masks import Dense
from regard.ops.backends import BACKENDS, fused, tiled
from regard.ops.choose import objection_of, seconds_of
from regard.rates import SPEED
from session import LONG

RUNS = 3 if LONG else 2  # processes
HALF_PREFILL, PREFILL, WINDOW = (
    "tiled" if tiled._machine_objection(dtype) is None else other
    for dtype, other in (
        (torch.bfloat16, "sdpa"),
        (torch.float32, "sdpa"),
        (torch.float32, "blocked"),
    )
)


IN_PAGES = Storage((PagedStream,), None, several=True)


def in_pages(prepared):
    """The same call over keys in pages."""
    return prepared.stored_as(IN_PAGES)


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
        (lambda: call(queries=4096, mask=Causal()), PREFILL),
        (lambda: call(queries=4096, mask=Causal(), dtype=torch.bfloat16), HALF_PREFILL),
        (lambda: call(queries=100, keys=512, softcap=30.0), "eager"),
        (lambda: call(queries=1024, keys=1024, softcap=30.0), "blocked"),
        (lambda: call(queries=4096, mask=Causal() & SlidingWindow(1024)), WINDOW),
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
    ("tiled", "bfloat16 and float32 on a CPU"): {"queries": 64, "dtype": torch.float16},
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
    names = ["sdpa", "grouped", "latents", "fused", "tiled", "blocked", "flash", "flex", "eager"]
    assert list(BACKENDS) == names
    able = [name for name in names if BACKENDS[name].objection(call(queries=2).call) is None]
    others = ("tiled", "latents", "flash")  # for many queries, for GPUs
    assert able == [name for name in names if name not in others]


def test_only_visible_keys_are_read():
    made = call(mask=Causal() & Padding.from_lengths([4096]), span=Span(9, 10, 0, 4096))
    assert (made.span.kv_start, made.span.kv_stop) == (0, 10)
    assert "10 are read" in explain(made)


def test_the_copies_of_keys_in_parts_are_estimated():
    """All side by side, some pages at a time, or none where pages are read as they lie."""
    for queries in (1, 64):
        with torch.no_grad():
            whole = call(queries)
            whole, parted = whole.call, in_pages(whole).call
        for name, backend in BACKENDS.items():
            if objection_of(whole, name) is None:
                more = seconds_of(parted, backend) - seconds_of(whole, backend)
                assert more > 0 or PagedStream in backend.reads


def test_a_long_chunk_over_pages_pays_for_no_mask_over_the_past():
    """Its keys are read in pieces, of which only the last hides any from a query."""
    with torch.no_grad():
        whole = call(512, 16384, mask=Causal(), heads=8, kv_heads=2)
        whole, parted = whole.call, in_pages(whole).call
    made = BACKENDS["sdpa"]
    copied = made._replace(objection=lambda call: "copied" if call.partial else None)
    assert seconds_of(parted, made) < seconds_of(whole, made) < seconds_of(parted, copied)


def test_half_precision_that_is_computed_in_float32_is_estimated_so():
    with torch.no_grad():
        half, full = (
            in_pages(call(512, dtype=each)).call for each in (torch.float16, torch.float32)
        )
    blocked = BACKENDS["blocked"]
    assert seconds_of(half, blocked) == seconds_of(full, blocked)
    half, full = (each.but(storage=TENSORS) for each in (half, full))
    assert seconds_of(half.but(partial=True), blocked) == seconds_of(full, blocked)
    assert seconds_of(half, blocked) != seconds_of(full, blocked)


@pytest.mark.skipif(not fused.is_installed(), reason="no numba")
@pytest.mark.parametrize("threads", [1, 2, 16])
@pytest.mark.parametrize("name", ["AVX2", "AVX512", "ZEN4", "AMX"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [None, 8, 4])
def test_grouped_decoding_reads_keys_once_on_every_processor(threads, name, dtype, bits):
    """Four times as fast as the next backend, and eight times from codes."""
    before = SPEED.now()
    SPEED.use(getattr(speed, name).of_threads(threads))
    try:
        with torch.no_grad():
            made = call(keys=3001, heads=24, kv_heads=6, dim=96, dtype=dtype, mask=Causal()).call
        made = made.but(storage=TENSORS if bits is None else Storage((QuantizedStream,), bits))
        able = [name for name in BACKENDS if objection_of(made, name) is None]
        expected = {name: seconds_of(made, BACKENDS[name]) for name in able}
        assert min(expected, key=expected.__getitem__) == "fused"
    finally:
        SPEED.use(before)


@pytest.mark.parametrize("name", ["AVX2", "AVX512", "ZEN4", "AMX"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mask_of_few_blocks_is_computed_by_blocks_on_every_processor(name, dtype):
    """A quarter of the blocks of 128 by 128: torch's kernel computes hidden scores, too."""
    keep = torch.rand(16, 16, generator=torch.Generator().manual_seed(0)) < 0.25
    keep = keep.fill_diagonal_(True).repeat_interleave(128, 0).repeat_interleave(128, 1)
    before = SPEED.now()
    SPEED.use(getattr(speed, name).of_threads(2))
    try:
        with torch.no_grad():
            made = call(2048, 2048, mask=Dense(keep), heads=16, kv_heads=4, dim=128, dtype=dtype)
        assert made.name == "blocked"
    finally:
        SPEED.use(before)


CHOICES = """
import random, sys, torch
from regard import EVERYTHING, Causal, SlidingWindow, Span, prepare

torch.set_num_threads(2)
torch.set_grad_enabled(False)
rng = random.Random(5)
order = list(range(150))
names = {}
calls = []
for _ in order:
    kv_heads, keys = rng.choice([1, 2, 8]), rng.randint(1, 6000)
    queries = rng.choice([1, 1, min(keys, 7), min(keys, 300)])
    mask = rng.choice([EVERYTHING, Causal(), Causal() & SlidingWindow(rng.randint(1, keys))])
    sizes = rng.choice([1, 4]), kv_heads * rng.choice([1, 3, 8]), kv_heads, rng.choice([44, 64, 96])
    calls.append((*sizes, queries, keys, mask, rng.choice([torch.float32, torch.bfloat16])))
random.Random(int(sys.argv[1])).shuffle(order)
for at in order:
    batch, heads, kv_heads, dim, queries, keys, mask, dtype = calls[at]
    one = torch.zeros(1, dtype=dtype)
    q, k = one.expand(batch, heads, queries, dim), one.expand(batch, kv_heads, keys, dim)
    if at % 7 == int(sys.argv[1]):  # some calls in between, on another number of threads
        torch.set_num_threads(1)
        prepare(q, k, k.clone(), mask=mask, span=Span(keys - queries, keys, 0, keys))
        torch.set_num_threads(2)
    names[at] = prepare(q, k, k.clone(), mask=mask, span=Span(keys - queries, keys, 0, keys)).name
print(*(names[at] for at in range(150)))
"""


def test_every_process_chooses_the_same_backends_beside_other_programs(tmp_path):
    """Whatever runs beside it, and whichever calls came before."""
    environment = {**os.environ, "REGARD_CACHE": str(tmp_path)}
    environment.pop("REGARD_SPEED", None)
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        running = [
            subprocess.Popen(
                [sys.executable, "-c", CHOICES, str(at)],
                env={**environment, "PYTHONHASHSEED": str(at)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for at in range(RUNS)
        ]
        found = [process.communicate()[0] for process in running]
    finally:
        busy.kill()
        busy.wait()
    assert len(set(found[0].split())) > 3
    assert found == [found[0]] * RUNS
    assert not list(tmp_path.glob("speed*"))
