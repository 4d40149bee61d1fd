"""`QuantizedCache`: tokens are quantised independently, and `nbytes` counts the codes."""

import copy

import pytest
import torch

from regard import (
    Causal,
    KVCache,
    LatentKVAttention,
    MultiHeadLatentAttention,
    QuantizedCache,
    Rotary,
)
from regard.cache.rotation import blocks_of, hadamard


def test_batch_rows_are_quantised_independently():
    x = torch.randn(2, 2, 9, 64)
    loud = x.clone()
    loud[1] *= 1e4
    quiet, other = QuantizedCache(), QuantizedCache()
    assert torch.equal(quiet.update(x)[0].streams[0][0], other.update(loud)[0].streams[0][0])


@pytest.mark.parametrize("bits", [8, 4])
def test_an_outlier_channel_affects_only_its_group(bits):
    x = torch.randn(1, 2, 9, 64)
    loud = x.clone()
    loud[..., 20] = 1e4
    quiet, other = (QuantizedCache(bits, group=16).update(y)[0].streams[0] for y in (x, loud))
    same = (quiet == other).all((0, 1, 2))
    assert same[:16].all() and same[32:].all()
    assert not same[16:32].any()


@pytest.mark.parametrize("bits", [8, 4])
def test_quantising_all_tokens_and_one_at_a_time_agree(bits):
    x, whole, steps = torch.randn(2, 2, 9, 12), QuantizedCache(bits, 8), QuantizedCache(bits, 8)
    for token in x.split(1, dim=2):
        (part,) = steps.update(token)
    assert torch.equal(whole.update(x)[0].streams[0], part.streams[0])


def test_the_error_of_a_quantised_cache_does_not_grow():
    cache = QuantizedCache(4)
    x = torch.randn(1, 1, 4096, 64)
    for chunk in x.split(512, dim=2):
        (part,) = cache.update(chunk)
    gaps = (part.streams[0] - x).abs().mean((0, 1, 3))
    assert 0.95 < gaps[:1024].mean() / gaps[-1024:].mean() < 1.05


def test_codes_scales_and_zeros_are_counted():
    cache = QuantizedCache(bits=4, group=32)
    cache.update(torch.zeros(2, 3, 5, 64))
    assert cache.nbytes == 2 * 3 * 5 * (32 + 2 * 2 * 2)
    assert cache.allocated_bytes >= cache.nbytes


def test_integer_streams_are_stored_unchanged():
    cache = QuantizedCache(bits=4, group=2)
    numbers = torch.tensor([[[[2**31 - 1], [0], [77]]]])
    (part,) = cache.update(torch.randn(1, 1, 3, 4), numbers)
    assert torch.equal(part.streams[1], numbers)


@pytest.mark.parametrize("name", ["K8V8", "K8V4", "K6V4", "K4V8", "K4V4"])
def test_a_format_gives_keys_and_values_their_bits(name):
    cache, k, v = QuantizedCache(format=name), torch.randn(2, 2, 9, 64), torch.randn(2, 3, 9, 96)
    (part,) = cache.update(k, v)
    keys, values = part.streams.stored
    assert (
        (keys.bits, values.bits)
        == (cache.format.key_bits, cache.format.value_bits)
        == (int(name[1]), int(name[3]))
    )
    assert cache.bits == min(keys.bits, values.bits)
    assert keys.rotation == (() if keys.bits == 8 else (64,))
    assert values.rotation == (() if values.bits == 8 else (64, 32))
    assert cache.nbytes == 2 * 9 * (
        2 * (64 * keys.bits // 8 + 4) + 3 * (96 * values.bits // 8 + 2 * 4)
    )
    for x, stream in ((k, keys), (v, values)):
        plain = hadamard(x, stream.rotation)
        span = plain.amax(-1) - plain.amin(-1)
        error = (stream.to_tensor() - x).norm(dim=-1)
        assert (error <= 0.52 * span / (2**stream.bits - 1) * x.shape[-1] ** 0.5).all()


def test_rotation_spreads_an_outlier_channel():
    x = torch.randn(1, 2, 64, 64)
    x[..., 20] = 100.0
    rotated, plain = (
        (cache.update(x, x)[0].streams[0] - x).abs().median()
        for cache in (QuantizedCache(format="K4V4"), QuantizedCache(4))
    )
    assert rotated < 0.5 * plain


def test_bits_alone_do_not_rotate():
    for bits in (8, 4):
        (part,) = QuantizedCache(bits).update(torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 8))
        assert [each.rotation for each in part.streams.stored] == [(), ()]


