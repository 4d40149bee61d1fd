"""Calls, layers and caches on a GPU, against the definition and the same code on a CPU.

Without a GPU they are skipped. With `REGARD_TEST_DEVICE=cpu` they run on a CPU: tests of the tests.
"""

import copy
import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cases import BACKENDS, DTYPES, Case, draw_case, is_objection
from contract import compare
from layers import CACHES, PAIRS, ROUNDING, inputs, make, run_in_pieces
from regard import (
    Causal,
    Documents,
    EvictingCache,
    GroupedQueryAttention,
    MultiHeadLatentAttention,
    Padding,
    PagedCache,
    PagePool,
    Rotary,
    SelectingCache,
    SlidingWindow,
    Span,
    StaticCache,
    attend,
    attend_partial,
    merge,
    prepare,
)
from regard.ops.choose import objection_of

DEVICE = os.environ.get("REGARD_TEST_DEVICE", "cuda")
pytestmark = pytest.mark.skipif(
    DEVICE == "cuda" and not torch.cuda.is_available(), reason="torch sees no GPU"
)
GPU_BACKENDS = (*BACKENDS, "flex", "flash")
HALVES = (torch.bfloat16, torch.float16)


def tensors_in(thing: object, found: dict[int, Tensor]) -> dict[int, Tensor]:
    """All tensors that an object holds, by identity."""
    if isinstance(thing, Tensor):
        found[id(thing)] = thing
    elif isinstance(thing, list | tuple):
        for each in thing:
            tensors_in(each, found)
    elif hasattr(thing, "__dict__"):
        tensors_in(list(vars(thing).values()), found)
    return found


def moved(thing: Any) -> Any:
    """A copy whose tensors lie on the device, leaves as leaves."""
    if isinstance(thing, Tensor):
        return thing.detach().to(DEVICE).requires_grad_(thing.requires_grad)
    if isinstance(thing, nn.Module):
        return copy.deepcopy(thing).to(DEVICE)
    memo: dict[int, Any] = {key: moved(x) for key, x in tensors_in(thing, {}).items()}
    return copy.deepcopy(thing, memo)


def on_device(case: Case) -> tuple[Tensor, Tensor, Tensor, dict]:
    q, k, v = map(moved, (case.q, case.k, case.v))
    return q, k, v, {name: moved(value) for name, value in case.given.items()}


@pytest.mark.parametrize("width", [None, 16, 64])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_random_calls_are_the_definition_within_the_contract(dtype, backend, width, unchecked):
    accepted = 0
    for seed in range(70_000, 70_300):
        case = draw_case(seed, dtype, width)
        q, k, v, given = on_device(case)
        try:
            out = attend(q, k, v, **given, backend=backend)
        except ValueError as error:
            if not is_objection(error, backend):
                raise
            continue
        assert out.device.type == DEVICE
        compare(out.detach().cpu(), case, what=f"attend {backend} on {DEVICE}")
        accepted += 1
        if accepted == 12:
            return
    assert accepted


@pytest.mark.parametrize(("backend", "count"), [("flex", 3), ("flash", 12)])
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_random_calls_of_generated_and_fixed_kernels(dtype, backend, count, unchecked):
    accepted = 0
    for seed in range(71_000, 71_300 if backend == "flex" else 72_500):
        case = draw_case(seed, dtype, 16)
        q, k, v, given = on_device(case)
        if objection_of(prepare(q, k, v, **given).call, backend) is not None:
            continue
        out = attend(q, k, v, **given, backend=backend)
        compare(out.detach().cpu(), case, what=f"attend {backend} on {DEVICE}")
        accepted += 1
        if accepted == count:
            return
    assert accepted or backend == "flash"
    assert accepted or DEVICE == "cpu" or dtype not in HALVES


