"""Biases against loops and against transformers' T5."""

import copy
import pickle
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from regard import attend
from regard.masks import Dense, Span
from regard.ops.bias import Alibi, BiasWith, RelativeBias, ScoreBias, split_additive

SPANS = [(0, 4, 0, 4), (5, 6, 0, 6), (3, 7, 2, 9), (0, 1, 3, 3), (200, 203, 0, 260)]


@dataclass(frozen=True)
class AnySpan:
    """A span the suite's type checks do not reach, so that a compiled function can make one."""

    q_start: int
    q_stop: int
    kv_start: int
    kv_stop: int

    def positions(self, device=None):
        return torch.arange(self.q_start, self.q_stop, device=device)


def ragged(starts, queries, kv_start, kv_stop):
    return Span.ragged(
        torch.tensor(starts),
        queries=queries,
        kv_start=kv_start,
        kv_stop=kv_stop,
        bounds=(min(starts), max(starts)),
    )


@pytest.mark.parametrize("span", SPANS)
def test_alibi_is_minus_slope_times_distance(span):
    slopes = [0.5, 0.1, -3.0]
    q_start, q_stop, kv_start, kv_stop = span
    found = Alibi(slopes).bias(Span(*span), dtype=torch.float64)
    assert found.shape == (1, 3, q_stop - q_start, kv_stop - kv_start)
    for h, slope in enumerate(slopes):
        for q in range(q_start, q_stop):
            for k in range(kv_start, kv_stop):
                assert found[0, h, q - q_start, k - kv_start] == -slope * abs(q - k)


@pytest.mark.parametrize("rule", [Alibi([0.5, 0.1]), RelativeBias(2)], ids=repr)
def test_rows_of_a_ragged_span_have_biases_of_their_own(rule):
    starts = [4, 0, 9]
    found = rule.bias(ragged(starts, 3, 1, 12), dtype=torch.float32)
    assert found.shape == (3, 2, 3, 11)
    for row, start in enumerate(starts):
        alone = rule.bias(Span(start, start + 3, 1, 12), dtype=torch.float32)
        assert torch.equal(found[row], alone[0])


def test_alibi_slopes_are_the_papers():
    assert Alibi.for_heads(8) == Alibi([2.0**-i for i in range(1, 9)])
    assert Alibi.for_heads(1) == Alibi([2.0**-8])
    assert Alibi.for_heads(16).slopes[:3] == pytest.approx((2**-0.5, 2**-1.0, 2**-1.5))


@pytest.mark.parametrize("heads", [*range(1, 18), 31, 32, 33, 112])
def test_alibi_slopes_are_blooms(heads):
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    mask = torch.ones(1, 2, dtype=torch.int64)
    theirs = bloom.build_alibi_tensor(mask, heads, torch.float32)[:, 0, 1]
    torch.testing.assert_close(torch.tensor(Alibi.for_heads(heads).slopes), theirs)


def test_alibi_is_a_value():
    value = Alibi(torch.tensor([0.5, 0.25]))
    assert value == Alibi([0.5, 0.25]) == Alibi((0.5, 0.25)) != Alibi([0.5])
    for other in (eval(repr(value)), copy.deepcopy(value), pickle.loads(pickle.dumps(value))):
        assert other == value and hash(other) == hash(value)
    with pytest.raises(AttributeError):
        value.slopes = (1.0,)


def test_far_biases_in_half_precision_are_rounded_once():
    span = Span(70_000, 70_001, 0, 3)
    exact = Alibi([0.3]).bias(span, dtype=torch.float64)
    for dtype, roundings in ((torch.float32, 2), (torch.bfloat16, 1.01)):
        found = Alibi([0.3]).bias(span, dtype=dtype)
        assert found.dtype == dtype
        rtol = roundings * torch.finfo(dtype).eps / 2
        torch.testing.assert_close(found.double(), exact, rtol=rtol, atol=0)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "distance"), [(32, 128), (8, 20), (64, 1000), (12, 9)])
def test_relative_bias_is_t5s(bidirectional, buckets, distance):
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    config = t5.T5Config(
        d_model=12,
        d_kv=4,
        num_heads=3,
        relative_attention_num_buckets=buckets,
        relative_attention_max_distance=distance,
        is_decoder=not bidirectional,
    )
    theirs = t5.T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    ours = RelativeBias(3, buckets, distance, bidirectional)
    ours.load_state_dict({"relative_attention_bias.weight": theirs.relative_attention_bias.weight})
    length = 3 * distance
    expected = theirs.compute_bias(length, length)
    assert torch.equal(ours.bias(Span(0, length, 0, length), dtype=torch.float32), expected)
    part = ours.bias(Span(length - 5, length - 2, 7, length), dtype=torch.float32)
    assert torch.equal(part, expected[:, :, -5:-2, 7:])


@given(buckets=st.integers(2, 40), distance=st.integers(41, 3000), bidirectional=st.booleans())
def test_buckets_are_t5s(buckets, distance, bidirectional):
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    buckets *= 2
    offsets = torch.arange(-2 * distance, 2 * distance + 1)
    expected = t5.T5Attention._relative_position_bucket(offsets, bidirectional, buckets, distance)
    found = RelativeBias(1, buckets, distance, bidirectional).buckets(offsets)
    assert torch.equal(found, expected)


def test_relative_bias_learns():
    rule = RelativeBias(2, 8, 20)
    rule.bias(Span(0, 3, 0, 3), dtype=torch.float64).sum().backward()
    grad = rule.relative_attention_bias.weight.grad
    assert grad[:, 0].tolist() == [3.0, 2.0, 1.0, 0.0, 0.0, 2.0, 1.0, 0.0]
    assert rule.relative_attention_bias.weight.shape == (8, 2)