def test_a_joined_stream_is_rotated_in_its_first_announced_piece():
    x = torch.randn(1, 1, 5, 20)
    alone, announced = QuantizedCache(format="K4V4"), QuantizedCache(format="K4V4")
    announced.pieces = (12, 8)
    assert alone.update(x)[0].streams.stored[0].rotation == ()
    assert announced.update(x)[0].streams.stored[0].rotation == (8, 4)
    announced.pieces = None  # tokens held stay rotated as the first were
    assert announced.update(x)[0].streams.stored[0].rotation == (8, 4)


def test_a_float_stream_beside_integers_is_rotated_whole():
    cache = QuantizedCache(format="K6V4")
    (part,) = cache.update(torch.randn(1, 1, 5, 24), torch.arange(5).view(1, 1, 5, 1))
    assert part.streams.stored[0].rotation == (16, 8)
    assert part.streams.stored[0].bits == 6
    assert part.streams[1].flatten().tolist() == [0, 1, 2, 3, 4]


LAYERS = {
    "MLA": lambda form: MultiHeadLatentAttention(
        48, 4, kv_lora_rank=24, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12,
        rope=Rotary(8), mask=Causal(), form=form,
    ),
    "latent": lambda form: LatentKVAttention(
        48, 4, num_kv_heads=2, head_dim=12, kv_lora_rank=24, rope=Rotary(12), mask=Causal()
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", ["expanded", "absorbed"])
@pytest.mark.parametrize("kind", LAYERS)
@torch.no_grad()
def test_layers_read_rotated_latents(kind, form):
    """Values of 6 bits are within 2 % of the latents' size, so outputs differ little, whether the
    latents are read as codes or expanded."""
    layer, x = LAYERS[kind](form).eval(), torch.randn(2, 9, 48)
    low, plain = QuantizedCache(format="K6V6"), KVCache()
    for token in x.split(1, 1):
        found, wanted = layer(token, cache=low), layer(token, cache=plain)
        assert (found - wanted).abs().max() <= 0.1 * wanted.abs().max()
    assert low._streams[0].rotation == blocks_of(24)
    wrong = QuantizedCache(format="K6V6")
    layer(x, cache=wrong)
    wrong._streams = tuple(each._replace(rotation=()) for each in wrong._streams)
    assert (layer(x[:, -1:], cache=wrong) - layer(x[:, -1:], cache=low)).abs().max() > 0.01


@pytest.mark.parametrize("change", [lambda c: c.reorder(torch.tensor([1, 0, 1])),
                                    lambda c: c.truncate(3), lambda c: c])  # fmt: skip
def test_rotated_streams_stay_so(change):
    x = torch.randn(2, 2, 7, 8)
    cache, plain = QuantizedCache(format="K6V4"), KVCache()
    for each in (cache, plain):
        each.update(x, x)
        change(each)
    empty = plain.peek(*(torch.zeros(plain.buffers[0].shape[0], 2, 0, 8) for _ in range(2)))[0]
    more = torch.randn(*empty.streams[0].shape[:2], 1, 8)
    found, wanted = cache.update(more, more)[0], plain.update(more, more)[0]
    for one, other in zip(found.streams[:], wanted.streams, strict=True):
        assert (one - other).abs().max() < 0.3


def test_snapshots_and_copies():
    cache, x = QuantizedCache(format="K8V4"), torch.randn(1, 2, 3, 8)
    before = cache.snapshot()
    cache.update(x, x)
    copied = copy.deepcopy(cache)
    cache.restore(before)
    assert cache.length == 0
    cache.pieces = None
    assert repr(copied) == "QuantizedCache(format='K8V4', group=64)"
    assert (
        copied.update(x, x)[0].streams[1][:, :, :3].equal(copied.peek(x, x)[0].streams[1][:, :, :3])
    )


@pytest.mark.parametrize("given", [{"format": "plain"}, {"format": "K5V5"}, {"bits": 6},
                                   {"format": "K8V4", "group": 3}])  # fmt: skip
def test_other_arguments_are_refused(given):
    with pytest.raises(ValueError, match=r"KVCache|neither|8 or 4|even number"):
        QuantizedCache(**given)
