"""The fused backend: the definition over random calls, and everything around its kernel."""

import random
from typing import NamedTuple

import pytest
import torch

import cases
from contract import compare
from covering import covering, few
from regard import (
    Causal,
    KVCache,
    MultiHeadAttention,
    Padding,
    PagedCache,
    PagePool,
    Part,
    QuantizedCache,
    attend,
    explain,
    prepare,
)
from regard.cache.codes import QuantizedStream, quantize, quantize_channels
from regard.cache.paging.reading import PagedStream
from regard.cache.parts import Storage, Streams, storage_of
from regard.ops import choose, memo
from regard.ops.backends import BACKENDS, fused
from regard.ops.observed import backends_run
from regard.ops.prepared import Prepared
from session import LONG

pytest.importorskip("numba")

# Of a key head: tiles of one row and, with vectors of 16 lanes, of as many as there can be. Other
# tests here take the same widths and rows where they can: each kernel takes seconds to compile.
FEW_ROWS = (1, 6, 7, 18)


def drawn(seeds, dtype, width):
    """Random calls; outside the long form those of few tiles, each of which takes a second to
    compile. The kernel's own tests have the others."""
    for seed in seeds:
        case = cases.draw_case(seed, dtype, width)
        if LONG or case.sizes.heads // case.sizes.kv_heads * case.sizes.queries in FEW_ROWS:
            yield case


@pytest.mark.parametrize("dtype", fused.DTYPES, ids=str)
@pytest.mark.parametrize("width", [16, 32] if LONG else [16])
def test_random_calls_are_the_definition(dtype, width):
    """Masks, biases, sinks, rows that start apart, and every order in memory."""
    accepted = 0
    for case in drawn(range(50_000_000, 50_000_600), dtype, width):
        try:
            out = attend(case.q, case.k, case.v, **case.given, backend="fused")
        except ValueError as error:
            if not cases.is_objection(error, "fused"):
                raise
            continue
        assert out.dtype == dtype
        compare(out, case, what="attend fused")
        accepted += 1
    assert accepted > 50


