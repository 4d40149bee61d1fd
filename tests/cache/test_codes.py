"""Products with quantised tensors equal products with their values; codes stay codes."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from regard import (
    Causal,
    Padding,
    Part,
    QuantizedCache,
    attend,
)
from regard.cache.codes import (
    NIBBLES,
    QuantizedStream,
    bytes_of,
    dequantize,
    quantize,
    quantize_channels,
    unpacked,
)
from regard.cache.parts import Streams
from regard.cache.rotation import hadamard
from regard.ops.attend import prepare

BY_CHANNEL = 0  # in place of a group
UNIT = torch.finfo(torch.float32).eps / 2
SIZES = [
    (8, 4, 8), (8, 4, 10), (4, 4, 7), (4, 8, 20), (8, 64, 64), (4, 32, 33), (6, 4, 7), (6, 64, 70),
    (4, BY_CHANNEL, 7), (6, BY_CHANNEL, 40), (8, BY_CHANNEL, 5),
]  # fmt: skip


def quantized(bits, group, width, tokens=9, offset=0.0, dtype=torch.float32):
    """A stream of codes; `BY_CHANNEL`, tokens 1 to 10 of three runs of 4."""
    x = torch.randn(2, 3, tokens, width) + offset
    if group == BY_CHANNEL:
        whole = torch.cat([x.new_zeros(2, 3, 1, width), x, x[:, :, :2]], 2)
        stored = quantize_channels(whole, bits, 4)
        return QuantizedStream(*stored, bits, 1, width, dtype, run=4).narrow(1, tokens)
    return QuantizedStream(*quantize(x, bits, group), bits, group, width, dtype)


@pytest.mark.parametrize("offset", [0.0, 5.0])
@pytest.mark.parametrize(("bits", "group", "width"), SIZES)
def test_products_with_codes_equal_products_with_values(bits, group, width, offset, monkeypatch):
    monkeypatch.setattr("regard.cache.codes._BLOCK", 4)
    stream, rows = quantized(bits, group, width, offset=offset), torch.randn(2, 3, 5, width)
    values = stream.to_tensor().double()
    wanted = rows.double() @ values.mT
    sizes = rows.double().abs() @ (values.abs() + values.abs().amax(-1, keepdim=True)).mT
    assert ((stream.product(rows).double() - wanted).abs() <= 4 * UNIT * width**0.5 * sizes).all()
    weights = torch.rand(2, 3, 5, 9).softmax(-1)
    error = (stream.weighted_sum(weights).double() - weights.double() @ values).abs()
    assert error.max() <= 16 * UNIT * values.abs().max()


@pytest.mark.parametrize("group", [4, BY_CHANNEL])
def test_narrow_takes_some_of_the_tokens(group):
    stream = quantized(8, group, 10)
    assert stream.narrow(2, 5).to_tensor().equal(stream.to_tensor()[:, :, 2:7])
    both = Part(0, 9, Streams([stream, torch.arange(9).view(1, 1, 9, 1)])).narrow(3, 5).streams
    assert both[0].equal(stream.to_tensor()[:, :, 3:5])
    assert both[-1].flatten().tolist() == [3, 4]
    assert len(both[:]) == 2


def test_narrow_compiles_with_lengths_that_are_not_constants():
    cache = QuantizedCache(8, 4)
    (part,) = cache.update(torch.randn(1, 1, 9, 8), torch.randn(1, 1, 9, 8))

    def values(start):
        return part.stored[0].narrow(start, 3).to_tensor()

    compiled = torch.compile(values, backend="eager", fullgraph=True, dynamic=True)
    for start in (2, 5, 6):
        assert compiled(start).equal(values(start))


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"sinks": True}, {"bias": True}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoding_over_codes_is_attention_over_the_values(options, dtype):
    cache, k, v = QuantizedCache(group=4), torch.randn(2, 2, 11, 8), torch.randn(2, 2, 11, 6)
    q = torch.randn(2, 6, 1, 8).to(dtype)
    cache.update(k[:, :, :10].to(dtype), v[:, :, :10].to(dtype))
    span = cache.span(1)
    parts = cache.update(k[:, :, 10:].to(dtype), v[:, :, 10:].to(dtype))
    given = {"softcap": options.get("softcap")}
    if "sinks" in options:
        given["sinks"] = torch.randn(6)
    if "bias" in options:
        given["score_bias"] = torch.randn(6, 1, 11)
    valid = torch.ones(2, 11, dtype=torch.bool)
    valid[0, :4] = False
    given["mask"] = Causal() & Padding(valid)
    assert isinstance(parts[0].streams, Streams)
    call = prepare(q, k[:, :, 10:].to(dtype), v[:, :, 10:].to(dtype), span=span, **given)
    forced = prepare(
        q, k[:, :, 10:].to(dtype), v[:, :, 10:].to(dtype), span=span, backend="grouped", **given
    )
    wanted = attend(q, *parts[0].streams, span=span, backend="eager", **given)
    bound = {"rtol": 0, "atol": 3e-6 if dtype == torch.float32 else 2e-2}
    torch.testing.assert_close(call.run(q, parts), wanted, **bound)
    torch.testing.assert_close(forced.run(q, parts), wanted, **bound)


class Largest(TorchDispatchMode):
    """Measures the largest floating-point tensor that is made, in elements."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = out if isinstance(out, (tuple, list)) else (out,)
        for each in made:
            if isinstance(each, torch.Tensor) and each.is_floating_point():
                self.size = max(self.size, each.numel())
        return out


