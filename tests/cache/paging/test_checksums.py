"""Checksums notice every change of a tensor, and a digest is computed anew only then."""

import pytest
import torch

from regard.cache.paging import checksums as module
from regard.cache.paging.checksums import checksums, digest_once

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int8, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 3, 130, 4097, 20_003])
def test_equal_bytes_have_equal_sums_and_others_have_not(size, dtype):
    x = torch.randn(size).mul(9).to(dtype)
    before = checksums(x)
    assert checksums(x.clone()) == before
    for index in {0, size // 2, size - 1}:
        changed = x.clone()
        changed[index] = ~changed[index] if dtype == torch.bool else changed[index] + 1
        assert checksums(changed) != before


def test_pairs_of_flipped_signs_are_noticed():
    """The highest bits of two numbers, which cancel in sums of 64 bits with odd factors."""
    x = torch.randn(64, dtype=torch.float64)
    before = checksums(x)
    for index in range(0, 64, 2):
        changed = x.clone()
        changed[index : index + 2].neg_()
        assert checksums(changed) != before


def test_both_sums_have_factors_of_their_own():
    one, other = checksums(torch.randn(64))
    assert one != other


def test_swapped_elements_and_zeros_at_the_end_are_noticed():
    x = torch.arange(9_000.0)
    assert checksums(x.flip(0)) != checksums(x)
    y = x.clone()
    y[[7, 4_200]] = y[[4_200, 7]]
    assert checksums(y) != checksums(x)


def test_layouts_and_empty_tensors():
    x = torch.randn(30, 40)
    assert checksums(x.mT) == checksums(x.mT.contiguous())
    assert checksums(x[:0]) == checksums(x[:0])


def test_long_tensors_are_summed_in_pieces(monkeypatch):
    x = torch.randn(50_000)
    whole = checksums(x)
    monkeypatch.setattr(module, "_PIECE", 1 << 13)
    assert checksums(x) == whole


@pytest.mark.parametrize("size", [1, 4096, 4097, 20_003])
def test_compiled_sums_are_those_of_operators(size, monkeypatch):
    pytest.importorskip("numba")
    x = torch.randn(size)
    compiled = checksums(x)
    monkeypatch.setattr(module, "has_numba", lambda: False)
    assert checksums(x) == compiled


def test_sums_of_a_small_tensor_or_without_compiled_code_are_not_quicker(monkeypatch):
    large = torch.zeros(module.LEAST)
    assert not module.gains(large[:10])
    monkeypatch.setattr(module, "has_numba", lambda: True)
    assert module.gains(large)
    monkeypatch.setattr(module, "has_numba", lambda: False)
    assert not module.gains(large)


def test_a_digest_is_computed_once_for_the_same_bytes():
    x, asked = torch.zeros(10), []

    def digest():
        asked.append(x.clone())
        return bytes([len(asked)])

    assert digest_once(x, digest) == digest_once(x, digest) == b"\1"
    x.data[3] = 1.0
    assert digest_once(x, digest) == b"\2"
    x.data[3] = 0.0
    assert digest_once(x, digest) == b"\3"
    assert len(asked) == 3