@pytest.mark.parametrize(
    ("dtype", "width"),
    [
        (torch.float32, None),
        (torch.bfloat16, None),
        (torch.bfloat16, 32),
        pytest.param(torch.float32, 32, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_keys_in_parts_are_merged(dtype, width):
    """As a cache that grows in pieces holds them; with `width`, values within the keys."""
    dim = 48 if width else 16
    q, k = torch.randn(2, 6, 1, dim).to(dtype), torch.randn(2, 2, 300, dim).to(dtype)
    v = k[..., :width] if width else torch.randn(2, 2, 300, dim).to(dtype)
    streams = (k,) if width else (k, v)
    call = prepare(q, k, v, mask=Causal(), span=cases.Span(299, 300, 0, 300), backend="fused")
    pieces = [
        Part(start, stop, tuple(x[:, :, start:stop] for x in streams))
        for start, stop in ((0, 17), (17, 290), (290, 300))
    ]
    got = call.run(q, pieces).double()
    want = attend(q.double(), k.double(), v.double(), scale=dim**-0.5, backend="eager")
    largest = (q.double().abs() @ k.double().abs().repeat_interleave(3, 1).mT).max() * dim**-0.5
    assert (got - want).abs().max() <= cases.bound(dtype, v.abs().max().item(), largest.item())


@pytest.mark.parametrize(
    ("filler", "dtype"), covering([1e30, torch.nan, torch.inf], fused.DTYPES, together=1), ids=str
)
def test_keys_that_are_hidden_from_all_queries_never_change_a_bit(dtype, filler):
    accepted = 0
    for case in drawn(range(60_000_000, 60_000_600), dtype, 16):
        hidden = ~cases.table(case).any(2).unflatten(1, (case.sizes.kv_heads, -1)).any(2)
        if case.q.requires_grad or "sinks" in case.given or not hidden.any():
            continue
        k, v = (x.masked_fill(hidden[..., None], filler) for x in (case.k, case.v))
        try:
            out = attend(case.q, case.k, case.v, **case.given, backend="fused")
        except ValueError as error:
            if not cases.is_objection(error, "fused"):
                raise
            continue
        assert attend(case.q, k, v, **case.given, backend="fused").equal(out), case
        accepted += 1
    assert accepted > 15


def test_hidden_keys_may_hold_anything():
    q, k, v = torch.randn(2, 4, 1, 16), torch.randn(2, 2, 9, 16), torch.randn(2, 2, 9, 16)
    mask = Padding.from_lengths([9, 4])
    options = {"mask": mask, "span": cases.Span(8, 9, 0, 9)}
    clean = attend(q, k, v, **options, backend="fused")
    k[1, :, 4:], v[1, :, 4:] = torch.nan, torch.inf
    assert attend(q, k, v, **options, backend="fused").equal(clean)
    v[0, 0, 3, 5] = torch.inf  # a visible key may not
    assert attend(q, k, v, **options, backend="fused")[0, :2, 0, 5].eq(torch.inf).all()


def test_without_numba_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(fused, "is_installed", lambda: False)
    monkeypatch.setattr(memo, "_ENTRIES", {})
    q, k = torch.randn(1, 8, 1, 64), torch.randn(1, 2, 4096, 64)
    options = {"mask": Causal(), "span": cases.Span(4095, 4096, 0, 4096)}
    call = prepare(q, k, k, **options)
    assert call.name == "grouped"
    assert "python -m pip install 'regard[cpu]'" in explain(call)
    with pytest.raises(ValueError, match=r"fused needs numba: .*regard\[cpu\]"):
        attend(q, k, k, **options, backend="fused")


def test_calls_with_gradients_run_another_backend():
    q = torch.randn(1, 2, 1, 16, requires_grad=True)
    with pytest.raises(ValueError, match="fused has no gradient"):
        attend(q, q, q, backend="fused")
    attend(q, q, q).sum().backward()
    assert q.grad is not None


@pytest.fixture
def default(request):
    """Another default dtype and device of torch, during a test."""
    dtype, device = request.param
    torch.set_default_dtype(dtype)
    torch.set_default_device(device)
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)


DEFAULTS = [(torch.float64, "cpu"), (torch.bfloat16, "cpu"), (torch.float16, "cpu")]


@pytest.mark.parametrize("default", [*DEFAULTS, (torch.float32, "meta")], indirect=True, ids=str)
@pytest.mark.parametrize("dtype", fused.DTYPES, ids=str)
@pytest.mark.parametrize("given", ["nothing", "padding", "bias", "both"])
def test_torchs_default_dtype_and_device_change_nothing(default, dtype, given):
    """With so many keys, a bias in half precision is read far beyond its end."""

    def random(*shape):
        return torch.randn(shape, dtype=torch.float32, device="cpu").to(dtype)

    q, k, v = random(2, 12, 1, 16), random(2, 2, 700, 16), random(2, 2, 700, 16)
    valid = torch.arange(700, device="cpu") < torch.tensor([[700], [450]], device="cpu")
    options = {"span": cases.Span(699, 700, 0, 700)}
    if given in ("padding", "both"):
        options["mask"] = Padding(valid)
    if given in ("bias", "both"):
        options["score_bias"] = random(12, 1, 700)
    got = attend(q, k, v, **options, backend="fused")
    options |= {"score_bias": options["score_bias"].double()} if "score_bias" in options else {}
    want = attend(q.double(), k.double(), v.double(), **options, backend="eager")
    largest = (q.double().abs() @ k.double().abs().repeat_interleave(6, 1).mT).max() / 4
    assert got.dtype == dtype
    assert (got - want).abs().max() <= cases.bound(dtype, v.abs().max().item(), largest.item())


@pytest.mark.parametrize("default", DEFAULTS, indirect=True, ids=str)
def test_decoding_with_a_layer_and_a_cache_under_another_default_dtype(default):
    layer, cache = MultiHeadAttention(64, 4, mask=Causal()).eval(), KVCache()
    x = torch.randn(1, 12, 64)
    with torch.no_grad():
        whole = layer(x)
        steps = [layer(x[:, :9], cache=cache)]
        steps += [layer(x[:, at : at + 1], cache=cache) for at in range(9, 12)]
    assert whole.dtype == torch.get_default_dtype()
    error = (torch.cat(steps, 1) - whole).abs().max()
    assert error <= 16 * torch.finfo(whole.dtype).eps * whole.abs().max()


def test_a_lazy_minus_sign_is_applied():
    numbers = torch.randn(1, 2, 50, 16, dtype=torch.complex64)
    q, k = torch.randn(1, 2, 1, 16), numbers.conj().imag
    assert k.is_neg()
    for keys in (k, torch._neg_view(k.resolve_neg())):
        plain = keys.resolve_neg().contiguous()
        assert attend(q, keys, keys, backend="fused").equal(
            attend(q, plain, plain, backend="fused")
        )


class Stored(NamedTuple):
    """A random call on codes: its parts as a quantised cache returns them, and their values."""

    q: torch.Tensor
    parts: list[Part]
    k: torch.Tensor
    v: torch.Tensor
    given: dict

    def run(self, **options):
        prepared = prepare(self.q, self.k, self.v, **self.given, **options)
        return prepared.run(self.q, self.parts)


GROUPS = (1, 3, 6) if LONG else (6,)  # query heads of a key head; each number has its own tile
CODES = [(True, 8, 64), (True, 4, 32), (False, 4, 32), (False, 8, 6)]  # joined, bits, group


def draw_stored(seed, dtype):
    """Masks, biases, sinks, several queries, joined streams, views, several parts."""
    rng = random.Random(f"codes {seed}")
    torch.manual_seed(seed)
    batch, kv_heads, group = rng.choice((1, 2)), rng.choice((1, 2, 3)), rng.choice(GROUPS)
    keys, padded, biased = rng.randint(2, 600), rng.random() < 0.4, rng.random() < 0.4
    joined, bits, size = rng.choice(CODES if LONG else CODES[dtype is torch.bfloat16 :: 2])
    queries = rng.choice((1, 1, 2))
    if not LONG:  # few kernels, together each pair of dtype, joined or not, and a bias or none
        queries, hides = 1, joined != (dtype is torch.bfloat16)
        padded, biased = hides and (padded or not biased), hides and biased
    k_width, v_width = (64, 32) if joined else (48, 32)
    cache = QuantizedCache(bits, size)
    widths = (k_width,) if joined else (k_width, v_width)
    cache.update(*[torch.randn(batch + 1, kv_heads, keys + 9, w).to(dtype) + 1 for w in widths])
    cache.truncate(keys - 1)
    cache.reorder(torch.arange(batch, 0, -1))
    (part,) = cache.update(*[torch.randn(batch, kv_heads, 1, w).to(dtype) for w in widths])
    k = part.streams[0]
    v = k[..., :v_width] if joined else part.streams[1]
    given = {"span": cases.Span(keys - queries, keys, 0, keys), "mask": Causal()}
    if padded:
        valid = torch.rand(batch, keys) < 0.6
        valid[0, 0] = True  # the kernels refuse a call in which no key is visible
        given["mask"] &= Padding(valid)
    if biased:
        given["score_bias"] = torch.randn(group * kv_heads, 1, keys)
    if rng.random() < 0.4:
        given["sinks"] = torch.randn(group * kv_heads)
    cuts = sorted(rng.randint(0, keys) for _ in range(rng.choice((0, 0, 2))))
    pairs = zip([0, *cuts], [*cuts, keys], strict=True)
    parts = [part.narrow(start, stop) for start, stop in pairs]
    q = torch.randn(batch, group * kv_heads, queries, k_width).to(dtype)
    return Stored(q, parts, k, v, given)


@pytest.mark.parametrize("backend", ["fused", "grouped"])
@pytest.mark.parametrize("dtype", fused.DTYPES, ids=str)
def test_codes_are_read_as_the_values_they_stand_for(dtype, backend, monkeypatch):
    """Random calls, in the numeric contract; nothing is dequantised outside of the kernel."""
    for seed in range(2000 if LONG else 60):
        drawn = draw_stored(seed, dtype)
        given = {**drawn.given, "backend": "eager"}
        wanted = attend(drawn.q.double(), drawn.k.double(), drawn.v.double(), **given)
        with monkeypatch.context() as patch:
            patch.delattr(QuantizedStream, "to_tensor")
            out = drawn.run(backend=backend)
        sizes = drawn.q.double().abs().amax((1, 2)) @ drawn.k.double().abs().amax(1).mT
        largest = sizes.max().item() * drawn.q.shape[-1] ** -0.5
        assert out.dtype == dtype
        bound = cases.bound(dtype, drawn.v.abs().max().item(), largest)
        assert (out - wanted).abs().max() <= bound, (seed, drawn.given)


@pytest.mark.parametrize("backend", ["fused", "grouped"])
def test_hidden_codes_may_stand_for_anything(backend):
    several = (draw_stored(seed, torch.float32) for seed in range(9))
    drawn = next(each for each in several if len(each.parts) == 1)
    keys, (part,) = drawn.k.shape[2], drawn.parts
    mask = Padding.from_lengths([keys - 1] * len(drawn.q), keys)
    span = cases.Span(0, drawn.q.shape[2], 0, keys)
    prepared = prepare(drawn.q, drawn.k, drawn.v, mask=mask, span=span, backend=backend)
    clean = prepared.run(drawn.q, [part])
    for stream in part.stored:
        stream.scales[:, :, -1] = torch.nan
    assert prepared.run(drawn.q, [part]).equal(clean)


def test_the_estimates_know_codes():
    """Codes take a third to half of the time of values (AVX-512, `benchmarks/decode_low_bit.py`);
    SDPA would have to dequantise them first."""
    q, k = torch.randn(1, 32, 1, 128), torch.randn(1, 8, 1, 128)
    span = cases.Span(8191, 8192, 0, 8192)
    plain = prepare(q, k, k, mask=Causal(), span=span)
    coded = {bits: plain.stored_as(Storage((QuantizedStream,), bits)) for bits in (8, 4)}
    calls = {None: plain, **coded}
    times = [fused.estimate(calls[bits].call) for bits in (None, 8, 4)]
    assert 0.5 * times[0] > times[1] >= times[2]
    assert calls[8].name == calls[4].name == "fused"
    for name in ("sdpa", "eager"):
        seconds = [choose.seconds_of(calls[bits].call, BACKENDS[name]) for bits in (None, 8)]
        assert seconds[0] < seconds[1]
    assert "fused    runs" in explain(calls[8])


def test_without_numba_codes_are_multiplied_by_torch(monkeypatch):
    monkeypatch.setattr(fused, "is_installed", lambda: False)
    monkeypatch.setattr(memo, "_ENTRIES", {})
    layer, cache = MultiHeadAttention(64, 4, mask=Causal()).eval(), QuantizedCache()
    with torch.no_grad(), backends_run() as ran:
        layer(torch.randn(1, 3000, 64), cache=cache)
        ran.clear()
        layer(torch.randn(1, 1, 64), cache=cache)
    assert dict(ran) == {"grouped": 1}


def test_a_layer_reads_the_codes_of_its_cache():
    layer, cache = MultiHeadAttention(64, 4, mask=Causal()).eval(), QuantizedCache()
    with torch.no_grad(), backends_run() as ran:
        layer(torch.randn(1, 3000, 64), cache=cache)
        ran.clear()
        layer(torch.randn(1, 1, 64), cache=cache)
    assert dict(ran) == {"fused": 1}


FORMATS = [(None, None), (8, 4), (4, 8)]  # bits of keys and of values


def draw_pages(seed, dtype, bits):
    """A call on pages: tables in random order or of one row, offsets, masks, biases, sinks.

    All slots outside of the call hold NaN. Keys of 4 bits have scales by channel of a page: these
    are NaN in pages outside of the call.
    """
    rng = random.Random(f"pages {seed}")
    torch.manual_seed(seed)
    batch, kv_heads, keys = rng.choice((1, 2, 3)), rng.choice((1, 2)), rng.randint(2, 400)
    joined, padded, biased, group = rng.random() < 0.3, rng.random() < 0.5, rng.random() < 0.3, 6
    size = 16 if joined == (padded or biased) else 64
    if not LONG:  # few kernels, together each pair of dtype, joined or not, and a bias or none
        size, hides = (16 if joined else 64), joined != (dtype is torch.bfloat16)
        padded, biased = hides and (padded or not biased), hides and biased
    start, rows = rng.randrange(size), 1 if rng.random() < 0.3 else batch
    count = -(-(start + keys) // size)
    order = torch.randperm(rows * count + 2)[: rows * count].view(rows, count)
    table = order.expand(batch, -1)
    slots = torch.arange(start, start + keys)
    used = (order[:, slots // size] * size + slots % size).flatten()
    stored = []
    for width, of in zip((64,) if joined else (48, 32), bits, strict=False):
        values = torch.zeros(1, kv_heads, (rows * count + 2) * size, width)
        values[:, :, used] = torch.randn(1, kv_heads, len(used), width) + 1
        free = torch.ones(values.shape[2], dtype=torch.bool).index_fill(0, used, False)
        slab = values.to(dtype).masked_fill(free[:, None], torch.nan)
        if of is not None:
            by_channel = of == 4 and not stored
            run, each = (size, 1) if by_channel else (1, 16)
            codes, scales = (quantize_channels if by_channel else quantize)(
                values, of, size if by_channel else 16
            )
            unused = free.view(-1, run).all(1)
            scales = scales.masked_fill(unused[:, None], torch.nan)
            slab = QuantizedStream(codes.contiguous(), scales, of, each, width, dtype, (), run)
        stored.append(PagedStream(slab, table, size, start, keys))
    given = {"span": cases.Span(keys - 1, keys, 0, keys), "mask": Causal()}
    if padded:
        valid = torch.rand(batch, keys) < 0.6
        valid[0, 0] = True  # the kernels refuse a call in which no key is visible
        given["mask"] &= Padding(valid)
    if biased:
        given["score_bias"] = torch.randn(group * kv_heads, 1, keys)
    if rng.random() < 0.3:
        given["sinks"] = torch.randn(group * kv_heads)
    q = torch.randn(batch, group * kv_heads, 1, 64 if joined else 48).to(dtype)
    k = stored[0].to_tensor()
    v = k[..., :32] if joined else stored[1].to_tensor()
    return q, k, v, given, tuple(stored)


PAGES = [(dtype, bits) for bits in FORMATS for dtype in fused.DTYPES]
THIN = [(torch.bfloat16, (8, 4)), (torch.float32, (4, 8))]


@pytest.mark.parametrize(("dtype", "bits"), PAGES if LONG else THIN, ids=str)
def test_pages_are_read_as_the_values_they_hold(dtype, bits, monkeypatch):
    """Random calls, in the numeric contract; nothing is gathered outside of the kernel."""
    for seed in range(1000 if LONG else 8):  # each kind of call takes seconds to compile
        q, k, v, given, stored = draw_pages(seed, dtype, bits)
        part = Part(0, k.shape[2], Streams(stored))
        assert fused.reads_pages(stored)
        wanted = attend(q.double(), k.double(), v.double(), **given, backend="eager")
        call = prepare(q, k, v, **given, backend="fused").stored_as(storage_of([part])).call
        call = call.but(joined=len(stored) == 1)
        with monkeypatch.context() as patch:
            patch.delattr(PagedStream, "copied")
            out = fused.run(call, q, stored[0], stored[-1])
        sizes = q.double().abs().amax((1, 2)) @ k.double().abs().amax(1).mT
        bound = cases.bound(dtype, v.abs().max().item(), sizes.max().item() * q.shape[-1] ** -0.5)
        assert out.dtype == dtype
        assert (out - wanted).abs().max() <= bound, (seed, given)
        if "sinks" not in given:
            assert fused.partial(call, q, stored[0], stored[-1]).out.to(dtype).equal(out)


@pytest.mark.parametrize(
    ("bits", "piece"), covering(few(FORMATS, 2), [1024, 100], together=1), ids=str
)
def test_hidden_tokens_of_pages_may_hold_anything(bits, piece, monkeypatch):
    monkeypatch.setattr(fused, "_PIECE", piece)
    several = (draw_pages(seed, torch.float32, bits) for seed in range(60))
    drawn = (x for x in several if x[0].shape[0] > 1 and x[4][0].table.stride(0) and len(x[4]) == 2)
    q, k, v, _, stored = next(drawn)
    keys = k.shape[2]
    mask = Padding(torch.arange(keys) % 5 < torch.tensor([[3], [2], [4]])[: len(q)])
    span = cases.Span(0, 1, 0, keys)
    call = prepare(q, k, v, mask=mask, span=span, backend="fused").call
    clean = fused.run(call, q, stored[0], stored[-1])
    hidden = ~mask.dense(span, batch=len(q), heads=1)[:, 0, 0]
    rows, slots = hidden.nonzero(as_tuple=True)
    first = stored[0]
    slots = slots + first.start
    at = first.table[rows, slots // first.page_size] * first.page_size + slots % first.page_size
    for each in stored:
        slab = each.slab if isinstance(each.slab, torch.Tensor) else each.slab.scales
        if slab.shape[2] > max(at):  # scales that the tokens of a page share are finite
            slab[:, :, at] = torch.nan
    torch.testing.assert_close(fused.run(call, q, stored[0], stored[-1]), clean, rtol=0, atol=2e-6)


def test_pages_that_the_kernel_does_not_read():
    memory, table = torch.zeros(1, 2, 64, 48), torch.tensor([[0, 1]])
    plain = PagedStream(memory, table, 32, 0, 40)
    codes = QuantizedStream(*quantize(memory[..., :40], 6, 8), 6, 8, 40, torch.float32)
    assert fused.reads_pages((plain, plain))
    for other in (
        plain._replace(page_size=8),
        plain._replace(table=table.repeat(1, 2)[:, ::2]),
        plain._replace(slab=memory.clone().requires_grad_()),
        plain._replace(slab=memory.to("meta")),
        plain._replace(slab=memory.repeat(1, 1, 1, 2)[..., ::2]),
        plain._replace(slab=codes),
    ):
        assert not fused.reads_pages((other, other))
    call = prepare(*torch.zeros(3, 1, 2, 1, 48), backend="fused").call
    with pytest.raises(AssertionError, match="share their pages"):
        fused.run(call, torch.zeros(1, 2, 1, 48), plain, plain._replace(start=1))


def test_codes_of_a_width_that_fills_no_bytes_are_dequantised():
    """24 channels are a multiple of what 8-bit keys need, and not of what 4-bit values do."""
    q, k, v = torch.randn(1, 2, 1, 24), torch.randn(1, 2, 50, 24), torch.randn(1, 2, 50, 24)
    stored = [
        QuantizedStream(*quantize(x, of, 8), of, 8, 24, torch.float32) for x, of in ((k, 8), (v, 4))
    ]
    call = prepare(q, k, v, backend="fused").call
    wanted = attend(q, *(x.to_tensor() for x in stored), backend="eager")
    torch.testing.assert_close(fused.run(call, q, *stored), wanted, rtol=0, atol=2e-6)


def test_calls_with_codes_of_few_bits_need_wider_heads():
    q = torch.zeros(1, 2, 1, 24)
    call = prepare(q, q, q, backend="fused")
    for bits in (6, 4):
        with pytest.raises(ValueError, match="multiples of 16"):
            call.stored_as(Storage((QuantizedStream,), bits))
    assert call.stored_as(Storage((QuantizedStream,), 8)).name == "fused"


@pytest.mark.parametrize(
    ("format", "dtype", "joined"),
    [
        ("plain", torch.float32, False),
        ("plain", torch.bfloat16, True),
        ("K8V8", torch.bfloat16, False),
        ("K4V4", torch.float32, False),
    ],
    ids=str,
)
def test_the_parts_of_pages_run_at_once(format, dtype, joined, monkeypatch):
    """The first page, codes and the open page of rows that share none, as a step returns them."""
    torch.manual_seed(7)
    cache, widths = PagedCache(PagePool(40, 16, format=format)), (32,) if joined else (32, 32)
    cache.update(*(torch.randn(2, 2, 100, width).to(dtype) + 1 for width in widths))
    q, new = (
        torch.randn(2, 12, 1, 32).to(dtype),
        [torch.randn(2, 2, 1, w).to(dtype) for w in widths],
    )
    v_width = 16 if joined else 32
    call = prepare(
        q, new[0], new[-1][..., :v_width], mask=Causal(), span=cache.span(1), backend="fused"
    )
    parts = cache.update(*new)
    k = torch.cat([part.streams[0] for part in parts], 2)
    v = k[..., :v_width] if joined else torch.cat([part.streams[1] for part in parts], 2)
    wanted = attend(q.double(), k.double(), v.double(), backend="eager")
    with backends_run() as ran, monkeypatch.context() as patch:
        patch.delattr(PagedStream, "copied")
        patch.delattr(Prepared, "_partial")
        out = call.run(q, parts)
    assert len(parts) == (1 if format == "plain" else 3)
    assert ran == {"fused": 1}
    assert out.dtype == dtype
    sizes = q.double().abs().amax((1, 2)) @ k.double().abs().amax(1).mT
    bound = cases.bound(dtype, v.abs().max().item(), sizes.max().item() * 32**-0.5)
    assert (out - wanted).abs().max() <= bound


def at_once(parts, q=None, k=None, **given):
    """The output of parts at once, or None, under a mask over as many keys."""
    q = torch.ones(2, 2, 1, 16) if q is None else q
    k = torch.cat([part.streams[0] for part in parts], 2) if k is None else k
    call = prepare(q, k, k, **given).call
    return fused.run_parts(call, q, parts)


def test_parts_that_do_not_run_at_once():
    k = torch.randn(2, 2, 20, 16)
    halves = [Part(0, 8, (k[:, :, :8],) * 2), Part(8, 20, (k[:, :, 8:],) * 2)]
    wanted = attend(torch.ones(2, 2, 1, 16), k, k, backend="eager")
    torch.testing.assert_close(at_once(halves), wanted, rtol=0, atol=2e-6)
    assert at_once(halves, mask=Padding(torch.arange(20)[None].expand(2, -1) > 3)) is None
    assert at_once(halves, score_bias=torch.zeros(2, 1, 20)) is None
    assert at_once(halves, sinks=torch.zeros(2)) is None
    shared = Part(0, 8, tuple(x[:1].expand(2, -1, -1, -1) for x in halves[0].streams))
    assert at_once([shared, halves[1]]) is None
    memory, table = torch.randn(1, 2, 32, 16), torch.tensor([[0], [1]])
    paged = PagedStream(memory, table, 16, 0, 8)
    assert at_once([Part(0, 8, Streams([paged, paged])), halves[1]]) is not None
    narrow = paged._replace(page_size=8)
    assert at_once([Part(0, 8, Streams([narrow, narrow])), halves[1]]) is None
    mixed = Part(0, 8, Streams([halves[0].streams[0], paged]))
    assert at_once([mixed, halves[1]]) is None
    with pytest.raises(AssertionError, match="share their pages"):
        at_once([Part(0, 8, Streams([paged, paged._replace(start=1)])), halves[1]])


def test_a_part_of_infinite_keys_has_no_share():
    k = torch.randn(2, 2, 20, 16)
    k[:, :, :8] = -torch.inf
    v = torch.randn(2, 2, 20, 16)
    parts = [Part(0, 8, (k[:, :, :8], v[:, :, :8])), Part(8, 20, (k[:, :, 8:], v[:, :, 8:]))]
    q = torch.ones(2, 2, 1, 16)
    wanted = attend(q, k[:, :, 8:], v[:, :, 8:], backend="eager")
    torch.testing.assert_close(at_once(parts, q, k), wanted, rtol=0, atol=2e-6)
    nothing = [Part(0, 4, (k[:, :, :4], v[:, :, :4])), Part(4, 8, (k[:, :, 4:8], v[:, :, 4:8]))]
    assert torch.equal(at_once(nothing, q, k[:, :, :8]), torch.zeros(2, 2, 1, 16))
