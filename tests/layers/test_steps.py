"""A layer's decoding steps in compiled code compute what the operators do, where they may run."""

import copy
import multiprocessing.reduction

import pytest
import torch
from torch import nn

pytest.importorskip("numba")

import regard.layers.attention as attention
from regard import (
    Attention,
    Causal,
    KVCache,
    MultiHeadAttention,
    Padding,
    Rotary,
    SlidingWindow,
    StaticCache,
)
from regard.layers import steps
from regard.layers.cache_use import step_of
from regard.rope import Yarn

LAYERS = {
    "MHA of 8": {"num_heads": 4},
    "GQA, halves": {"num_heads": 4, "num_kv_heads": 2, "rope": Rotary(8)},
    "MQA, pairs": {"num_heads": 4, "num_kv_heads": 1, "rope": Rotary(8, pairing="pairs")},
    "part of the head": {"num_heads": 2, "rope": Rotary(6)},
    "scaled": {
        "num_heads": 2,
        "rope": Rotary(16, scaling=Yarn(4.0, original_max_position=8)),
    },
    "norms": {"num_heads": 2, "qk_norm": "head", "rope": Rotary(16)},
    "gate": {"num_heads": 2, "gate": "channel"},
    "window": {"num_heads": 2, "mask": Causal() & SlidingWindow(20)},
    "biases": {"num_heads": 2, "bias": True},
}


@pytest.fixture
def taken(monkeypatch):
    """The steps that have been taken."""
    found, forward = [], steps.LayerStep.forward
    monkeypatch.setattr(
        steps.LayerStep, "forward", lambda *given: found.append(1) or forward(*given)
    )
    return found


def assert_same(out, expected):
    """Equal up to rounding: what is tested is that a step notices a change, which is far larger."""
    assert torch.allclose(out, expected, atol=1e-6)


def plainly(monkeypatch, run):
    """The result without steps."""
    with monkeypatch.context() as patched:
        patched.setattr(attention, "repeated_step", lambda *given: None)
        return run()


def decoded(layer, x, cache, first, stop):
    """The outputs of some tokens, one after the other."""
    return torch.cat([layer(x[:, i : i + 1], cache=cache) for i in range(first, stop)], 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [KVCache, lambda: StaticCache(60)], ids=["growing", "static"])
@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
def test_steps_are_as_exact_as_a_plain_layer(options, make, dtype, taken):
    """The numeric contract of layers: at most twice the error of a plain layer of the dtype."""
    layer = Attention(32, **{"mask": Causal()} | options).to(dtype)
    x, cache = torch.randn(2, 40, 32).to(dtype), make()
    with torch.no_grad():
        outs = [layer(x[:, :7], cache=cache)]
        outs += [layer(x[:, i : i + 1], cache=cache) for i in range(7, 40)]
        plain = copy.deepcopy(layer)
        plain.backend = "eager"
        exact = copy.deepcopy(plain).double()(x.double())
        allowed = 2 * (plain(x) - exact).abs().amax()
    assert len(taken) >= 11
    assert cache.length == 40
    assert (torch.cat(outs, 1) - exact).abs().amax() <= allowed


@pytest.fixture
def stepping():
    """A layer and a cache whose next call is a step."""
    layer, cache = Attention(32, 2, rope=Rotary(16), mask=Causal()), KVCache()
    with torch.no_grad():
        layer(torch.randn(1, 5, 32), cache=cache)
        layer(torch.randn(1, 1, 32), cache=cache)
        assert step_of(cache, layer) is not None
    return layer, cache, torch.randn(1, 1, 32)


