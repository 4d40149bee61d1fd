"""A step in compiled code: its output, and the tensors that are refused."""

import copy
import itertools

import pytest
import torch

pytest.importorskip("numba")

from regard import QuantizedCache
from regard.cache.quantized import streams_with_room
from regard.ops.kernels.encoding import codes_of
from regard.ops.kernels.stepping import Plan
from session import LONG


def reference(q, keys, values, scale):
    """Attention in float64, one head at a time."""
    out = torch.empty(*q.shape[:3], values.shape[-1], dtype=torch.float64)
    group = q.shape[1] // keys.shape[1]
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            k, v = keys[b, h // group].double(), values[b, h // group].double()
            weights = torch.softmax(scale * (k @ q[b, h, 0].double()), dim=0)
            out[b, h, 0] = weights @ v
    return out


STEPS = [  # dtype, widths of keys and of values: each has code of its own
    (torch.float32, 16, 16), (torch.bfloat16, 16, 16), (torch.float32, 8, 24),
    (torch.bfloat16, 80, 16),
]  # fmt: skip
if LONG:
    STEPS += [(torch.float32, 12, 4), (torch.bfloat16, 12, 4)]
    STEPS += [(dtype, 64, 32) for dtype in (torch.float32, torch.bfloat16)]
    STEPS += [(torch.bfloat16, 8, 24), (torch.float32, 80, 16)]


@pytest.mark.parametrize(("dtype", "width", "value_width"), STEPS)
@pytest.mark.parametrize("held", [0, 1, 30, 700])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_step_is_attention_over_what_is_held(dtype, width, value_width, held, threads):
    torch.set_num_threads(threads)
    q, k = torch.randn(2, 6, 1, width).to(dtype), torch.randn(2, 3, 1, width).to(dtype)
    v = torch.randn(2, 3, 1, value_width).to(dtype)
    keys = torch.randn(2, 3, 701, width).to(dtype)
    values = torch.randn(2, 3, 701, value_width).to(dtype)
    plan = Plan.of(dtype, 2, 6, 3, width, value_width)
    out = plan.run(q, k, v, keys, values, held, scale=0.3)
    keys, values = keys[:, :, : held + 1], values[:, :, : held + 1]
    assert keys[:, :, -1:].equal(k)
    assert values[:, :, -1:].equal(v)
    expected = reference(q, keys, values, 0.3)
    unit = torch.finfo(dtype).eps / 2
    largest = 0.3 * (q.double().abs().sum(-1).amax() * keys.double().abs().amax())
    bound = 1.5 * unit if dtype is torch.bfloat16 else 2 * unit * (1 + largest)
    assert (out.double() - expected).abs().amax() <= bound * values.abs().amax()
    assert out.dtype is dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("held", [1, 30, 300])
def test_keys_are_hidden_from_rows_of_the_batch(dtype, held):
    width, plan = 32, Plan.of(dtype, 2, 6, 3, 32, 32, biased=True)
    q, k, v = (torch.randn(2, heads, 1, width).to(dtype) for heads in (6, 3, 3))
    keys, values = torch.randn(2, 2, 3, 301, width).to(dtype)
    bias = torch.zeros(2, held + 1)
    bias[0, : held // 2 + 1] = -torch.inf
    bias[1, held // 3] = -torch.inf
    out = plan.run(q, k, v, keys, values, held, scale=0.3, bias=bias)
    found = keys[:, :, : held + 1], values[:, :, : held + 1]
    alone = [
        reference(q[i : i + 1], *(x[i : i + 1, :, bias[i] == 0] for x in found), 0.3)
        for i in range(2)
    ]
    unit = torch.finfo(dtype).eps / 2
    largest = 0.3 * (q.double().abs().sum(-1).amax() * keys.double().abs().amax())
    bound = 1.5 * unit if dtype is torch.bfloat16 else 2 * unit * (1 + largest)
    assert (out.double() - torch.cat(alone)).abs().amax() <= bound * values.abs().amax()


FORMATS = {
    "int8": {"bits": 8},
    "int4, groups of 6": {"bits": 4, "group": 6},
    "K8V4": {"format": "K8V4"},
    "K4V4": {"format": "K4V4", "group": 32},
    "K6V6": {"format": "K6V6"},
}


WIDTHS = [(80, 48), (64, 64)]  # the first are no multiples of a group
CODED = [
    (form, (torch.float32, torch.bfloat16)[at % 2], *WIDTHS[at % 2])
    for at, form in enumerate(FORMATS)
    if form != "K6V6"  # its kernels take 4 s to compile: the long run has it
]
if LONG:
    every = itertools.product(FORMATS, (torch.float32, torch.bfloat16), WIDTHS)
    CODED = [(form, dtype, *widths) for form, dtype, widths in every]


@pytest.mark.parametrize(("form", "dtype", "width", "value_width"), CODED)
def test_a_step_over_codes_writes_those_of_the_cache_and_attends_to_them(
    dtype, form, width, value_width
):
    """The codes may differ by one where a number lies between two: rotated sums are rounded."""
    cache = QuantizedCache(**FORMATS[form])
    cache.update(
        torch.randn(2, 3, 30, width).to(dtype), torch.randn(2, 3, 30, value_width).to(dtype)
    )
    q, k = torch.randn(2, 6, 1, width).to(dtype), torch.randn(2, 3, 1, width).to(dtype)
    v, twin = torch.randn(2, 3, 1, value_width).to(dtype), copy.deepcopy(cache)
    codes = codes_of(streams_with_room(cache))
    plan = Plan.of(dtype, 2, 6, 3, width, value_width, *codes)
    out = plan.run(q, k, v, *streams_with_room(cache), cache.length, scale=0.3)
    cache.count(1)
    (part,) = twin.update(k, v)
    for buffer, other in zip(cache.buffers, twin.buffers, strict=True):
        assert buffer[:, :, :30].equal(other[:, :, :30])
    for mine, other in zip(streams_with_room(cache), part.stored, strict=True):
        got, expected = (
            each._replace(rotation=()).to_tensor() for each in (mine.narrow(0, 31), other)
        )
        step = other.scales[..., ::2].float().amax()
        assert (got - expected).abs().amax() <= 2.01 * step  # a code, and a scale, one unit apart
    if form.startswith("int"):
        assert all(a.equal(b) for a, b in zip(cache.buffers, twin.buffers, strict=True))
    exact = [each.narrow(0, 31)._replace(dtype=torch.float64) for each in streams_with_room(cache)]
    expected = reference(q, *(each.to_tensor() for each in exact), 0.3)
    unit, keys = torch.finfo(dtype).eps / 2, exact[0].to_tensor()
    largest = 0.3 * (q.double().abs().sum(-1).amax() * keys.abs().amax())
    bound = 1.5 * unit if dtype is torch.bfloat16 else 2 * unit * (1 + largest)
    assert (out.double() - expected).abs().amax() <= bound * exact[1].to_tensor().abs().amax()
    assert out.dtype is dtype


def test_nothing_is_written_where_codes_are_not_those_of_the_plan():
    cache = QuantizedCache(bits=8)
    cache.update(torch.randn(2, 2, 3, 16), torch.randn(2, 2, 3, 16))
    tensors, before = given(), [each.clone() for each in cache.buffers]
    keys, values = streams_with_room(cache)
    plan = Plan.of(torch.float32, 2, 4, 2, 16, 16, *codes_of(streams_with_room(cache)))
    for other in (
        tensors["keys"],
        keys._replace(group=8),
        keys._replace(codes=keys.codes[:, :, :3]),
        keys._replace(scales=keys.scales[:, :, :3].contiguous()),
        keys._replace(scales=keys.scales.float()),
    ):
        assert plan.run(**{**tensors, "keys": other, "values": values}, length=3, scale=1.0) is None
    assert PLAN.run(**{**tensors, "keys": keys}, length=3, scale=1.0) is None
    assert all(x.equal(y) for x, y in zip(cache.buffers, before, strict=True))
    tensors.update(keys=keys, values=values)
    assert plan.run(**tensors, length=3, scale=1.0) is not None


PLAN = Plan.of(torch.float32, 2, 4, 2, 16, 16)


def given():
    """The tensors of a step; slot 3 of buffers of 5 is the next."""
    q, k, v = (torch.randn(2, heads, 1, 16) for heads in (4, 2, 2))
    return {
        "q": q,
        "k": k,
        "v": v,
        "keys": torch.randn(2, 2, 5, 16),
        "values": torch.randn(2, 2, 5, 16),
    }


OTHERS = {
    "another dtype": torch.Tensor.double,
    "another device": lambda x: x.to("meta"),
    "another width": lambda x: torch.cat([x, x], -1),
    "another batch": lambda x: torch.cat([x, x]),
    "columns with a stride": lambda x: torch.stack([x, x], -1)[..., 0],
    "a lazy minus sign": torch._neg_view,
    "a subclass": lambda x: x.as_subclass(type("Mine", (torch.Tensor,), {})),
}
BUFFERS = {
    "rows that share their memory": lambda x: x[:1].expand(2, -1, -1, -1),
    "no room": lambda x: x[:, :, :3].contiguous(),
    "other axes": lambda x: x[0],
    "a part of a tensor": lambda x: torch.cat([x, x], 2)[:, :, :5],
}


@pytest.mark.parametrize(
    ("name", "other"),
    [
        *((name, other) for name in ("q", "k", "v", "keys", "values") for other in OTHERS),
        *((name, other) for name in ("keys", "values") for other in BUFFERS),
    ],
)
def test_nothing_is_written_where_a_tensor_cannot_be_read(name, other):
    tensors = given()
    before = {each: x.clone() for each, x in tensors.items()}
    changed = {**tensors, name: {**OTHERS, **BUFFERS}[other](tensors[name])}
    assert PLAN.run(**changed, length=3, scale=1.0) is None
    assert all(x.equal(before[each]) for each, x in tensors.items())
    assert PLAN.run(**tensors, length=3, scale=1.0) is not None


def test_full_buffers_are_not_written_beyond_their_end():
    assert PLAN.run(**given(), length=5, scale=1.0) is None


ANGLES = {
    "another dtype": lambda cos, sin: (cos.double(), sin.double()),
    "sines of another dtype": lambda cos, sin: (cos, sin.bfloat16()),
    "sines of another shape": lambda cos, sin: (cos, sin[:6]),
    "too wide": lambda cos, sin: (cos.repeat(5), sin.repeat(5)),
    "an odd number": lambda cos, sin: (cos[:7], sin[:7]),
    "columns with a stride": lambda cos, sin: (cos[::2], sin[::2]),
    "strides that differ": lambda cos, sin: (cos[:4], sin[::2]),
    "other rows": lambda cos, sin: (cos.expand(3, 1, 8), sin.expand(3, 1, 8)),
    "several positions": lambda cos, sin: (cos.expand(1, 2, 8), sin.expand(1, 2, 8)),
    "a subclass": lambda cos, sin: (cos, sin.as_subclass(type("Mine", (torch.Tensor,), {}))),
}


@pytest.mark.parametrize("other", ANGLES.values(), ids=ANGLES)
def test_nothing_is_written_where_angles_cannot_be_read(other):
    tensors, angles = given(), (torch.randn(8), torch.randn(8))
    before = tensors["keys"].clone()
    assert PLAN.run(**tensors, length=3, angles=other(*angles), scale=1.0) is None
    assert tensors["keys"].equal(before)
    assert PLAN.run(**tensors, length=3, angles=angles, scale=1.0) is not None
