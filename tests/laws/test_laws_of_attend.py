"""What must be true of attention on tensors, in sentences. The names are the specification.

Calls are random, of every backend; float64 where rounding is not the point.
"""

import copy
from functools import partial

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from cases import (
    BACKENDS,
    DTYPES,
    Case,
    bound,
    draw_case,
    is_objection,
    table,
)
from layers import (
    LAYERS,
    assert_same,
    inputs,
    make,
    run_in_pieces,
)
from regard import (
    NO_CACHE,
    Causal,
    KVCache,
    Padding,
    Partial,
    SlidingWindow,
    Span,
    Where,
    attend,
    merge,
)

SEEDS = st.integers(0, 10**9)
TOKENS = 11


def run(case: Case, backend: str = "auto", **changed) -> Tensor | None:
    """The call, with some of it changed; None where a named backend objects in a sentence."""
    tensors = {name: changed.pop(name, getattr(case, name)) for name in "qkv"}
    try:
        return attend(**tensors, **{**case.given, **changed}, backend=backend)
    except ValueError as error:
        if not is_objection(error, backend):
            raise
        return None


def by_key_head(seen: Tensor, case: Case) -> Tensor:
    """[B, H, ...] to [B, G, ...]: whether it is visible to any query head of the group."""
    return seen.unflatten(1, (case.sizes.kv_heads, -1)).any(2)


@given(SEEDS)
def test_every_backend_agrees_or_objects(seed):
    case = draw_case(seed)
    judged = case.judge()
    expected = torch.tensor(judged.out, dtype=torch.float64).reshape(run(case).shape)
    allowed = bound(case.q.dtype, case.v.double().abs().max().item(), judged.largest)
    for backend in BACKENDS:
        out = run(case, backend)
        if out is not None:
            assert (out.double() - expected).abs().max().item() <= allowed, backend


def draw_partial(seed: int) -> Partial:
    """Any output, any log-sum-exp; a fifth of the rows saw nothing."""
    torch.manual_seed(seed)
    masked = torch.rand(2, 3, 4) < 0.2
    out = torch.randn(2, 3, 4, 5).double().masked_fill(masked.unsqueeze(-1), 0.0)
    return Partial(out, (torch.randn(2, 3, 4) * 20).double().masked_fill(masked, -torch.inf))


def as_tensor(partial: Partial) -> Tensor:
    """The two halves side by side; fully masked rows have no output and a log-sum-exp of -inf."""
    masked = partial.lse == -torch.inf
    assert (partial.out[masked] == 0).all()
    return torch.cat([partial.out, partial.lse.masked_fill(masked, -1e3).unsqueeze(-1)], -1)


@given(SEEDS)
def test_merge_is_associative_and_commutative_with_a_neutral_element(seed):
    a, b, c = (draw_partial(seed + i) for i in range(3))
    together = as_tensor(merge(a, b, c))
    assert_same(as_tensor(merge(merge(a, b), c)), together)
    assert_same(as_tensor(merge(a, merge(b, c))), together)
    assert_same(as_tensor(merge(c, a, b)), together)
    assert_same(as_tensor(merge(a, b, c, Partial.nothing())), together)
    assert_same(as_tensor(merge(Partial.nothing(), merge(a))), as_tensor(merge(a)))
    nothing = merge(Partial.nothing(), Partial.nothing())
    assert (nothing.lse == -torch.inf).all()
    assert (nothing.out == 0).all()


@given(SEEDS)
def test_sinks_are_one_more_key_with_no_value(seed):
    torch.manual_seed(seed)
    q, k, v = torch.randn(2, 6, 4, 3), torch.randn(2, 2, 4, 3), torch.randn(2, 2, 4, 5)
    q, k, v, sinks = (x.double() for x in (q, k, v, torch.randn(6)))
    none = torch.zeros(2, 2, 1, 1, dtype=torch.float64)
    more_k, more_v = (torch.cat([none.expand(-1, -1, -1, x.shape[-1]), x], 2) for x in (k, v))
    bias = torch.zeros(6, 4, 5, dtype=torch.float64)
    bias[:, :, 0] = sinks[:, None]
    causal = Where(lambda b, h, q, kv: (kv <= q) | (kv == 0))
    spelled = attend(
        q, more_k, more_v, score_bias=bias, softcap=2.0, mask=causal, span=Span(1, 5, 0, 5)
    )
    assert_same(attend(q, k, v, sinks=sinks, softcap=2.0, mask=Causal()), spelled)


@given(SEEDS, st.floats(-50, 50))
def test_adding_a_constant_to_all_scores_changes_nothing(seed, constant):
    case = draw_case(seed, torch.float64)
    given_, free = dict(case.given), Case(**{**vars(case), "given": dict(case.given)})
    for name in ("score_bias", "sinks"):
        free.given.pop(name, None)
        given_.pop(name, None)
    shifted = run(free, score_bias=torch.full((1, 1, 1, 1), constant, dtype=torch.float64))
    assert_same(shifted, run(free))


