"""`QuantizedCache`: tokens are quantised independently, and `nbytes` counts the codes."""

import pytest
import torch

from regard import QuantizedCache


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
