"""FlexAttention as a backend: the definition for random calls, and its objections.

On a CPU torch runs its uncompiled form, which evaluates the functions of masks and scores at all
cells. Blocks are tested by `test_block_masks`, and here by torch's compiled kernel for CPUs.
"""

import shutil

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from cases import DTYPES, draw_case
from contract import compare
from regard import (
    NOTHING,
    Alibi,
    Attention,
    Causal,
    Dense,
    Documents,
    Padding,
    PagedCache,
    PagePool,
    Part,
    RelativeBias,
    SlidingWindow,
    Span,
    Where,
    attend,
    prepare,
)
from regard.devices import rates_of
from regard.ops.backends import BACKENDS, eager, flex
from regard.ops.choose import choose
from session import LONG


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_random_calls_are_the_definition_within_the_contract(dtype, unchecked):
    """Masks of all kinds, ragged rows, biases, soft caps, sinks."""
    accepted = 0
    for seed in range(40_000, 41_000):
        case = draw_case(seed, dtype)
        if flex.objection(prepare(case.q, case.k, case.v, **case.given).call) is not None:
            continue
        out = attend(case.q, case.k, case.v, **case.given, backend="flex")
        compare(out, case, what="attend flex")
        accepted += 1
        if accepted == 4:
            return


RULES = [(Alibi.for_heads(4), True), (RelativeBias(4).requires_grad_(False), False)]
RULES += [(bias, not ragged) for bias, ragged in RULES] if LONG else []


@pytest.mark.parametrize(("bias", "ragged"), RULES)
def test_rules_of_distances_are_read_from_one_table(bias, ragged):
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 40, 8)
    starts = torch.tensor([20, 35])
    span = Span(30, 35, 0, 40)
    if ragged:
        span = Span.ragged(starts, queries=5, kv_start=0, kv_stop=40, bounds=(20, 35))
    given = {"mask": Causal(), "span": span, "score_bias": bias, "softcap": 3.0}
    with torch.no_grad():
        out, want = (attend(q, k, k, **given, backend=name) for name in ("flex", "eager"))
    torch.testing.assert_close(out, want)


ALL_SCORES = [(None, 1), (Causal(), 3), (Dense(torch.ones(1, 1).bool()), 1)]
ALL_SCORES += [(mask, 4 - batch) for mask, batch in ALL_SCORES] if LONG else []


@pytest.mark.parametrize(("mask", "batch"), ALL_SCORES, ids=str)
def test_one_number_is_the_bias_of_all_scores(batch, mask):
    """With a sink or a soft cap a bias of one number is no constant that softmax ignores."""
    length = 1 if isinstance(mask, Dense) else 5
    q, k = torch.randn(batch, 4, length, 8), torch.randn(batch, 2, length, 8)
    for bias in (torch.tensor(0.5), torch.full((1, 1, 1, 1), -0.7)):
        given = {"mask": mask, "score_bias": bias, "softcap": 3.0, "sinks": torch.ones(4)}
        out, want = (attend(q, k, k, **given, backend=name) for name in ("flex", "eager"))
        torch.testing.assert_close(out, want)


def test_fully_masked_rows_and_hidden_values_that_are_not_finite():
    valid = torch.tensor([[False] * 9, [False] * 3 + [True] * 6])
    q, k, v = torch.randn(2, 4, 9, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8)
    k[0], v[0] = torch.nan, torch.inf
    v[1, :, :3] = torch.nan
    for mask in (Causal() & Padding(valid), Padding(valid)):
        out = attend(q, k, v, mask=mask, backend="flex")
        assert torch.isfinite(out).all()
        assert (out[0] == 0).all()
        clean = v.nan_to_num(0, 0, 0)
        want = attend(q, k.nan_to_num(0), clean, mask=mask, backend="eager")
        torch.testing.assert_close(out, want)
    made = prepare(q, k, v, mask=Padding(valid), backend="flex", partial=True)
    found = made.partial(q, (Part(0, 9, (k, v)),))
    assert (found.lse[0] == -torch.inf).all()
    assert torch.isfinite(found.lse[1]).all()