def test_relative_bias_keeps_its_buckets_wherever_it_goes():
    rule = RelativeBias(2)
    span = Span(0, 9, 0, 300)
    expected = rule.bias(span, dtype=torch.float32)
    assert rule.to("meta").bias(span, dtype=torch.float32).is_meta
    with torch.device("meta"):
        empty = RelativeBias(2)
    empty = empty.to_empty(device="cpu")
    empty.reset_parameters()
    assert torch.isfinite(empty.bias(span, dtype=torch.float32)).all()
    fresh = RelativeBias(2).to(torch.bfloat16)
    assert fresh.bias(span, dtype=torch.float32).dtype == torch.float32
    assert expected.dtype == torch.float32
    assert repr(eval(repr(fresh))) == repr(fresh)
    assert list(fresh.state_dict()) == ["relative_attention_bias.weight"]


def test_a_relative_bias_can_be_built_under_fake_tensors():
    """To size a model without its memory; the buckets are numbers all the same."""
    with FakeTensorMode():
        rule = RelativeBias(2, num_buckets=8, max_distance=20)
    assert rule._buckets == RelativeBias(2, num_buckets=8, max_distance=20)._buckets


@pytest.mark.parametrize("rule", [Alibi([0.5, 0.1]), RelativeBias(2)], ids=repr)
def test_biases_compile_in_one_graph(unchecked, rule):
    torch.compiler.reset()

    def bias(x):
        return x + rule.bias(AnySpan(2, 2 + x.shape[-2], 0, x.shape[-1]), dtype=x.dtype)

    compiled = torch.compile(bias, fullgraph=True, dynamic=True, backend="aot_eager")
    for shape in ((1, 2, 3, 5), (1, 2, 4, 9)):
        x = torch.randn(shape)
        assert torch.equal(compiled(x), bias(x))
    assert isinstance(rule, ScoreBias)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_split_additive_parts_hiding_from_bias(dtype):
    lowest = torch.finfo(dtype).min
    t = torch.tensor([[0.5, -torch.inf, lowest], [-9984.0, -1e4, -2.0]], dtype=dtype)
    hides = [[False, True, True], [False, True, False]]
    if dtype == torch.bfloat16:  # where -1e4 is written -9984
        hides[1][0] = True
    before = t.clone()
    mask, score_bias = split_additive(t)
    assert isinstance(mask, Dense)
    assert torch.equal(mask.keep, ~torch.tensor(hides))
    assert torch.equal(score_bias, t.masked_fill(torch.tensor(hides), 0.0))
    assert score_bias.dtype == dtype and torch.equal(t, before)


def test_split_additive_keeps_shape_and_gradient():
    t = torch.randn(2, 1, 3, 4).masked_fill(torch.rand(2, 1, 3, 4) < 0.5, -torch.inf)
    t.requires_grad_()
    mask, score_bias = split_additive(t)
    score_bias.sum().backward()
    assert mask.keep.shape == score_bias.shape == t.shape
    assert torch.equal(t.grad, mask.keep.float())


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Alibi([]), ValueError, "one a head, got"),
        (lambda: Alibi([0.5, float("nan")]), ValueError, "finite.*for_heads"),
        (lambda: Alibi(["a"]), TypeError, "real numbers"),
        (lambda: Alibi(torch.ones(2, 2)), ValueError, r"\[H\].*\(2, 2\)"),
        (lambda: Alibi.for_heads(0), ValueError, "num_heads must be positive, got 0"),
        (lambda: RelativeBias(0), ValueError, "num_heads must be positive, got 0"),
        (lambda: RelativeBias(2, 7), ValueError, "num_buckets=7.*even number >= 4"),
        (lambda: RelativeBias(2, 2), ValueError, "num_buckets=2.*even number >= 4"),
        (lambda: RelativeBias(2, 1, bidirectional=False), ValueError, "num_buckets=1.*>= 2"),
        (lambda: RelativeBias(2, 32, 8), ValueError, "max_distance=8 must be above 8"),
        (lambda: split_additive(torch.tensor([[torch.nan]])), ValueError, "NaN"),
        (lambda: split_additive(torch.tensor([[torch.inf]])), ValueError, r"\+inf"),
        (lambda: split_additive(torch.zeros(3)), ValueError, r"\[.., L, S\], got shape \(3,\)"),
        (lambda: split_additive(torch.ones(2, 2).bool()), TypeError, "got torch.bool"),
        (lambda: split_additive([[0.0]]), TypeError, "got list"),
    ],
)
def test_wrong_arguments_are_refused_with_the_reason(unchecked, make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_learned_rule_reads_the_parameters_that_it_is_given():
    rule = RelativeBias(2, num_buckets=8, max_distance=6)
    other = torch.randn(8, 2, requires_grad=True)
    options = {"device": "cpu", "dtype": torch.float32}
    span = Span(0, 5, 0, 5)
    bias = BiasWith(rule, {"relative_attention_bias.weight": other}).bias(span, **options)
    bias.sum().backward()
    assert other.grad is not None and rule.relative_attention_bias.weight.grad is None
    rule.relative_attention_bias.weight = torch.nn.Parameter(other.detach())
    assert torch.equal(bias, rule.bias(span, **options))


def test_a_rule_for_its_heads_compiles_with_sizes_left_open():
    def call(x):
        return attend(x, x, x, score_bias=Alibi.for_heads(3))

    compiled = torch.compile(call, backend="eager", fullgraph=True, dynamic=True)
    for length in (4, 7):
        x = torch.randn(2, 3, length, 8)
        assert torch.allclose(compiled(x), call(x), atol=1e-6)
    with pytest.raises(ValueError, match="for 3 heads, the call has 4"):
        call(torch.randn(2, 4, 5, 8))