@given(SEEDS, st.floats(-3, 3), st.floats(-3, 3))
def test_values_are_linear(seed, a, b):
    case = draw_case(seed, torch.float64)
    other = torch.randn_like(case.v)
    assert_same(run(case, v=a * case.v + b * other), a * run(case) + b * run(case, v=other), 1e-10)


@given(SEEDS)
def test_outputs_lie_among_the_values(seed):
    case = draw_case(seed, torch.float64)
    case.given.pop("sinks", None)
    out, seen = run(case), table(case)
    v = case.v.repeat_interleave(case.sizes.heads // case.sizes.kv_heads, 1).unsqueeze(2)
    hidden = ~seen.unsqueeze(-1)
    low, high = (
        v.expand(-1, -1, seen.shape[2], -1, -1).masked_fill(hidden, far) for far in (1e9, -1e9)
    )
    sighted = seen.any(-1)
    assert (out >= low.amin(3) - 1e-12)[sighted].all()
    assert (out <= high.amax(3) + 1e-12)[sighted].all()
    ones = run(case, v=torch.ones_like(case.v))
    assert_same(ones, sighted.unsqueeze(-1).double().expand_as(ones))


@given(SEEDS)
def test_keys_have_no_order_but_their_mask(seed):
    """Keys, values and the columns of mask and bias, permuted together."""
    case = draw_case(seed, torch.float64)
    for name in ("mask", "score_bias", "span"):
        case.given.pop(name, None)
    order = torch.randperm(case.sizes.keys)
    assert_same(run(case, k=case.k[:, :, order], v=case.v[:, :, order]), run(case))


@given(SEEDS)
def test_query_heads_are_interchangeable_within_their_group(seed):
    case = draw_case(seed, torch.float64)
    order = torch.randperm(case.sizes.heads // case.sizes.kv_heads)
    heads = torch.arange(case.sizes.heads).view(case.sizes.kv_heads, -1)[:, order].flatten()
    case.given = {"softcap": case.given.get("softcap")}
    assert_same(run(case, q=case.q[:, heads]), run(case)[:, heads])


POISON = {"large": 1e4, "huge": 1e30}


@pytest.mark.parametrize("gradients", [False, True], ids=["no gradients", "gradients"])
@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize("backend", BACKENDS)
def test_hidden_finite_content_never_changes_a_bit(backend, poison, gradients):
    """A query is compared with itself when everything hidden from it holds other finite numbers, in
    every dtype: huge ones where other queries attend, the largest of the dtype where none does."""

    @given(SEEDS)
    def law(seed):
        case = draw_case(seed)
        k, v = case.k.detach().contiguous(), case.v.detach().contiguous()
        plain = run(case, backend, k=k, v=v)
        assume(plain is not None)
        largest = torch.finfo(k.dtype).max
        seen = by_key_head(table(case), case)
        hidden_from_all = ~seen.any(2).unsqueeze(-1)
        for i in range(min(case.sizes.queries, 3)):
            hidden = ~seen[:, :, i].unsqueeze(-1)
            junk = (torch.rand(k.shape[:3]) < 0.5).unsqueeze(-1).to(k.dtype) * 2 - 1
            junk = torch.where(hidden_from_all, junk * largest, junk * min(POISON[poison], largest))
            other_k = torch.where(hidden, junk, k).contiguous()
            other_v = torch.where(hidden, junk, v).contiguous()
            poisoned = run(case, backend, k=other_k, v=other_v)
            assert torch.equal(poisoned[:, :, i], plain[:, :, i]), case

    with torch.set_grad_enabled(gradients):
        law()


@pytest.mark.parametrize("junk", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("gradients", [False, True], ids=["no gradients", "gradients"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_non_finite_content_hidden_from_all_queries_never_changes_a_bit(backend, gradients, junk):
    """Padding and stale slots may hold anything, and no gradient comes from them."""

    @given(SEEDS)
    def law(seed):
        case = draw_case(seed)
        q, k, v = (x.detach().contiguous() for x in (case.q, case.k, case.v))
        q, k, v = (x.clone().requires_grad_(gradients) for x in (q, k, v))
        plain = run(case, backend, q=q, k=k, v=v)
        assume(plain is not None)
        hidden = ~by_key_head(table(case), case).any(2).unsqueeze(-1)
        bad_k, bad_v = (
            x.detach().masked_fill(hidden, junk).contiguous().requires_grad_(gradients)
            for x in (k, v)
        )
        poisoned = run(case, backend, q=q, k=bad_k, v=bad_v)
        assert torch.equal(poisoned, plain), case
        if gradients:
            found = torch.autograd.grad(poisoned.sum(), (q, bad_k, bad_v))
            assert all(torch.isfinite(x).all() for x in found), case
            expected = torch.autograd.grad(plain.sum(), (q, k, v))
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), case

    law()


@pytest.mark.parametrize("junk", [torch.nan, 3e38], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_hidden_content_changes_no_bit_where_keys_begin_anywhere_in_memory(backend, junk):
    """A window reads some of the stored keys: their rows are no multiple of the processor's vectors
    apart. A copy of them in other memory would be multiplied in another order."""
    for shape in [(9, 5, 3, 5, 2), (4, 9, 2, 5, 5), (3, 5, 3, 5, 2)]:
        num_heads, num_keys, num_kv_heads, head_dim, v_head_dim = shape
        q = torch.randn(1, num_heads, 1, head_dim)
        k = torch.randn(1, num_kv_heads, num_keys, head_dim)
        v = torch.randn(1, num_kv_heads, num_keys, v_head_dim)
        valid = torch.arange(num_keys) != num_keys - 2
        attended = partial(
            attend,
            mask=Padding(valid[None]) & Causal() & SlidingWindow(4),
            span=Span(num_keys - 1, num_keys, 0, num_keys),
            backend=backend,
        )
        hidden = ~valid[:, None]
        try:
            plain = attended(q, k, v)
        except ValueError as error:
            if not is_objection(error, backend):
                raise
            continue
        assert torch.equal(
            attended(q, k.masked_fill(hidden, junk), v.masked_fill(hidden, junk)), plain
        )


@pytest.mark.parametrize("sinks", [False, True], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_fully_masked_row_has_zeros_and_zero_gradients(backend, dtype, sinks):
    masked = Causal() & Where(lambda b, h, q, kv: (q != 2) & ((q != 3) | (b == 0)))
    for options in ({}, {"softcap": 2.0}, {"score_bias": torch.randn(4, 5, 5).to(dtype)}):
        q, k, v = (torch.randn(2, g, 5, 8).to(dtype).requires_grad_() for g in (4, 2, 2))
        if sinks:
            options = {**options, "sinks": torch.randn(4).to(dtype)}
        try:
            out = attend(q, k, v, mask=masked, backend=backend, **options)
        except ValueError as error:
            if not is_objection(error, backend):
                raise
            continue
        assert (out[:, :, 2] == 0).all()
        assert (out[1, :, 3] == 0).all()
        assert (out[0, :, 3] != 0).any()
        assert (out[:, :, 4] != 0).any()
        out.sum().backward()
        assert (q.grad[:, :, 2] == 0).all()
        assert (q.grad[1, :, 3] == 0).all()
        assert all(torch.isfinite(x.grad).all() for x in (q, k, v))


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_input_is_mutated(backend):
    @given(SEEDS)
    def law(seed):
        case = draw_case(seed)
        names = [name for name, x in case.given.items() if isinstance(x, Tensor)]
        tensors = [case.q, case.k, case.v, *(case.given[name] for name in names)]
        before = [(x.clone(), x._version) for x in tensors]
        assume(run(case, backend) is not None)
        for x, (copied, version) in zip(tensors, before, strict=True):
            assert torch.equal(x, copied)
            assert x._version == version

    law()


@pytest.mark.parametrize("layer", LAYERS)
def test_no_layer_mutates_its_input(layer):
    layer, x = make(layer), inputs(2, TOKENS)
    copied, version, state = x.clone(), x._version, copy.deepcopy(layer.state_dict())
    with torch.no_grad():
        run_in_pieces(layer, x, KVCache(), [3, 4])
    assert torch.equal(x, copied)
    assert x._version == version
    assert all(torch.equal(value, state[name]) for name, value in layer.state_dict().items())
    assert NO_CACHE.length == 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_dropout_drops_its_share_and_scales_the_rest(rate, backend):
    """One-hot values give the weights: kept ones are scaled by 1 / (1 - p), and few are dropped."""
    q, k = torch.randn(4, 8, 40, 8), torch.randn(4, 4, 40, 8)
    v = torch.eye(40).expand(4, 4, 40, 40)
    try:
        dropped = attend(q, k, v, dropout=rate, mask=Causal(), backend=backend)
    except ValueError as error:
        if not is_objection(error, backend):
            raise
        return
    weights = attend(q, k, v, mask=Causal())
    sighted = torch.ones(40, 40).tril().bool().expand_as(weights)
    kept = dropped[sighted] != 0
    expected = weights[sighted][kept] / (1 - rate)
    torch.testing.assert_close(dropped[sighted][kept], expected, rtol=1e-4, atol=1e-6)
    deviation = (rate * (1 - rate) / kept.numel()) ** 0.5
    assert abs(kept.double().mean().item() - (1 - rate)) < 5 * deviation
    assert (dropped[~sighted] == 0).all()


@given(SEEDS)
def test_sharing_keys_is_repeating_them(seed):
    case = draw_case(seed, torch.float64)
    group = case.sizes.heads // case.sizes.kv_heads
    k, v = (side.repeat_interleave(group, 1) for side in (case.k, case.v))
    assert_same(run(case), run(case, k=k, v=v))