def test_a_prefill_in_parts_with_sinks():
    q, k = torch.randn(1, 4, 6, 16), torch.randn(1, 2, 20, 16)
    sinks, span = torch.randn(4), Span(14, 20, 0, 20)
    given = {"mask": Causal() & SlidingWindow(9), "span": span, "sinks": sinks}
    made = prepare(q, k, k, **given, backend="flex")
    parts = [Part(a, b, (k[:, :, a:b], k[:, :, a:b])) for a, b in ((0, 8), (8, 15), (15, 20))]
    torch.testing.assert_close(made.run(q, parts), attend(q, k, k, **given, backend="eager"))


@pytest.mark.usefixtures("unchecked")  # Dynamo compiles the checks of annotations, too
def test_a_kind_of_mask_is_compiled_once_for_all_its_data():
    """Windows, documents and lengths are data: from the third length on nothing is compiled."""
    flex._compiled.cache_clear()
    torch._dynamo.utils.counters.clear()
    for length, size in ((20, 3), (22, 4), (25, 6), (31, 9)):
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        q = torch.randn(1, 2, length, 8)
        ids = Documents(torch.arange(length)[None] // 7)
        attend(q, q, q, mask=Causal() & SlidingWindow(size) & ids, backend="flex")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before


def programs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(
    "pages", [pytest.param({}, marks=pytest.mark.long), {"format": "K8V4"}], ids=str
)
def test_decoding_compiles_a_bounded_number_of_programs(pages):
    """One token at a time, and some at once, over pages that are sealed one after another."""
    layer = Attention(32, 4, num_kv_heads=2, mask=Causal(), backend="flex").eval()
    cache = PagedCache(PagePool(num_pages=200, page_size=4, **pages))
    before = programs()
    with torch.no_grad():
        layer(torch.randn(1, 6, 32), cache=cache)
        for step in range(200 if LONG else 20):
            layer(torch.randn(1, 3 if step % 10 == 9 else 1, 32), cache=cache)
    assert programs() - before <= 12


def test_each_kind_of_call_has_programs_of_its_own(monkeypatch):
    """More kinds of masks and heads than Dynamo compiles programs for one function."""
    monkeypatch.setattr(flex, "KERNELS", 1)
    flex._compiled.cache_clear()
    q = torch.randn(1, 4, 20, 8)
    for heads, mask in ((2, Causal()), (2, ~Causal()), (1, Causal() & SlidingWindow(3))):
        k = q[:, :heads].contiguous()
        out = attend(q, k, k, mask=mask, backend="flex")
        torch.testing.assert_close(out, attend(q, k, k, mask=mask, backend="eager"))


def test_a_tensor_given_twice_needs_no_other_program():
    q, k, v = (torch.randn(1, 2, 21, 8) for _ in range(3))
    for tensors in ((q, k, v), (q[:, :, :19], k[:, :, :19], v[:, :, :19])):
        attend(*tensors, mask=Causal(), backend="flex")
    before = programs()
    attend(q, k, k, mask=Causal(), backend="flex")
    attend(q, q, q, mask=Causal(), backend="flex")
    assert programs() == before


def test_a_function_that_refers_to_itself_is_a_mask():
    def near(b, h, q_idx, kv_idx):
        return (q_idx - kv_idx) < 3 if near else None

    q = torch.randn(1, 2, 9, 8)
    out, want = (attend(q, q, q, mask=Where(near), backend=name) for name in ("flex", "eager"))
    torch.testing.assert_close(out, want)


def test_automatic_choice_on_a_cpu_never_takes_it():
    for seed in range(300):
        case = draw_case(seed)
        made = prepare(case.q, case.k, case.v, **case.given)
        if flex.objection(made.call) is None:
            assert flex.estimate(made.call) > eager.estimate(made.call)


def call(**options):
    q = torch.zeros(1, 4, 300, options.pop("dim", 64), requires_grad=options.pop("grad", False))
    return prepare(
        q, q, q, **{"mask": Causal() & SlidingWindow(64), **options}, backend="eager"
    ).call


def test_objections():
    learned = RelativeBias(4)
    assert "no gradient on a CPU" in flex.objection(call(grad=True))
    assert "no gradient of score_bias" in flex.objection(call(grad=True, score_bias=learned))
    with FlopCounterMode(display=False):
        assert "plain tensors" in flex.objection(call())
    assert flex.objection(call()) is None


class Gpu:
    """A call as if on a GPU: what a backend decides there can be tested, not what it computes."""

    def __init__(self, call, monkeypatch, triton=True):
        from dataclasses import replace

        monkeypatch.setattr(flex, "has_triton", lambda: triton)
        self.call = replace(call, device=torch.device("cuda", 0))


def test_without_gradients_a_leaf_that_needs_them_is_read():
    """Also a view of a leaf: Dynamo takes it for one that needs gradients."""
    q, k = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 8, requires_grad=True)
    with torch.no_grad():
        for keys in (k, k[:, :, :3]):
            out = attend(q, keys, keys, mask=Causal(), backend="flex")
            torch.testing.assert_close(out, attend(q, keys, keys, mask=Causal(), backend="eager"))


