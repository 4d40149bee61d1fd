"""Checksums notice every change of a tensor, and a digest is computed anew only then."""

import pytest
import torch

from regard.cache.paging import checksums as module
from regard.cache.paging.checksums import checksum, digest_once

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int8, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 3, 130, 4097, 20_003])
def test_equal_bytes_have_equal_checksums_and_others_have_not(size, dtype):
    x = torch.randn(size).mul(9).to(dtype)
    before = checksum(x)
    assert checksum(x.clone()) == before
    for index in {0, size // 2, size - 1}:
        changed = x.clone()
        changed[index] = ~changed[index] if dtype == torch.bool else changed[index] + 1
        assert checksum(changed) != before


def test_pairs_of_flipped_signs_are_noticed():
    """The highest bits of two numbers, which cancel in sums of 64 bits with odd factors."""
    x = torch.randn(64, dtype=torch.float64)
    before = checksum(x)
    for index in range(0, 64, 2):
        changed = x.clone()
        changed[index : index + 2].neg_()
        assert checksum(changed) != before


def test_the_hashes_are_nh_by_two_keys_of_their_own(monkeypatch):
    """Each number of the first half of a row times its partner of the other, both with a key added
    in 32 bits; sums in 64 bits. The oracle counts with Python's integers."""
    x, width = torch.randint(-(2**31), 2**31, (2 * 2 * module._HALF,), dtype=torch.int32), 2**32
    keys = [[n % width for n in key.flatten().tolist()] for key in module._keys(x.device)]
    assert keys[0] != keys[1]
    rows = x.view(2, -1).tolist()
    for found in (module._hashes(x), _by_operators(x, monkeypatch)):
        for hashes, key in zip(found.tolist(), keys, strict=True):
            for total, row in zip(hashes, rows, strict=True):
                sums = [(n + k) % width for n, k in zip(row, key, strict=True)]
                pairs = zip(sums[: module._HALF], sums[module._HALF :], strict=True)
                assert total % 2**64 == sum(a * b for a, b in pairs) % 2**64


def _by_operators(x, monkeypatch):
    monkeypatch.setattr(module, "has_numba", lambda: False)
    return module._hashes(x)


def test_swapped_elements_and_zeros_at_the_end_are_noticed():
    x = torch.arange(9_000.0)
    assert checksum(x.flip(0)) != checksum(x)
    y = x.clone()
    y[[7, 4_200]] = y[[4_200, 7]]
    assert checksum(y) != checksum(x)


def test_bytes_that_begin_anywhere_in_their_memory():
    x = torch.randint(-99, 99, (50_001,), dtype=torch.int8)
    assert checksum(x[1:]) == checksum(x[1:].clone()) != checksum(x[:-1])


def test_layouts_and_empty_tensors():
    x = torch.randn(30, 40)
    assert checksum(x.mT) == checksum(x.mT.contiguous())
    assert checksum(x[:0]) == checksum(x[:0])


def test_zeros_at_the_end_that_are_no_bytes_of_the_tensor_are_noticed():
    x = torch.randn(5_000)
    longer = torch.nn.functional.pad(x, (0, 1))
    assert checksum(longer) != checksum(x)


def test_long_tensors_are_hashed_in_pieces(monkeypatch):
    x = torch.randn(50_000)
    monkeypatch.setattr(module, "has_numba", lambda: False)
    whole = checksum(x)
    monkeypatch.setattr(module, "_PIECE", 1 << 13)
    assert checksum(x) == whole


@pytest.mark.parametrize("size", [1, 4096, 4097, 20_003])
def test_compiled_hashes_are_those_of_operators(size, monkeypatch):
    pytest.importorskip("numba")
    x = torch.randn(size)
    compiled = checksum(x)
    monkeypatch.setattr(module, "has_numba", lambda: False)
    assert checksum(x) == compiled


def test_checksums_of_a_small_tensor_or_without_compiled_code_are_not_quicker(monkeypatch):
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
