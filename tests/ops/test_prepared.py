"""A prepared call run on keys in several parts, plain or in pages."""

import random
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

import cases
from cases import Case, cut, draw_case
from contract import compare
from paged import coded, in_pages, part_of
from plain import array, attention
from regard import Causal, Padding, Part, SlidingWindow, Span, prepare
from regard.cache.paging.reading import PagedStream
from regard.cache.parts import Streams
from regard.ops import parts as reading
from regard.ops.backends import BACKENDS
from regard.ops.prepared import _most_held
from session import LONG


def parts_in_pages(case: Case, rng: random.Random, page_sizes=(1, 2, 3, 5)) -> tuple[Part, ...]:
    """The keys of a case in parts, most of them in pages; those that rows share, in shared ones."""
    first, found = case.sizes.kv_start, []
    share = all(bool((x == x[:1]).all()) for x in (case.k, case.v))
    for a, b in cut(case, rng):
        streams = case.k[:, :, a:b], case.v[:, :, a:b]
        kind = rng.choice(("plain", "consecutive", "scattered", "scattered"))
        if kind == "plain":
            streams = tuple(x[:1].expand_as(x) for x in streams) if share else streams
            found.append(Part(first + a, first + b, streams))
            continue
        size, scattered = rng.choice(page_sizes), kind == "scattered"
        paged = in_pages(streams, rng, page_size=size, scattered=scattered, shared=share)
        found.append(part_of(paged, first + a))
    return tuple(found)


SEEDS = {
    "auto": 100,
    "eager": 60,
    "sdpa": 60,
    "grouped": 60,
    "blocked": 60,
    "flex": 8 if LONG else 4,
}


@pytest.mark.parametrize("backend", SEEDS)
def test_a_call_runs_on_keys_in_pages_as_on_the_whole(backend, monkeypatch):
    """All that `cases` draws: masks, biases, softcaps, sinks, rows that start apart; slots that no
    row holds are NaN."""
    monkeypatch.setattr(reading, "GATHERED", 3)
    accepted, count = 0, SEEDS[backend] * (20 if LONG else 1)
    for seed in range(21_000_000, 21_000_000 + count):
        case, rng = draw_case(seed), random.Random(f"pages {seed}")
        q, k, v = (x.detach() for x in (case.q, case.k, case.v))
        with torch.no_grad():
            try:
                call = prepare(q, k, v, **case.given, backend=backend)
            except ValueError as error:
                if not cases.is_objection(error, backend):
                    raise
                continue
            compare(call.run(q, parts_in_pages(case, rng)), case, what=f"pages {backend}")
        accepted += 1
    assert accepted > SEEDS[backend] // 5


class Kind(NamedTuple):
    """A kind of attention: query heads, key heads, and the widths of keys and of values."""

    heads: int
    kv_heads: int
    dim: int
    v_dim: int
    joined: bool = False


KINDS = {
    "MHA": Kind(2, 2, 32, 32),
    "GQA": Kind(4, 2, 32, 32),
    "MQA": Kind(3, 1, 32, 32),
    "MLA": Kind(3, 1, 64, 32, joined=True),
}
KEYS, PAGE = 71, 16
MASKS = {
    "causal": (Causal(), lambda b, q, kv: kv <= q),
    "window": (Causal() & SlidingWindow(40), lambda b, q, kv: q - 40 < kv <= q),
    "padding": (
        Causal() & Padding(torch.arange(KEYS) >= torch.tensor([[0], [5], [33]])),
        lambda b, q, kv: kv <= q and kv >= (0, 5, 33)[b],
    ),
}


def stored_parts(k, v, rng, *, shared: int, joined: bool) -> tuple[Part, ...]:
    """A prefix that all rows share, in pages; then pages of each row, and the newest tokens."""
    streams = (k,) if joined else (k, v)
    first, found = 0, []
    for stop, options in (
        (shared, {"shared": True, "start": 0}),
        (KEYS - 7, {"start": 0}),
        (KEYS, None),
    ):
        some = tuple(x[:, :, first:stop] for x in streams)
        if options is None:
            found.append(Part(first, stop, some))
        elif stop > first:
            found.append(part_of(in_pages(some, rng, page_size=PAGE, **options), first))
        first = stop
    return tuple(found)


EVERY_CALL = [(kind, queries) for kind in KINDS for queries in (1, 17)]


@pytest.mark.parametrize(
    ("kind", "queries"), EVERY_CALL if LONG else [("GQA", 1), ("GQA", 17), ("MLA", 1)]
)
@pytest.mark.parametrize("backend", sorted(BACKENDS.keys() - {"latents", "flash"}))
def test_every_backend_reads_shared_and_own_pages(backend, kind, queries):
    """A prefix of 32 tokens that rows share, then their own pages, against loops in float64."""
    torch.manual_seed(5)
    rng, sizes = random.Random(5), KINDS[kind]
    dtype = torch.bfloat16 if backend == "tiled" else torch.float32
    q = torch.randn(3, sizes.heads, queries, sizes.dim).to(dtype)
    k = torch.randn(3, sizes.kv_heads, KEYS, sizes.dim).to(dtype)
    k[:, :, :32] = k[:1, :, :32]
    v = k[..., : sizes.v_dim] if sizes.joined else torch.randn_like(k)
    if not sizes.joined:
        v[:, :, :32] = v[:1, :, :32]
    ran = 0
    for mask, sees in MASKS.values():
        span = Span(KEYS - queries, KEYS, 0, KEYS)
        try:
            call = prepare(q, k, v, mask=mask, span=span, backend=backend)
        except ValueError as error:
            if not cases.is_objection(error, backend):
                raise
            continue
        parts = stored_parts(k, v, rng, shared=32, joined=sizes.joined)
        out, past = call.run(q, parts), KEYS - queries
        judged, _ = attention(
            *(array(x) for x in (q, k, v)),
            lambda b, h, i, j, sees=sees: sees(b, past + i, j),  # noqa: B023
        )
        largest = (q.abs().double() @ k.abs().double().repeat_interleave(
            sizes.heads // sizes.kv_heads, 1
        ).mT).max().item() * sizes.dim**-0.5  # fmt: skip
        allowed = cases.bound(dtype, v.abs().max().item(), largest)
        assert abs(array(out) - judged).max() <= allowed
        ran += 1
    assert ran or backend == "tiled"


