"""`format_of`: bits of keys and of values from a name."""

import pytest
import torch

from regard import Attention, Causal, PagedCache, PagePool, Rotary
from regard.cache.paging.formats import PLAIN, format_of


def test_a_name_gives_the_bits_of_keys_and_of_values():
    form = format_of("K8V4")
    assert (form.bits_of_stream(0), form.bits_of_stream(1)) == (8, 4)
    assert format_of(form) is form and format_of("plain") is PLAIN


@pytest.mark.parametrize("name", ["K8", "K5V4", "", None, 8])
@pytest.mark.usefixtures("unchecked")
def test_other_names_are_refused(name):
    with pytest.raises(ValueError, match="neither 'plain' nor"):
        format_of(name)


def test_fewer_than_8_bits_are_rotated():
    form = format_of("K8V4")
    assert form.rotation_of(0, 2, 96, None) == ()
    assert form.rotation_of(1, 2, 96, None) == (64, 32)
    assert PLAIN.rotation_of(0, 2, 96, None) == ()
    assert form._replace(rotates=False).rotation_of(1, 2, 96, None) == ()


def test_of_a_joined_stream_the_first_piece_is_rotated():
    form = format_of("K4V4")
    assert form.rotation_of(0, 1, 576, (512, 64)) == (512,)
    assert form.rotation_of(0, 1, 576, None) == ()
    assert form.rotation_of(0, 2, 40, None) == (32, 8)  # a latent beside positions


@pytest.mark.parametrize(
    ("name", "page_size", "shares"),
    [
        ("K4V4", 64, [(64, 1), (1, 64)]),
        ("K6V8", 32, [(32, 1), (1, 64)]),
        ("K4V4", 31, [(1, 64), (1, 64)]),
        ("K8V4", 64, [(1, 64), (1, 64)]),
        ("plain", 64, [(1, 64), (1, 64)]),
    ],
)
def test_keys_of_few_bits_have_scales_by_channel_of_a_page(name, page_size, shares):
    form = format_of(name)
    assert [form.shares(index, page_size) for index in (0, 1)] == shares


def test_from_which_size_of_a_page_on_is_a_choice():
    form = format_of("K4V4")
    assert form._replace(by_channel_from=4).shares(0, 4) == (4, 1)
    assert form._replace(by_channel_from=1).shares(0, 1) == (1, 64)
    assert form._replace(by_channel_from=None, group=8).shares(0, 64) == (1, 8)


@pytest.mark.parametrize("name", ["K8V8", "K8V4", "K6V4", "K4V4"])
@torch.no_grad()
def test_pages_at_a_time_read_what_single_tokens_read(name):
    """A query reads codes of the pages before its own, but the first, and numbers of its own: so a
    text that is read by pages shows what decoding it would."""
    options = {"rope": Rotary(8), "mask": Causal(), "backend": "grouped"}  # nothing to compile
    layer = Attention(32, 4, num_kv_heads=2, **options).eval()
    x, found = torch.randn(2, 14, 32), []
    for step in (1, 4):
        cache = PagedCache(PagePool(64, 4, format=name))
        found.append(torch.cat([layer(piece, cache=cache) for piece in x.split(step, 1)], 1))
    torch.testing.assert_close(*found, rtol=0, atol=1e-5)
    error = (found[0] - layer(x)).abs().amax((0, 2))
    assert (error[:8] < 1e-5).all()
    assert (error[8:] > 1e-5).all()