def test_on_a_gpu_it_takes_gradients_and_head_dims_of_its_kernels(monkeypatch):
    assert flex.objection(Gpu(call(grad=True), monkeypatch).call) is None
    assert "head dims of 16 to 256" in flex.objection(Gpu(call(dim=8), monkeypatch).call)
    assert "head dims of 16 to 256" in flex.objection(Gpu(call(dim=576), monkeypatch).call)
    assert "needs triton" in flex.objection(Gpu(call(), monkeypatch, triton=False).call)
    wide = torch.zeros(1, 4, 3, 64, dtype=torch.float64)
    wide = prepare(wide, wide, wide, backend="eager").call
    assert "no kernel for torch.float64" in flex.objection(Gpu(wide, monkeypatch).call)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"mask": Causal()}, "sdpa"),
        ({"mask": Causal() & SlidingWindow(512)}, "flex"),
        ({"mask": Causal() & Padding(torch.arange(4096)[None] > 5)}, "flex"),
        ({"mask": Causal(), "softcap": 30.0}, "flex"),
        ({"mask": Causal(), "dtype": torch.float64}, "sdpa"),
    ],
)
def test_automatic_choice_on_a_gpu(options, name, monkeypatch):
    """A prefill of 4,096 tokens, 32 heads on 8, by the rates of an unknown device."""
    dtype = options.pop("dtype", torch.bfloat16)
    q, k = torch.empty(1, 32, 4096, 128, dtype=dtype), torch.empty(1, 8, 4096, 128, dtype=dtype)
    made = Gpu(prepare(q, k, k, **options, backend="eager").call, monkeypatch).call
    assert rates_of(made.device).source == "none"
    assert choose(made) == name


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles the kernel with g++")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch itself
def test_blocks_in_a_compiled_kernel(monkeypatch, unchecked):
    """torch's kernel for CPUs skips and fills the blocks that it is given."""
    real = flex._compiled
    monkeypatch.setattr(flex, "_compiled", lambda _, kind: real("inductor", kind))
    q, k = torch.randn(2, 4, 300, 16), torch.randn(2, 2, 420, 16)
    given = {"mask": Causal() & SlidingWindow(150), "span": Span(120, 420, 0, 420)}
    with torch.no_grad():
        out = attend(q, k, k, **given, backend="flex")
    torch.testing.assert_close(out, attend(q, k, k, **given, backend="eager"))


def test_a_layer_runs_it_by_name():
    layer = Attention(32, 4, mask=Causal() & SlidingWindow(3), backend="flex")
    x = torch.randn(1, 9, 32)
    with torch.no_grad():
        out = layer(x)
        layer.backend = "eager"
        torch.testing.assert_close(out, layer(x))
    assert isinstance(layer, nn.Module)
    assert BACKENDS["flex"].partial is not None


def test_nothing_visible_is_zeros():
    q = torch.randn(1, 2, 4, 8)
    assert "at least one query and one visible key" in flex.objection(
        prepare(q, q, q, mask=NOTHING).call
    )
