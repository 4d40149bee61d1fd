"""The fused backend: the definition over random calls, and everything around its kernel."""

import pytest
import torch

import cases
from contract import compare
from regard import Causal, KVCache, MultiHeadAttention, Padding, Part, attend, explain, prepare
from regard.ops import choose
from regard.ops.backends import fused
from session import LONG

pytest.importorskip("numba")

FEW_ROWS = (1, 6, 7, 12, 18, 24)  # of a key head: tiles of one row, and of as many as there can be


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
    for case in drawn(range(50_000_000, 50_000_450), dtype, width):
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


@pytest.mark.parametrize("dtype", fused.DTYPES, ids=str)
@pytest.mark.parametrize("width", [None, 32])
def test_keys_in_parts_are_merged(dtype, width):
    """As a cache that grows in pieces holds them; with `width`, values within the keys."""
    q, k = torch.randn(2, 6, 1, 48).to(dtype), torch.randn(2, 2, 300, 48).to(dtype)
    v = k[..., :width] if width else torch.randn(2, 2, 300, 48).to(dtype)
    streams = (k,) if width else (k, v)
    call = prepare(q, k, v, mask=Causal(), span=cases.Span(299, 300, 0, 300), backend="fused")
    pieces = [
        Part(start, stop, tuple(x[:, :, start:stop] for x in streams))
        for start, stop in ((0, 17), (17, 290), (290, 300))
    ]
    got = call.run(q, pieces).double()
    want = attend(q.double(), k.double(), v.double(), scale=48**-0.5, backend="eager")
    largest = (q.double().abs() @ k.double().abs().repeat_interleave(3, 1).mT).max() * 48**-0.5
    assert (got - want).abs().max() <= cases.bound(dtype, v.abs().max().item(), largest.item())


@pytest.mark.parametrize("dtype", fused.DTYPES, ids=str)
@pytest.mark.parametrize("filler", [1e30, torch.nan, torch.inf])
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
    monkeypatch.setattr(choose, "_MEMOISED", {})
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

    q, k, v = random(2, 8, 1, 64), random(2, 2, 700, 64), random(2, 2, 700, 64)
    valid = torch.arange(700, device="cpu") < torch.tensor([[700], [450]], device="cpu")
    options = {"span": cases.Span(699, 700, 0, 700)}
    if given in ("padding", "both"):
        options["mask"] = Padding(valid)
    if given in ("bias", "both"):
        options["score_bias"] = random(8, 1, 700)
    got = attend(q, k, v, **options, backend="fused")
    options |= {"score_bias": options["score_bias"].double()} if "score_bias" in options else {}
    want = attend(q.double(), k.double(), v.double(), **options, backend="eager")
    largest = (q.double().abs() @ k.double().abs().repeat_interleave(4, 1).mT).max() / 8
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
