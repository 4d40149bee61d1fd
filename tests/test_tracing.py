"""Calls that torch traces, transforms or differentiates forward: correct, or refused."""

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from oracle import wide_attention
from regard import (
    Alibi,
    Attention,
    Causal,
    Documents,
    KVCache,
    Padding,
    QuantizedCache,
    Rotary,
    SlidingCache,
    SlidingWindow,
    Span,
    StaticCache,
    attend,
    prepare,
)
from regard.ops.backends import BACKENDS
from regard.ops.choose import objection_of
from regard.tracing import in_backward, is_concrete, is_forward_mode, is_immediate, is_vmapped

pytestmark = [  # warnings of torch itself about forward mode and vmap
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),
]
DECODE = Span(39, 40, 0, 40)
VALID = torch.arange(40)[None] < 30
ON_GPUS = ("latents", "flash")  # which object to every call here
BY_NAME = ["auto", *(name for name in BACKENDS if name not in ON_GPUS)]


def tensors(seed=0):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(1, 4, 1, 16, generator=generator)
    k, v = (torch.randn(1, 2, 40, 16, generator=generator) for _ in range(2))
    return q, k, v


def expected_output(q, k, v, keep=True):
    return torch.from_numpy(
        wide_attention(*(x.double().numpy() for x in (q, k, v)), keep=np.asarray(keep))[0]
    )


def close(out, expected):
    return (out.double() - expected).abs().max() < 1e-5


def run(q, k, v, name, mask):
    """The output, or None where the named backend objects."""
    if name != "auto" and backend_objects(q, k, v, name, mask):
        with pytest.raises(ValueError, match=f"backend='{name}' cannot run this call: "):
            attend(q, k, v, mask=mask, span=DECODE, backend=name)
        return None
    return attend(q, k, v, mask=mask, span=DECODE, backend=name)


def backend_objects(q, k, v, name, mask):
    return objection_of(prepare(q, k, v, mask=mask, span=DECODE).call, name) is not None


@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize("mask", [Causal(), Padding(VALID)], ids=["causal", "padding"])
def test_forward_mode_gives_the_derivative_or_objects(name, mask):
    q, k, v = tensors()
    step = torch.randn(q.shape, generator=torch.Generator().manual_seed(1))
    with forward_ad.dual_level():
        assert is_forward_mode()
        out = run(forward_ad.make_dual(q, step), k, v, name, mask)
        if out is None:
            return
        tangent = forward_ad.unpack_dual(out).tangent
    keep = VALID.numpy() if isinstance(mask, Padding) else True
    ahead, behind = (expected_output(q.double() + h * step, k, v, keep) for h in (1e-5, -1e-5))
    assert close(tangent, (ahead - behind) / 2e-5)


@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize("mask", [Causal(), Padding(VALID)], ids=["causal", "padding"])
def test_vmap_computes_each_call(name, mask):
    q, k, v = tensors()
    more = torch.stack([q, 2 * q])
    objections = []

    def alone(q):
        out = run(q, k, v, name, mask)
        objections.append(out is None)
        return q if out is None else out

    out = torch.func.vmap(alone)(more)
    if objections == [True]:
        assert name in ("fused", "flex", "sdpa", "tiled")
        return
    keep = VALID.numpy() if isinstance(mask, Padding) else True
    for one, each in zip(out, more, strict=True):
        assert close(one, expected_output(each, k, v, keep))


def test_vmap_over_the_data_of_a_mask():
    q, k, v = tensors()
    valid = torch.stack([VALID, ~VALID])
    out = torch.func.vmap(lambda each: attend(q, k, v, mask=Padding(each), span=DECODE))(valid)
    for one, each in zip(out, valid, strict=True):
        assert close(one, expected_output(q, k, v, each.numpy()))


@pytest.mark.parametrize("name", BY_NAME)
def test_a_traced_program_computes_other_inputs(name):
    q, k, v = tensors()
    if name in ("fused", "flex"):
        with pytest.raises(ValueError, match=f"{name} takes plain tensors"):
            make_fx(lambda q: attend(q, k, v, backend=name))(q)
        return
    mask = Causal() & Padding(VALID)
    if name == "tiled":
        return  # it takes no single query
    program = make_fx(lambda q, k, v: run(q, k, v, name, mask))(q, k, v)
    others = tensors(seed=3)
    assert close(program(*others), expected_output(*others, VALID.numpy()))


