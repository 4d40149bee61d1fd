"""What surrounds a call: a bias of another dtype, any scale, autocast, other defaults of torch."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch

from layers import LAYERS, assert_same, inputs, make
from oracle import wide_attention
from regard import (
    Causal,
    KVCache,
    MultiQueryAttention,
    Padding,
    Partial,
    Span,
    attend,
    attend_partial,
    attention_weights,
)
from regard.ops.backends import BACKENDS

BY_NAME = ["auto", *BACKENDS]
TRIANGLE = np.tril(np.ones((6, 6), dtype=bool))


def draw(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype)


def judged(q, k, v, **options):
    """The output, and S of the error bound."""
    found, size = wide_attention(*(x.double().numpy() for x in (q, k, v)), **options)
    return torch.from_numpy(found), size


def bound(dtype, v, size):
    """The numeric contract of `precision="strict"`."""
    unit, largest = torch.finfo(dtype).eps / 2, v.abs().max().item()
    half = dtype in (torch.float16, torch.bfloat16)
    return unit * largest * (1.5 if half else 2 * (1 + size))


def objects(name, call):
    """Whether a backend that was named objects, in a sentence."""
    if name == "auto":
        return False
    try:
        call()
    except ValueError as objection:
        return f"backend='{name}' cannot run this call: " in str(objection)
    return False


# ---- a bias of another dtype


@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("other", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [1, 2])
def test_a_bias_of_any_dtype_is_added(name, dtype, other, heads):
    q = draw(1, 4, 3, 16, dtype=dtype)
    k, v = (draw(1, heads, 80, 16, dtype=dtype, seed=i) for i in (1, 2))
    bias = draw(1, 4, 3, 80, dtype=other, seed=3)

    def call():
        return attend(q, k, v, score_bias=bias, backend=name)

    if objects(name, call):
        return
    expected, size = judged(q, k, v, keep=np.asarray(True), bias=bias.double().numpy())
    out = call()
    assert out.dtype == dtype
    assert (out.double() - expected).abs().max() <= bound(dtype, v, size)


class OwnRule:
    """A rule that ignores the dtype it is asked for."""

    def bias(self, span, *, device=None, dtype):
        return torch.full((1, 1, span.num_queries, span.num_keys), 0.5, dtype=torch.float16)


@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize("heads", [1, 2])
def test_a_rule_may_answer_in_any_dtype(name, heads):
    q, k = draw(1, 4, 3, 16), draw(1, heads, 80, 16)
    expected = attend(q, k, k, score_bias=torch.tensor(0.5), backend="eager")

    def call():
        return attend(q, k, k, score_bias=OwnRule(), span=Span(77, 80, 0, 80), backend=name)

    assert objects(name, call) or (call() - expected).abs().max() < 1e-5


def test_one_long_key_head_with_a_bias_of_less_precision():
    layer = MultiQueryAttention(32, 4, score_bias=draw(4, 1, 3000)).double()
    x, memory = draw(1, 1, 32).double(), draw(1, 3000, 32).double()
    found = layer(x, context=memory)
    layer.backend = "eager"
    assert_same(found, layer(x, context=memory))


# ---- scales


@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize("scale", [0.0, -0.0, -0.4, 1e-30, 3.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_every_scale_keeps_hidden_keys_hidden(name, scale, dtype):
    q, k, v = (draw(2, 2, 6, 16, dtype=dtype, seed=i) for i in range(3))

    def call():
        return attend(q, k, v, mask=Causal(), scale=scale, backend=name)

    if objects(name, call):
        return
    stretched = q.double() * scale * 4  # the oracle's own scale is 16 ** -0.5
    expected, size = judged(stretched, k, v, keep=TRIANGLE)
    assert (call().double() - expected).abs().max() <= bound(dtype, v, size)


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), 1e39, -1e300])
def test_a_scale_beyond_float32_is_refused(scale):
    q = draw(1, 1, 2, 16)
    with pytest.raises(ValueError, match="scale is finite in float32"):
        attend(q, q, q, scale=scale)


# ---- autocast


@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("softcap", [None, 50.0])
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_autocast_changes_no_number(name, dtype, softcap, half):
    q, k, v = (draw(2, 2, 6, 16, dtype=dtype, seed=i) * 3 for i in range(3))

    def call():
        return attend(q, k, v, mask=Causal(), softcap=softcap, backend=name)

    if objects(name, call):
        return
    plain = call()
    with torch.autocast("cpu", half):
        out = call()
        weights = attention_weights(q, k, mask=Causal(), softcap=softcap)
    assert out.dtype == dtype
    assert torch.equal(out, plain)
    assert torch.equal(weights, attention_weights(q, k, mask=Causal(), softcap=softcap))


@pytest.mark.parametrize("name", ["eager", "grouped", "fused"])
def test_autocast_leaves_parts_alone(name):
    q, k = draw(1, 2, 1, 16), draw(1, 2, 40, 16)
    plain = attend_partial(q, k, k, backend=name)
    with torch.autocast("cpu", torch.bfloat16):
        found = attend_partial(q, k, k, backend=name)
    assert torch.equal(found.out, plain.out)
    assert torch.equal(found.lse, plain.lse)


# ---- defaults of torch


@contextmanager
def defaults(dtype=torch.float32, device="cpu"):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


DEFAULTS = [(torch.bfloat16, "cpu"), (torch.float64, "cpu"), (torch.float32, "meta")]


@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize(("dtype", "device"), DEFAULTS)
@pytest.mark.parametrize("padded", [False, True])
def test_defaults_change_no_number(name, dtype, device, padded):
    q, k = draw(1, 4, 1, 16), draw(1, 2, 300, 16)
    mask = Padding(torch.arange(300)[None] > 7) if padded else Causal()

    def call():
        return attend(q, k, k, mask=mask, span=Span(299, 300, 0, 300), backend=name)

    if objects(name, call):
        return
    expected = call()
    with defaults(dtype, device):
        assert torch.equal(call(), expected)


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize(("dtype", "device"), DEFAULTS)
def test_defaults_change_no_layer(kind, dtype, device):
    layer, x, valid = make(kind), inputs(2, 6), torch.tensor([[0, 1, 1, 1, 1, 1], [1] * 6])
    expected = layer(x, mask=Padding(valid))
    with defaults(dtype, device):
        cache = KVCache()
        pieces = [layer(x[:, :4], mask=Padding(valid), cache=cache)]
        pieces += [layer(piece, cache=cache) for piece in x[:, 4:].split(1, 1)]
        assert layer.weights(x).dtype == torch.float64
        assert "runs" in layer.explain(x)
    assert_same(torch.cat(pieces, 1)[1:], expected[1:])


def test_the_neutral_part_is_float32_under_every_default():
    with defaults(torch.float64):
        assert Partial.nothing().lse.dtype == torch.float32
        q = draw(1, 1, 2, 16)
        assert attend_partial(q, q, q, backend="eager").out.dtype == torch.float32