def test_decoding_does_not_dequantise_the_whole_cache(monkeypatch):
    monkeypatch.setattr("regard.cache.codes._BLOCK", 64)
    cache, tokens = QuantizedCache(), 1024
    cache.update(*[torch.randn(1, 2, tokens, 64) for _ in range(2)])
    q, new = torch.randn(1, 4, 1, 64), torch.randn(1, 2, 1, 64)
    call = prepare(q, new, new, span=cache.span(1), backend="grouped")
    with Largest() as largest:
        call.run(q, cache.update(new, new))
    assert largest.size <= 2 * 64 * 64


def test_joined_latents_are_read_as_codes():
    """One stream of keys, whose first columns are the values, as in absorbed MLA."""
    cache, joined = QuantizedCache(group=4), torch.randn(1, 1, 9, 12)
    parts = cache.update(joined)
    q = torch.randn(1, 4, 1, 12)
    span = cache.span(0)
    call = prepare(q[:, :, :1], joined, joined[..., :8], span=type(span)(8, 9, 0, 9),
                   backend="grouped")  # fmt: skip
    values = parts[0].streams[0]
    wanted = attend(q, values, values[..., :8], span=type(span)(8, 9, 0, 9), backend="eager")
    torch.testing.assert_close(call.run(q, parts), wanted, atol=2e-6, rtol=0)


@pytest.mark.parametrize("bits", [8, 6, 4])
@pytest.mark.parametrize("width", [1, 6, 64, 65])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_error_of_a_quantised_value_is_at_most_half_a_step(bits, width, dtype):
    x = (torch.randn(2, 3, 5, width) * torch.rand(2, 3, 5, 1) * 10 + 3).to(dtype)
    group = 16
    codes, scales = quantize(x, bits, group)
    back = dequantize(codes, scales, bits, group, width)
    step = scales[..., 0::2].float().repeat_interleave(group, -1)[..., :width]
    allowed = step * 0.5 * (1 + 2**-12) + x.float().abs() * 2**-22  # and float32's own rounding
    assert ((back - x.float()).abs() <= allowed).all()