CHANGES = {
    "mask": lambda layer: setattr(layer, "mask", Causal() & SlidingWindow(3)),
    "rope": lambda layer: setattr(layer, "rope", Rotary(16, theta=5.0)),
    "scale": lambda layer: setattr(layer, "scale", 3.0),
    "softcap": lambda layer: setattr(layer, "softcap", 0.1),
    "score_bias": lambda layer: setattr(layer, "score_bias", torch.full((2, 1, 1), 2.0)),
    "sinks": lambda layer: setattr(layer, "sinks", nn.Parameter(torch.ones(2))),
    "backend": lambda layer: setattr(layer, "backend", "eager"),
    "weights": lambda layer: layer.load_state_dict(
        {name: 2 * each for name, each in layer.state_dict().items()}
    ),
    "a hook": lambda layer: layer.k_proj.register_forward_hook(lambda *given: 3 * given[-1]),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_changed_layer_computes_as_it_says(stepping, change, monkeypatch):
    layer, cache, x = stepping
    change(layer)
    with torch.no_grad():
        twin = copy.deepcopy(cache)
        expected = plainly(monkeypatch, lambda: layer(x, cache=twin))
        assert_same(layer(x, cache=cache), expected)


def test_a_changed_call_is_described_anew(stepping, taken, monkeypatch):
    layer, cache, x = stepping
    valid = torch.tensor([[False] + 6 * [True]])
    calls = [
        {"positions": torch.tensor([9])},
        {"mask": Padding(valid)},
        {"mask": SlidingWindow(2)},
    ]
    with torch.no_grad():
        for given in calls:
            twin, again = copy.deepcopy(cache), copy.deepcopy(cache)
            expected = plainly(
                monkeypatch, lambda given=given, again=again: layer(x, cache=again, **given)
            )
            assert layer(x, cache=twin, **given).equal(expected)
    out = layer(x, cache=cache)
    assert not taken
    assert out.requires_grad


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_modes_without_gradients_take_steps(stepping, taken, context):
    layer, cache, x = stepping
    with context():
        layer(x, cache=cache)
    assert taken


def test_dispatch_modes_see_every_operator(stepping, taken):
    from torch.utils.flop_counter import FlopCounterMode

    layer, cache, x = stepping
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        layer(x, cache=cache)
    assert not taken
    assert counter.get_total_flops() >= 4 * 2 * 32 * 32


def test_observers_see_every_call(stepping, taken):
    from regard.ops.observed import backends_run, calls_run

    layer, cache, x = stepping
    seen = []
    with torch.no_grad():
        with calls_run(lambda *call: seen.append(call)):
            layer(x, cache=cache)
        with backends_run() as ran:
            layer(x, cache=cache)
        assert not taken
        layer(x, cache=cache)
    assert len(seen) == 1
    assert sum(ran.values()) == 1
    assert len(taken) == 1


def test_a_failing_call_leaves_the_cache_as_it_was(stepping, taken):
    layer, cache, x = stepping

    def fail(*given):
        raise RuntimeError("on purpose")

    handle = layer.o_proj.register_forward_hook(fail)
    with torch.no_grad():
        with pytest.raises(RuntimeError, match="on purpose"):
            layer(x, cache=cache)
        assert cache.length == 6
        handle.remove()
        layer(x, cache=cache)
    assert cache.length == 7
    assert len(taken) == 2


def test_wrong_inputs_get_the_layers_own_errors(stepping):
    layer, cache, x = stepping
    with torch.no_grad():
        with pytest.raises(ValueError, match="is 32 wide"):
            layer(torch.randn(1, 1, 31), cache=cache)
        with pytest.raises(ValueError, match=r"\.to\(dtype\)"):
            layer(x.bfloat16(), cache=cache)
        with pytest.raises(ValueError, match="another layer"):
            MultiHeadAttention(32, 2, mask=Causal())(x, cache=cache)
        layer.double()
        with pytest.raises(ValueError, match=r"\.to\(dtype\)"):
            layer(x, cache=cache)
    assert cache.length == 6


def test_projections_may_be_any_module(taken):
    layer, cache = Attention(32, 2, mask=Causal()), KVCache()
    layer.q_proj = nn.Sequential(layer.q_proj, nn.Identity())  # has no weight of its own
    x = torch.randn(1, 9, 32)
    with torch.no_grad():
        outs = [layer(each, cache=cache) for each in x.split([5, 1, 1, 1, 1], dim=1)]
        assert_same(torch.cat(outs, 1), layer(x))
    assert len(taken) == 3


def test_inputs_elsewhere_get_the_layers_own_error(stepping):
    layer, cache, x = stepping
    with torch.no_grad(), pytest.raises(ValueError, match="on meta"):
        layer(x.to("meta"), cache=cache)


def test_static_caches_are_full_when_they_are(taken):
    layer, cache = Attention(32, 2, mask=Causal()), StaticCache(8)
    with torch.no_grad():
        layer(torch.randn(1, 5, 32), cache=cache)
        for _ in range(3):
            layer(torch.randn(1, 1, 32), cache=cache)
        with pytest.raises(ValueError, match="max_length=8"):
            layer(torch.randn(1, 1, 32), cache=cache)
    assert len(taken) == 2


def test_a_cache_that_was_cut_or_reordered_goes_on(stepping, monkeypatch):
    layer, cache, x = stepping
    with torch.no_grad():
        cache.truncate(3)
        twin = copy.deepcopy(cache)
        expected = plainly(monkeypatch, lambda: layer(x, cache=twin))
        assert_same(layer(x, cache=cache), expected)
        cache.reorder(torch.tensor([0, 0]))
        twin, two = copy.deepcopy(cache), x.expand(2, -1, -1)
        expected = plainly(monkeypatch, lambda: layer(two, cache=twin))
        assert_same(layer(two, cache=cache), expected)


def test_rows_that_were_cut_to_lengths_of_their_own_are_no_step(stepping, taken, monkeypatch):
    layer, _, _ = stepping
    cache, x = KVCache(), torch.randn(2, 1, 32)
    with torch.no_grad():
        layer(torch.randn(2, 5, 32), cache=cache)
        layer(x, cache=cache)
        cache.truncate(torch.tensor([3, 6]))
        twin = copy.deepcopy(cache)
        expected = plainly(monkeypatch, lambda: layer(x, cache=twin))
        assert_same(layer(x, cache=cache), expected)
    assert not taken


def test_gradients_before_and_after_steps(stepping):
    """A prompt with gradients, then steps without, then gradients again."""
    layer, _, x = stepping
    cache = KVCache()
    layer(torch.randn(1, 4, 32), cache=cache)
    with torch.no_grad():
        layer(x, cache=cache)
        layer(x, cache=cache)
    out = layer(x, cache=cache)
    out.sum().backward()
    assert layer.q_proj.weight.grad is not None
    assert cache.length == 7


def each_buffer(change):
    return lambda cache: [change(each) for each in cache.buffers]


MOVES = {
    "sent to another process": multiprocessing.reduction.ForkingPickler.dumps,
    "shared": each_buffer(torch.Tensor.share_memory_),
    "data": each_buffer(lambda x: setattr(x, "data", x.data.clone())),
    "set_": each_buffer(lambda x: x.set_(x.clone())),
    "swapped": each_buffer(lambda x: torch.utils.swap_tensors(x, x.clone())),
    "other strides": each_buffer(lambda x: setattr(x, "data", x.mT.contiguous().mT)),
    "more room": each_buffer(lambda x: setattr(x, "data", torch.cat([x, x + 7], 2))),
    "a lazy minus sign": each_buffer(lambda x: setattr(x, "data", torch._neg_view(-x))),
}


@pytest.mark.parametrize("make", [KVCache, lambda: StaticCache(300)], ids=["growing", "static"])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_buffers_may_move_between_two_steps(move, batch, make):
    """Memory that was freed is filled with numbers that no result may contain."""
    layer, cache = Attention(32, 4, num_kv_heads=2, rope=Rotary(8), mask=Causal()), make()
    x = torch.randn(batch, 10, 32)
    with torch.no_grad():
        expected = layer(x)
        layer(x[:, :5], cache=cache)
        decoded(layer, x, cache, 5, 7)
        move(cache)
        others = [torch.full((1 << size,), 7e30) for size in range(6, 16)]
        assert_same(decoded(layer, x, cache, 7, 10), expected[:, 7:])
    assert all((each == 7e30).all() for each in others)


def test_buffers_that_share_their_rows_are_refused_as_by_the_plain_layer():
    layer, cache = Attention(32, 2, rope=Rotary(16), mask=Causal()), KVCache()
    with torch.no_grad():
        layer(torch.randn(2, 5, 32), cache=cache)
        layer(torch.randn(2, 1, 32), cache=cache)
        each_buffer(lambda x: setattr(x, "data", x[:1].expand_as(x)))(cache)
        with pytest.raises(RuntimeError, match="single memory location"):
            layer(torch.randn(2, 1, 32), cache=cache)
    assert cache.length == 6


class Mine(torch.Tensor):
    """A tensor subclass."""


class Transposing(nn.Module):
    """A projection as `weight @ columns`, whose result has the strides of a transposed matrix."""

    def __init__(self, linear):
        super().__init__()
        self.weight = linear.weight

    def forward(self, x):
        return (self.weight @ x.flatten(0, 1).T).T.unflatten(0, x.shape[:2])


def hooked(change):
    """A module whose result is changed."""

    def wrap(module):
        module.register_forward_hook(lambda _, __, out: change(out))
        return module

    return wrap


RETURNED = {
    "transposed": Transposing,
    "every other column": hooked(lambda x: torch.stack([x, x + 9], -1)[..., 0]),
    "a part of memory": hooked(lambda x: torch.cat([x + 9, x], -1)[..., x.shape[-1] :]),
    "expanded": hooked(lambda x: x[:1].expand_as(x)),
    "a lazy minus sign": hooked(lambda x: torch._neg_view(-x)),
    "a subclass": hooked(lambda x: x.as_subclass(Mine)),
    "a parameter": hooked(nn.Parameter),
}


@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj", "gate_proj", "o_proj"])
@pytest.mark.parametrize("change", RETURNED.values(), ids=RETURNED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_modules_may_return_any_tensor(name, change, dtype, monkeypatch):
    """Before the first step, and between two; each module is called once for each token."""
    layer = Attention(32, 4, num_kv_heads=2, rope=Rotary(8), mask=Causal(), gate="channel")
    layer, x, cache, calls = layer.to(dtype), torch.randn(2, 12, 32).to(dtype), KVCache(), []
    with torch.no_grad():
        layer(x[:, :5], cache=cache)
        decoded(layer, x, cache, 5, 7)
        setattr(layer, name, change(getattr(layer, name)))
        twin = copy.deepcopy(cache)
        expected = plainly(monkeypatch, lambda: decoded(layer, x, twin, 7, 12))
        layer.q_proj.register_forward_hook(lambda *_: calls.append(1))
        got = decoded(layer, x, cache, 7, 12)
    assert len(calls) == 5
    atol = 1e-6 if dtype is torch.float32 else 2e-2
    assert torch.allclose(
        got.as_subclass(torch.Tensor), expected.as_subclass(torch.Tensor), atol=atol
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (torch.Tensor.double, "q, k and v have one dtype"),
        (lambda x: torch.cat([x, x], 0), "one batch size"),
        (lambda x: torch.cat([x, x], -1), "same heads and keys"),
    ],
)
def test_projections_of_another_shape_get_the_layers_own_error(
    stepping, unchecked, change, message
):
    layer, cache, x = stepping
    layer.v_proj.register_forward_hook(lambda _, __, out: change(out))
    with torch.no_grad(), pytest.raises(ValueError, match=message):
        layer(x, cache=cache)
    assert cache.length == 6