def test_rows_of_unequal_lengths_and_what_lies_after_them():
    """Slots after a row's tokens are NaN in pages that the row does not fill, and hidden."""
    torch.manual_seed(6)
    starts = torch.tensor([2, 40, 17])
    q, k = torch.randn(3, 4, 2, 8), torch.randn(3, 2, 42, 8)
    for row, start in enumerate(starts.tolist()):
        k[row, :, start + 2 :] = float("nan")
    span = Span.ragged(starts, queries=2, kv_start=0, kv_stop=42, bounds=(2, 40))
    part = part_of(in_pages((k, k), random.Random(6), page_size=4))
    for backend in ("auto", "eager", "sdpa", "grouped"):
        out = prepare(q, k, k, mask=Causal(), span=span, backend=backend).run(q, (part,))
        for row, start in enumerate(starts.tolist()):
            one = k[row : row + 1, :, : start + 2]
            judged, _ = attention(
                *(array(x) for x in (q[row : row + 1], one, one)),
                lambda b, h, i, j, start=start: j <= start + i,
            )
            assert abs(array(out[row : row + 1]) - judged).max() < 1e-5


class Largest(TorchDispatchMode):
    """The bytes of the largest new tensor that operators make."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        given = {
            x.untyped_storage().data_ptr() for x in tree_flatten(args)[0] if isinstance(x, Tensor)
        }
        for x in tree_flatten(found)[0]:
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in given:
                self.bytes = max(self.bytes, x.untyped_storage().nbytes())
        return found


@pytest.mark.parametrize("backend", ["eager", "grouped"])
@pytest.mark.parametrize("codes", ["none", "by token", "by channel"])
def test_no_more_than_some_pages_are_copied_at_a_time(backend, codes):
    torch.manual_seed(2)
    q, k = torch.randn(2, 4, 1, 64), torch.randn(1, 2, 6000, 64).expand(2, -1, -1, -1)
    table = torch.randperm(2 * 100)[: 2 * 94].view(2, 94)
    slab = torch.randn(1, 2, 200 * 64, 64)
    paged = Streams([PagedStream(slab, table, 64, 0, 6000)] * 2)
    if codes != "none":
        paged = coded(paged, (8, 8), ((), ()), by_channel=codes == "by channel")
    with Largest() as largest:
        prepare(q, k, k, backend=backend).run(q, (part_of(paged),))
    piece = 2 * 2 * (reading.GATHERED + 64) * 64 * 4  # the whole past is six times as large
    assert piece // 8 < largest.bytes <= (2 * piece if backend == "eager" else piece)  # by heads


def test_consecutive_pages_are_read_in_place():
    q = torch.randn(1, 4, 1, 64)
    slab, table = torch.randn(1, 2, 100 * 64, 64), torch.arange(3, 97)[None]
    paged = Streams([PagedStream(slab, table, 64, 5, 6000)] * 2)
    for backend in ("sdpa", "grouped"):
        with Largest() as largest:
            prepare(q, slab, slab, backend=backend).run(q, (part_of(paged),))
        assert largest.bytes <= 4 * 6000 * 4  # the scores


@pytest.mark.parametrize("backend", ["sdpa", "blocked", "eager"])
@pytest.mark.parametrize("codes", [False, True])
def test_a_long_chunk_over_pages_copies_no_past(backend, codes):
    """No tensor is as large as the past, or as queries by keys."""
    torch.manual_seed(3)
    q, k = torch.randn(1, 4, 300, 32), torch.randn(1, 2, 8000, 32)
    slab, table = torch.randn(1, 2, 200 * 64, 32), torch.randperm(200)[None, :125]
    paged = Streams([PagedStream(slab, table, 64, 0, 8000)] * 2)
    if codes:
        paged = coded(paged, (8, 4), ((32,), (32,)))
    given = {"mask": Causal(), "span": Span(7700, 8000, 0, 8000), "backend": backend}
    with torch.no_grad(), Largest() as largest:
        prepare(q, k, k, **given).run(q, [part_of(paged)])
    scores = 4 * 300 * (reading.GATHERED + 64) * 4 if backend == "eager" else 0
    assert largest.bytes <= max(scores, 300 * (reading.GATHERED + 64) * 4) < k.nbytes or scores


def test_fewer_partial_results_of_long_chunks_are_held():
    for queries, most in ((1, 16), (512, 8), (10_000, 2)):
        q = torch.zeros(1, 16, queries, 64, device="meta")
        assert _most_held(prepare(q, q, q, backend="eager").call) == most
