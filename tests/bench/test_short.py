"""The short benchmark: every shape against torch, its work counted."""

import pytest
import torch

from regard.bench import bench
from regard.bench.short import TORCH, shapes
from regard.ops.backends import BACKENDS

TINY = {"heads": 4, "kv_heads": 2, "head_dim": 16, "keys": 32}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_shape_is_measured_against_torch(dtype):
    seen = []
    result = bench(
        **TINY, dtype=dtype, rounds=1, cold=1 << 16, progress=lambda *each: seen.append(each)
    )
    assert [measured.shape for measured in result.shapes] == shapes(*TINY.values())
    assert seen[-1][1:] == (6, 7)
    for measured in result.shapes:
        names = [entry.name for entry in measured.entries]
        assert names[:2] == [TORCH, f"regard: {measured.chosen}"]
        assert measured.chosen in BACKENDS
        assert measured.entries[0].ratio == 1.0
        assert all(entry.milliseconds > 0 and entry.of_limit > 0 for entry in measured.entries)
        assert measured.limit in ("reads", "products")
        ran = {measured.chosen, *(name.removeprefix("backend ") for name in names[2:])}
        assert ran | set(measured.absent) == set(BACKENDS)
        assert not ran & set(measured.absent)


def test_work_is_counted():
    decode, _, batch, few, prefill, _ = shapes(32, 8, 128, 4096)
    assert decode.nbytes(torch.float32) == 2 * 8 * 1024 * 128 * 4
    assert decode.flops == 4 * 32 * 1024 * 128
    assert batch.flops == 4 * decode.flops
    assert few.flops == 4 * 32 * 128 * sum(range(4089, 4097))
    assert prefill.flops == 4 * 32 * 128 * 512 * 513 // 2


@pytest.mark.parametrize("wrong", [{"heads": 0}, {"kv_heads": 3}, {"head_dim": 0}, {"keys": 0}])
def test_sizes_that_cannot_be_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        bench(**{**TINY, **wrong})


def test_tensors_that_no_memory_holds_are_refused_before_any_work():
    with pytest.raises(ValueError, match="has 17,179,869,184 bytes, at most 8,589,934,592 are"):
        bench(heads=1 << 20, kv_heads=1, head_dim=1 << 10, keys=16, dtype=torch.float32)