@pytest.mark.parametrize("name", BY_NAME)
def test_fake_tensors_have_only_shapes(name):
    with FakeTensorMode() as mode:
        q, k, v = (mode.from_tensor(x) for x in tensors())
        out = run(q, k, v, name, Causal())
    assert out is None or out.shape == (1, 4, 1, 16)
    assert (out is None) == (name in ("fused", "flex", "tiled"))


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev, torch.func.hessian])
def test_torch_func_differentiates_long_windows(transform):
    """`blocked` recomputes in the backward pass, which torch.func does not allow."""
    x = torch.randn(1, 1, 5, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def through(name):
        return lambda x: attend(x, x, x, mask=Causal(), backend=name).square().sum()

    expected = transform(through("eager"))(x)
    assert torch.allclose(transform(through("auto"))(x), expected, rtol=1e-9, atol=1e-9)
    with pytest.raises(ValueError, match="blocked computes its blocks again"):
        transform(through("blocked"))(x)


def test_tensors_made_under_transforms_are_not_memoised():
    layer = Attention(8, 2, mask=Causal(), score_bias=Alibi([0.25, 0.2]), rope=Rotary(4, theta=7.0))
    x = torch.randn(1, 3, 8)
    slope = torch.func.grad(lambda x: layer(x).sum())
    torch.func.jvp(slope, (x,), (x,))
    assert slope(x).shape == x.shape
    with FakeTensorMode(allow_non_fake_inputs=True):
        layer(x)
    layer(x)


@pytest.mark.parametrize("make", [KVCache, lambda: StaticCache(8), lambda: SlidingCache(3)])
def test_forward_mode_differentiates_cached_tokens(make):
    layer = Attention(8, 2, mask=Causal() & SlidingWindow(3)).double()
    x, step = torch.randn(1, 6, 8).double(), torch.randn(1, 6, 8).double()

    def in_pieces(x):
        cache = make()
        return torch.cat([layer(piece, cache=cache) for piece in x.split([4, 1, 1], 1)], 1)

    with torch.no_grad():
        found = torch.func.jvp(in_pieces, (x,), (step,))[1]
        expected = torch.func.jvp(layer, (x,), (step,))[1]
        assert torch.allclose(found, expected, atol=1e-10)
        with pytest.raises(ValueError, match="QuantizedCache rounds"):
            torch.func.jvp(lambda x: layer(x, cache=QuantizedCache()), (x,), (step,))


@pytest.mark.parametrize("trained", [[], ["q_proj"], ["q_proj", "sinks"]])
def test_forward_mode_with_frozen_parameters(trained):
    layer = Attention(8, 2, mask=Causal(), sinks=True).double()
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(name.split(".")[0] in trained)
    x, step, found = torch.randn(1, 5, 8).double(), torch.randn(1, 5, 8).double(), []
    for make in (KVCache, lambda: None):
        given = {} if (cache := make()) is None else {"cache": cache}
        with forward_ad.dual_level():
            out = layer(forward_ad.make_dual(x, step), **given)
            found.append(forward_ad.unpack_dual(out).tangent)
    ahead, behind = (layer(x + h * step) for h in (1e-6, -1e-6))
    for tangent in found:
        assert torch.allclose(tangent, (ahead - behind) / 2e-6, atol=1e-7)


@pytest.mark.parametrize("make", [KVCache, lambda: SlidingCache(3)])
def test_torch_func_with_frozen_parameters(make):
    layer = Attention(8, 2, mask=Causal() & SlidingWindow(3)).double().requires_grad_(False)
    x = torch.randn(1, 5, 8).double()

    def in_pieces(x, pieces=(3, 1, 1)):
        cache = make()
        q, rest = x[:, :3], x[:, 3:].detach()
        tokens = torch.cat([q, rest], 1).split(pieces, 1)
        return torch.cat([layer(token, cache=cache) for token in tokens], 1).square().sum()

    expected = torch.func.grad(lambda x: in_pieces(x, (5,)))(x)
    assert torch.allclose(torch.func.grad(in_pieces)(x), expected, atol=1e-10)
    cross = Attention(8, 2).double().requires_grad_(False)
    memory = cross.remember(x)
    assert torch.func.jacrev(lambda x: cross(x, context=memory))(x).isfinite().all()


def test_functionalize_with_documents():
    q = torch.randn(1, 2, 600, 16)
    mask = Causal() & Documents(torch.arange(600)[None] // 100)
    out = torch.func.functionalize(lambda q: attend(q, q, q, mask=mask))(q)
    assert torch.allclose(out, attend(q, q, q, mask=mask), atol=1e-5)


@pytest.mark.parametrize("precision", ["strict", "fast"])
def test_fake_tensors_go_through_blocks(precision):
    mask = Causal() & SlidingWindow(64)
    with FakeTensorMode() as mode:
        q = mode.from_tensor(torch.zeros(1, 2, 300, 16, dtype=torch.bfloat16))
        out = attend(q, q, q, mask=mask, backend="blocked", precision=precision)
    assert out.shape == (1, 2, 300, 16)


def test_immediate_calls():
    x = torch.ones(2)
    assert is_immediate(x, torch.nn.Parameter(x))
    assert not is_immediate(x, torch.nn.parameter.UninitializedParameter())
    found = []
    torch.func.vmap(lambda y: found.append((is_immediate(x), is_concrete(y), is_vmapped())) or y)(x)
    torch.func.jvp(lambda y: found.append((is_immediate(x), is_concrete(x), is_vmapped())) or y,
                   (x,), (x,))  # fmt: skip
    assert found == [(False, False, True), (False, False, False)]
    with FlopCounterMode(display=False):
        assert not is_immediate(x)  # compiled kernels would not be counted
        assert is_concrete(x)
    with FakeTensorMode():
        assert not is_concrete(x)
    with TorchDispatchMode():
        assert not is_immediate(x)
    make_fx(lambda y: found.append(is_immediate(y)) or y, pre_dispatch=True)(x)
    assert found[-1] is False


def test_a_flop_counter_counts_decoding():
    q, k = torch.zeros(1, 32, 1, 64), torch.zeros(1, 8, 4096, 64)
    assert prepare(q, k, k).name == "fused"
    with FlopCounterMode(display=False) as counter:
        attend(q, k, k)
    assert counter.get_total_flops() == 2 * 2 * 32 * 4096 * 64


def test_inside_a_backward_pass():
    found = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda slope: found.append(in_backward()))
    assert not in_backward()
    x.sum().backward()
    assert found == [True]
