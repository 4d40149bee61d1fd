"""Layers whose heads are split: outputs, all gradients and bytes, against one device."""

import pytest
import torch

from ranks import on_ranks
from regard import NO_ROPE, GroupedQueryAttention
from regard.distributed.tensor.layers import kind_of, layout_of, objection
from regard.masks import EVERYTHING
from session import LONG
from split_layers import (
    LAYERS,
    attention,
    drawn,
    inputs,
    largest_error,
    latent,
    options_of,
    split_step,
    step,
)


def _steps(mesh, names, batch):
    return [
        split_step(mesh, drawn(LAYERS[name][0]), inputs(batch)[:batch], **options_of(name))
        for name in names
    ]


@pytest.mark.parametrize("number", [2, 3, 4])
def test_outputs_gradients_and_bytes(number):
    shares = {2: slice(0, None, 2), 3: slice(0, None, 3), 4: slice(1, None, 2)}
    names = list(LAYERS)[slice(None) if LONG else shares[number]]
    judged = {name: step(drawn(LAYERS[name][0]), inputs(), **options_of(name)) for name in names}
    for results in on_ranks(number, _steps, names, 2):
        for (name, expected), (out, grads, sent, planned) in zip(
            judged.items(), results, strict=True
        ):
            assert sent == planned, f"{name}: sent {sent} bytes, planned {planned}"
            errors = largest_error((out, grads), expected)
            assert max(errors.values()) < 1e-12, f"{name} on {number}: {errors}"


@pytest.mark.parametrize("number", [2, 3, 4] if LONG else [3])
def test_a_batch_of_one(number):
    names = [name for name, (_, mask) in LAYERS.items() if mask is None]
    judged = [step(drawn(LAYERS[name][0]), inputs(1)) for name in names]
    for results in on_ranks(number, _steps, names, 1):
        for expected, (out, grads, *_) in zip(judged, results, strict=True):
            assert max(largest_error((out, grads), expected).values()) < 1e-12


def _cross():
    plain = {"rope": NO_ROPE, "mask": EVERYTHING, "context_size": 7, "bias": True, "gate": "head"}
    kinds = (("head", 3), ("width", 2), (None, 6))
    return [drawn(attention(6, heads, qk_norm=norm, **plain)) for norm, heads in kinds]


def _cross_steps(mesh):
    results, context = [], inputs(2, 3, 7)
    for layer in _cross():
        results.append(split_step(mesh, layer, inputs(), context=context))
        encoded = context.clone().requires_grad_()
        out = layer(inputs(), context=layer.remember(encoded))
        out.sum().backward()
        results[-1] += ((out.detach(), encoded.grad),)
    return results


@pytest.mark.parametrize("number", [2, 3, 4])
def test_cross_attention_and_memories(number):
    judged, context = [], inputs(2, 3, 7)
    for layer in _cross():
        one = step(layer, inputs(), context=context)
        encoded = context.clone().requires_grad_()
        out = layer(inputs(), context=layer.remember(encoded))
        out.sum().backward()
        judged.append((one, out.detach(), encoded.grad))
    for results in on_ranks(number, _cross_steps):
        for (one, out, grad), (mine, grads, sent, planned, remembered) in zip(
            judged, results, strict=True
        ):
            assert sent == planned
            assert max(largest_error((mine, grads), one).values()) < 1e-12
            torch.testing.assert_close(remembered[0], out, rtol=0, atol=1e-12)
            torch.testing.assert_close(remembered[1], grad, rtol=0, atol=1e-11)


HALF = ["mha odd", "gqa width", "mqa many", "mla", "mla queries", "latent kv"]


def _half(mesh, dtype):
    found = []
    for name in HALF:
        layer, x = drawn(LAYERS[name][0], dtype), inputs().to(dtype)
        found.append(split_step(mesh, layer, x, **options_of(name))[:2])
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision(dtype):
    """Outputs within twice, gradients within 5 (float32) or 3 times the error of one device; and
    of errors below the unit roundoff, within it."""
    unit, most = torch.finfo(dtype).eps / 2, 3 if dtype is torch.bfloat16 else 5
    for results in on_ranks(2, _half, dtype):
        for name, mine in zip(HALF, results, strict=True):
            options, x = options_of(name), inputs().to(dtype)
            layer = drawn(LAYERS[name][0], dtype)
            one = step(layer, x, **options)
            layer.zero_grad()
            judged = step(layer.double(), x.double(), **options)
            error, plain = largest_error(mine, judged), largest_error(one, judged)
            assert error.pop("output") <= 2 * max(plain.pop("output"), unit), name
            for each in error:
                assert error[each] <= most * max(plain[each], unit), (name, each)


def test_layouts_and_objections():
    assert layout_of(GroupedQueryAttention(64, 8, 2), 4).replicas == 2
    assert layout_of(latent(5)(), 2).local_heads == 3
    assert kind_of(torch.nn.Linear(2, 2)) is None
    assert objection(GroupedQueryAttention(64, 8, 2), 4) is None
    layer = attention(3, 3, qk_norm="head", norm_eps=0.0)()
    assert objection(layer, 3) is None
    assert "eps=0 and would divide by the zeros of padding heads" in objection(layer, 2)
    hooked = attention(4, 4)()
    hooked.v_proj.register_forward_hook(lambda *a: None)
    assert "v_proj has forward hooks" in objection(hooked, 2)
    wide = attention(4, 4, qk_norm="width")()
    wide.k_norm = torch.nn.LayerNorm(16)
    assert "is no nn.RMSNorm" in objection(wide, 2)
    learned = attention(4, 4)()
    learned.score_bias = torch.nn.Linear(2, 2)
    assert "score_bias is a Linear with parameters" in objection(learned, 2)