@pytest.mark.parametrize("bits", [8, 6, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_channel_of_a_run_has_a_scale_of_its_own(bits, dtype):
    """Half a step of the run's range, whatever other channels and runs hold."""
    x = torch.randn(2, 3, 10, 7) + 5
    x[..., 2] *= 1000
    x[:, :, 5:] /= 100
    x = x.to(dtype)
    codes, scales = quantize_channels(x, bits, 5)
    assert codes.shape == (2, 3, 10, bytes_of(7, bits)) and scales.shape == (2, 3, 2, 14)
    back = QuantizedStream(codes, scales, bits, 1, 7, torch.float32, run=5).to_tensor()
    runs = x.float().view(2, 3, 2, 5, 7)
    low, high = runs.amin(3, keepdim=True), runs.amax(3, keepdim=True)
    step = (high - low + low.abs() * 2**-7) * (1 + 2**-7) / (2**bits - 1)
    error = (back.view_as(runs) - runs).abs()
    assert (error <= step * 0.5 * (1 + 2**-12) + runs.abs() * 2**-22).all()


def test_constant_and_zero_groups_are_exact():
    for value in (0.0, 3.5, -2.0):
        x = torch.full((1, 1, 2, 8), value)
        assert torch.equal(dequantize(*quantize(x, 8, 8), 8, 8, 8), x)


@pytest.mark.parametrize("width", [1, 7, 16, 31, 32, 48, 65, 128])
def test_4_bit_codes_are_stored_in_halves_of_bytes(width):
    """Byte i of 32 channels holds channels i and i + 16; of a rest, i and i + half of it."""
    x = torch.randint(0, 16, (1, 2, 3, width)).float()
    x[..., 0], x[..., -1] = 0.0, 15.0  # scale 1, zero 0
    codes, _ = quantize(x, 4, 256)
    rest = width % (2 * NIBBLES)
    half = (rest + 1) // 2
    for channel in range(width if width > 1 else 0):
        step, at = divmod(channel, 2 * NIBBLES)
        size = half if step == width // (2 * NIBBLES) else NIBBLES
        byte = codes[..., NIBBLES * step + at % size]
        wanted = byte >> 4 if at >= size else byte & 15
        assert wanted.equal(x[..., channel].to(torch.uint8))
    assert unpacked(codes, width, 4).shape[-1] == width


def bits_at(codes, width, channel):
    """The bytes and shifts of the low 4 bits and of the high 2 bits of a channel's 6-bit code."""
    step, at = divmod(channel, 32)
    n = min(32, width - 32 * step)
    half, quarter = (n + 1) // 2, (n + 3) // 4
    low, high = 24 * step + at % half, 24 * step + half + at % quarter
    return codes[..., low] >> 4 * (at // half) & 15, codes[..., high] >> 2 * (at // quarter) & 3


@pytest.mark.parametrize("width", [1, 2, 3, 5, 7, 16, 31, 32, 33, 48, 65, 128])
def test_6_bit_codes_are_stored_as_4_bits_and_2_bits(width):
    """Of 32 channels, 16 bytes hold their low 4 bits, as 4-bit codes; then 8 bytes hold the high 2
    bits of channels i, i + 8, i + 16 and i + 24 each."""
    x = torch.randint(0, 64, (1, 2, 3, width)).float()
    x[..., 0], x[..., -1] = 0.0, 63.0  # scale 1, zero 0
    codes, _ = quantize(x, 6, 256)
    rest = width % 32
    assert codes.shape[-1] == bytes_of(width, 6)
    assert codes.shape[-1] == width // 32 * 24 + (rest + 1) // 2 + (rest + 3) // 4
    for channel in range(width if width > 1 else 0):
        low, high = bits_at(codes, width, channel)
        assert (low | high << 4).equal(x[..., channel].to(torch.uint8))
    wanted = x.to(torch.uint8) if width > 1 else torch.zeros_like(x, dtype=torch.uint8)
    assert unpacked(codes, width, 6).equal(wanted)


@pytest.mark.parametrize("bits", [8, 6, 4])
def test_so_many_bytes_are_codes(bits):
    for width in range(1, 100):
        assert quantize(torch.randn(2, width), bits, 64)[0].shape[-1] == bytes_of(width, bits)


@pytest.mark.parametrize("rotation", [(8,), (4, 4), (8, 2)])
@pytest.mark.parametrize("bits", [6, 4])
def test_values_of_a_rotated_stream_are_rotated_back(rotation, bits):
    x = torch.randn(1, 2, 5, 10)
    codes, scales = quantize(hadamard(x, rotation), bits, 64)
    stream = QuantizedStream(codes, scales, bits, 64, 10, torch.float32, rotation)
    values = stream._replace(rotation=()).to_tensor()
    assert stream.to_tensor().equal(hadamard(values, rotation))
    step = scales[..., 0::2].float()
    error = (stream.to_tensor() - x).norm(dim=-1)  # a rotation preserves lengths
    assert (error <= 0.51 * step[..., 0] * 10**0.5).all()
    assert stream.narrow(1, 3).to_tensor().allclose(stream.to_tensor()[:, :, 1:4])


def test_keys_and_values_are_quantised_together_as_apart():
    """Few tokens of the same shape take half as many operators together."""
    k, v, wide = torch.randn(2, 3, 5, 64), torch.randn(2, 3, 5, 64), torch.randn(2, 3, 5, 66)
    together, apart = QuantizedCache(4), QuantizedCache(4)
    both, one = (cache.update(k, x)[0] for cache, x in ((together, v), (apart, wide)))
    assert torch.equal(both.streams[0], one.streams[0])
    assert torch.equal(both.streams[1], QuantizedCache(4).update(v)[0].streams[0])


def test_outlines_have_the_shapes_and_dtypes_of_the_values():
    cache = QuantizedCache(4, group=6)
    (part,) = cache.update(torch.randn(2, 3, 5, 33).bfloat16(), torch.zeros(2, 1, 5, 1).int())
    for outline, stream in zip(part.outlines, part.streams, strict=True):
        assert (outline.shape, outline.dtype) == (stream.shape, stream.dtype)


@pytest.mark.parametrize("bits", [8, 6, 4])
def test_the_greatest_half_precision_numbers_stay_finite(bits):
    most = torch.finfo(torch.float16).max
    x = torch.randn(1, 1, 5, 8).half()
    x[..., 0, 3], x[..., 1, 2], x[..., 2, 0] = most, -most, torch.nan
    stream = QuantizedStream(*quantize(x, bits, 8), bits, 8, 8, torch.float16)
    values = stream.to_tensor()
    assert values[:, :, [0, 1, 3, 4]].isfinite().all() and values[:, :, 2].isnan().all()
    assert values[0, 0, 0, 3] == most and values[0, 0, 1, 2] == -most