SHORT = torch.tensor([[0], [33]])
REGIONS = {
    "all": (None, 150),
    "causal": (Causal(), 150),
    "window": (Causal() & SlidingWindow(37), 150),
    "window alone": (SlidingWindow(20), 150),
    "chunk": (Causal(), 40),
    "chunk, window": (Causal() & SlidingWindow(37), 40),
    "documents": (Causal() & Documents(torch.arange(150) // 40), 150),
    "documents, rows": (
        Documents(torch.stack([torch.arange(150) // 40, torch.arange(150) // 7])),
        150,
    ),
    "left padding": (Causal() & Padding(torch.arange(150)[None] >= SHORT), 150),
    "padded documents": (
        Causal() & Padding(torch.arange(150)[None] >= SHORT) & Documents(torch.arange(150) // 40),
        150,
    ),
}


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", REGIONS)
def test_flash_with_gradients(name, dtype, unchecked):
    if DEVICE != "cuda":
        pytest.skip("flash is for CUDA")
    mask, queries = REGIONS[name]
    q, k, v = (torch.randn(2, h, s, 64).to(dtype) for h, s in ((6, queries), (2, 150), (2, 150)))
    weight = torch.randn(2, 6, queries, 64).to(dtype)
    span = Span(150 - queries, 150, 0, 150)
    want = [x.double().requires_grad_() for x in (q, k, v)]
    expected = attend(*want, mask=mask, span=span, backend="eager")
    expected.mul(weight.double()).sum().backward()
    here = [x.to(DEVICE).requires_grad_() for x in (q, k, v)]
    out = attend(*here, mask=moved(mask), span=span, backend="flash")
    unit = torch.finfo(dtype).eps / 2
    assert (out.cpu().double() - expected).abs().max() <= 1.5 * unit * v.double().abs().max()
    out.mul(weight.to(DEVICE)).sum().backward()
    for a, b in zip(here, want, strict=True):
        error = (a.grad.cpu().double() - b.grad).norm() / b.grad.norm()
        assert error < 4 * unit, error
    with torch.no_grad():
        part = attend_partial(*here, mask=moved(mask), span=span, backend="flash")
        exact = attend_partial(*want, mask=mask, span=span, backend="eager")
    assert part.lse.shape == exact.lse.shape
    torch.testing.assert_close(part.lse.cpu().double(), exact.lse, rtol=1e-3, atol=2e-2)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(("batch", "heads", "keys", "width", "values"), [
    (1, 16, 1, 576, 512), (2, 16, 700, 576, 512), (3, 128, 4099, 576, 512), (2, 40, 130, 72, 40),
    (1, 5, 333, 40, 32),
])  # fmt: skip
def test_latents(batch, heads, keys, width, values, dtype, sinks, unchecked):
    if DEVICE != "cuda":
        pytest.skip("latents is for CUDA")
    q = (torch.randn(batch, heads, 1, width, device=DEVICE) * 2).to(dtype)
    k = torch.randn(batch, 1, keys, width, device=DEVICE).to(dtype)
    given = {"sinks": torch.randn(heads, device=DEVICE).to(dtype)} if sinks else {}
    out = attend(q, k, k[..., :values], **given, backend="latents")
    wide = {key: x.double() for key, x in given.items()}
    want = attend(q.double(), k.double(), k[..., :values].double(), **wide, backend="eager")
    unit = torch.finfo(dtype).eps / 2
    assert (out.double() - want).abs().max() <= 1.5 * unit * k.double().abs().max()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_halves_merge_to_the_whole(dtype, unchecked):
    q, k, v = (
        torch.randn(2, h, s, 32, device=DEVICE).to(dtype) for h, s in ((6, 3), (2, 41), (2, 41))
    )
    span, cut = Span(38, 41, 0, 41), 17
    whole = attend(q.double(), k.double(), v.double(), mask=Causal(), span=span)
    parts = [
        attend_partial(q, k[:, :, a:b], v[:, :, a:b], mask=Causal(), span=Span(38, 41, a, b))
        for a, b in ((0, cut), (cut, 41))
    ]
    unit = torch.finfo(dtype).eps / 2
    error = (merge(*parts).out.to(dtype).double() - whole).abs().max()
    assert error <= 8 * unit * v.double().abs().max()


MASKS = {
    "everything": None,
    "causal": Causal(),
    "window": Causal() & SlidingWindow(37),
    "documents": Causal() & Documents(torch.arange(150) // 40),
    "padding": Causal() & Padding(torch.arange(150)[None] >= torch.tensor([[0], [33]])),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_gradients_are_those_of_float64(mask, backend, unchecked):
    torch.manual_seed(3)
    q, k, v = (torch.randn(2, h, 150, 32) for h in (6, 2, 2))
    weight = torch.randn(2, 6, 150, 32)
    want = [x.double().requires_grad_() for x in (q, k, v)]
    attend(*want, mask=MASKS[mask], backend="eager").mul(weight.double()).sum().backward()
    here = [x.to(DEVICE).requires_grad_() for x in (q, k, v)]
    try:
        out = attend(*here, mask=moved(MASKS[mask]), backend=backend)
    except ValueError as error:
        if not is_objection(error, backend):
            raise
        pytest.skip(str(error))
    out.mul(weight.to(DEVICE)).sum().backward()
    for a, b in zip(here, want, strict=True):
        torch.testing.assert_close(a.grad.cpu().double(), b.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("layer", "cache"), PAIRS)
def test_layers_with_caches_agree_with_a_cpu(layer, cache, unchecked):
    """Prefill, chunks and single tokens, in float64."""
    on_cpu, x = make(layer), inputs(2, 11)
    on_gpu = copy.deepcopy(on_cpu).to(DEVICE)
    cuts = [4, 5, 6, 9, 10]
    with torch.no_grad():
        want = run_in_pieces(on_cpu, x, CACHES[cache](), cuts)
        out = run_in_pieces(on_gpu, x.to(DEVICE), CACHES[cache](), cuts)
    assert out.device.type == DEVICE
    error = (out.cpu() - want).abs().max() / (1 + want.abs().max())
    assert error <= (1e-5 if cache in ROUNDING else 1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("cache", CACHES)
def test_layers_in_narrow_dtypes(cache, dtype, unchecked):
    layer = make("window").float()
    x = inputs(2, 11).float()
    with torch.no_grad():
        want = layer(x)
        out = run_in_pieces(
            copy.deepcopy(layer).to(DEVICE, dtype), x.to(DEVICE, dtype), CACHES[cache](), [5, 6, 7]
        )
    error = float((out.cpu().float() - want).norm() / want.norm())
    allowed = {"int8": 0.03, "int4": 0.3}.get(cache, 0.0) + (
        0.03 if dtype != torch.float32 else 1e-4
    )
    assert error < allowed, error


@pytest.mark.parametrize("kind", ["GQA", "MLA"])
def test_autocast_and_training(kind, unchecked):
    layer = make(kind).float().to(DEVICE).train()
    x = inputs(2, 11).float().to(DEVICE).requires_grad_()
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        out = layer(x)
    out.float().square().mean().backward()
    assert torch.isfinite(x.grad).all()
    with torch.no_grad():
        full = layer(x)
        assert float((out.float() - full).norm() / full.norm()) < 0.05


@pytest.mark.filterwarnings("ignore")  # of torch's compiler
@pytest.mark.parametrize("kind", ["GQA", "MLA"])
def test_compiled_layers(kind, unchecked):
    layer = make(kind).float().to(DEVICE)
    x = inputs(2, 11).float().to(DEVICE)
    with torch.no_grad():
        out = torch.compile(layer, fullgraph=True)(x)
        torch.testing.assert_close(out, layer(x), rtol=1e-4, atol=1e-4)


LAYERS_FOR_GRAPHS = {
    "GQA": lambda: GroupedQueryAttention(256, 8, num_kv_heads=2, rope=Rotary(32), mask=Causal()),
    "MLA": lambda: MultiHeadLatentAttention(
        256, 8, kv_lora_rank=64, q_lora_rank=None, qk_nope_head_dim=32, qk_rope_head_dim=16,
        v_head_dim=32, rope=Rotary(16, pairing="pairs"), mask=Causal()),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", LAYERS_FOR_GRAPHS)
def test_a_step_is_captured_in_a_graph(kind, dtype, unchecked):
    """A step whose lengths do not change: attention over what a static cache holds."""
    if DEVICE != "cuda":
        pytest.skip("graphs are for GPUs")
    layer = LAYERS_FOR_GRAPHS[kind]().to(DEVICE, dtype).eval()
    x, token = (
        torch.randn(2, 33, 256, device=DEVICE, dtype=dtype),
        torch.randn(2, 1, 256, device=DEVICE, dtype=dtype),
    )
    with torch.no_grad():
        cache = StaticCache(64)
        layer(x, cache=cache)
        for _ in range(3):
            want = layer(token, cache=cache)
            cache.truncate(33)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer(token, cache=cache)
        graph.replay()
        torch.testing.assert_close(out, want)


def test_a_call_waits_for_nothing(unchecked):
    """No synchronisation in a decoding step or a prefill: torch raises at any."""
    if DEVICE != "cuda":
        pytest.skip("a CPU is never waited for")
    for make_layer in LAYERS_FOR_GRAPHS.values():
        layer = make_layer().to(DEVICE).eval()
        x = torch.randn(2, 9, 256, device=DEVICE)
        cache = StaticCache(64)
        with torch.no_grad():
            layer(x, cache=cache)
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                layer(x[:, :1], cache=cache)
                layer(x, cache=cache)
            finally:
                torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("batch", "heads", "kv_heads", "keys", "dim", "v_dim"), [
    (3, 32, 8, 1000, 128, 128), (1, 32, 8, 4099, 128, 128), (5, 8, 8, 515, 64, 64),
    (2, 16, 1, 1500, 576, 512), (1, 128, 1, 3000, 576, 512), (2, 6, 3, 77, 80, 80),
    (2, 12, 4, 901, 192, 128),
])  # fmt: skip
def test_long_decoding_is_float64(batch, heads, kv_heads, keys, dim, v_dim, dtype, unchecked):
    q = torch.randn(batch, heads, 1, dim, device=DEVICE).to(dtype) * 3
    k = torch.randn(batch, kv_heads, keys, dim, device=DEVICE).to(dtype)
    v = (
        k[..., :v_dim]
        if kv_heads == 1
        else torch.randn(batch, kv_heads, keys, v_dim, device=DEVICE).to(dtype)
    )
    span = Span(keys - 1, keys, 0, keys)
    made = prepare(q, k, v, mask=Causal(), span=span)
    wide = [x.double() for x in (q, k, v)]
    want = attend(*wide, mask=Causal(), span=span, backend="eager")
    out = attend(q, k, v, mask=Causal(), span=span)
    allowed = 1.5 if dtype.itemsize < 4 else 40
    unit = torch.finfo(dtype).eps / 2 * v.double().abs().max()
    error = float((out.double() - want).abs().max() / unit)
    assert error <= allowed, (made.name, error)


@pytest.mark.parametrize("make_cache", [
    lambda: EvictingCache(6, sinks=1, recent=2),
    lambda: SelectingCache(PagedCache(PagePool(99, page_size=2)), pages=4),
])  # fmt: skip
def test_caches_that_evict_and_select(make_cache, unchecked):
    layer, x = make("GQA").float(), inputs(2, 23).float()
    with torch.no_grad():
        want = run_in_pieces(layer, x, make_cache(), [7, 8, 9, 15, 16, 17])
        out = run_in_pieces(
            copy.deepcopy(layer).to(DEVICE), x.to(DEVICE), make_cache(), [7, 8, 9, 15, 16, 17]
        )
    torch.testing.assert_close(out.cpu(), want, rtol=1e-3, atol=1e-3)
