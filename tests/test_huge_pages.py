"""Tensors in huge pages are like others; only the addresses of moved ones are new."""

import copy
import mmap
import multiprocessing
import pickle
import re
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from regard import huge_pages
from regard.huge_pages import LARGE, move_to_huge_pages, zeros_in_huge_pages

ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the system has no such advice")
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
IN_KERNEL = pytest.mark.skipif(not SETTING.exists(), reason="the kernel has no huge pages")
SHAPE = 3, LARGE // 8 + 5  # of float32: more than LARGE


def advised(x):
    """Whether the system was asked for huge pages where a tensor lies: its area has the flag hg."""
    smaps = Path("/proc/self/smaps").read_text()
    areas = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", smaps, flags=re.MULTILINE)
    for area in areas[1:]:
        start, stop = (int(each, 16) for each in area.split()[0].split("-"))
        if start <= x.data_ptr() < stop:
            return "hg" in area.rpartition("VmFlags:")[2].split()
    raise AssertionError("a tensor lies nowhere")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("shape", [(0, 3), (2, 3), SHAPE])
def test_zeros_are_zeros_with_or_without_huge_pages(shape, known, dtype, monkeypatch):
    if not known:
        monkeypatch.delattr(huge_pages.mmap, "MADV_HUGEPAGE", raising=False)
    x = zeros_in_huge_pages(shape, dtype)
    assert x.shape == shape
    assert x.dtype is dtype
    assert not x.any()
    x[...] = 3
    assert copy.deepcopy(x).eq(3).all()
    assert pickle.loads(pickle.dumps(x)).equal(x)


@pytest.mark.parametrize("shape", [(2, 3), SHAPE])
def test_zeros_on_other_systems(shape, monkeypatch):
    monkeypatch.setattr(huge_pages.sys, "platform", "win32")
    assert zeros_in_huge_pages(shape, torch.float32).equal(torch.zeros(shape))


@IN_KERNEL
def test_huge_pages_are_asked_for_large_tensors():
    assert advised(zeros_in_huge_pages(SHAPE, torch.float32))
    weight = torch.randn(*SHAPE)
    move_to_huge_pages([weight])
    assert advised(weight)


def test_no_area_is_taken_for_small_tensors(monkeypatch):
    # The flag would not show it: NumPy asks for huge pages in memory that small tensors share.
    monkeypatch.setattr(huge_pages.mmap, "mmap", taken := Mock(side_effect=OSError))
    zeros_in_huge_pages((2, 3), torch.float32)
    move_to_huge_pages([torch.zeros(2, 3)])
    assert not taken.called
    zeros_in_huge_pages(SHAPE, torch.float32)
    assert taken.called is (sys.platform == "linux")


@ON_LINUX
def test_moved_weights_are_the_same_parameters_elsewhere():
    model = nn.Sequential(nn.Linear(1000, 1100), nn.Linear(1100, 3).to(torch.bfloat16))
    model.register_parameter("tied", model[0].weight)
    before, places = copy.deepcopy(model.state_dict()), [x.data_ptr() for x in model.parameters()]
    same = [*model.parameters()]
    moved = move_to_huge_pages(model.parameters())
    assert moved == sum(x.nbytes for x in same) > LARGE
    assert all(a is b for a, b in zip(model.parameters(), same, strict=True))
    assert model.tied is model[0].weight
    for (name, x), place in zip(model.named_parameters(), places, strict=True):
        assert x.equal(before[name])
        assert x.requires_grad
        assert x.data_ptr() != place
        assert x.data_ptr() % 64 == 0
        assert x.untyped_storage().nbytes() == x.nbytes  # is saved alone
    model[0](torch.randn(2, 1000)).sum().backward()
    assert model[0].weight.grad.any()


@ON_LINUX
def test_tensors_with_users_that_would_not_follow_stay():
    whole = torch.randn(*SHAPE)
    shared = torch.randn(*SHAPE).share_memory_()
    twins = nn.Parameter(torch.randn(*SHAPE))
    kept = [
        whole[1:], torch.randn(*SHAPE).mT, shared, torch.empty(*SHAPE, device="meta"), twins,
        nn.Parameter(twins.data), torch.randn(*SHAPE).to_sparse(), torch.zeros(0),
    ]  # fmt: skip
    with torch.inference_mode():
        kept.append(torch.randn(*SHAPE))
    places = [0 if x.is_sparse else x.data_ptr() for x in kept]
    assert move_to_huge_pages(kept) == 0
    assert move_to_huge_pages([*kept, alone := torch.randn(*SHAPE)]) == alone.nbytes
    assert [0 if x.is_sparse else x.data_ptr() for x in kept] == places


@ON_LINUX
@pytest.mark.parametrize("reason", ["half of the memory", "a limit of the system"])
def test_weights_stay_where_they_would_not_fit(reason, monkeypatch):
    x = torch.randn(*SHAPE)
    place, before = x.data_ptr(), x.clone()
    if reason == "half of the memory":
        monkeypatch.setattr(
            huge_pages.os, "sysconf", lambda name: 2 * x.nbytes // mmap.PAGESIZE - 1
        )
    else:
        monkeypatch.setattr(huge_pages.mmap, "mmap", Mock(side_effect=OSError(12, "no memory")))
        assert not zeros_in_huge_pages(SHAPE, torch.float32).any()
    assert move_to_huge_pages([x]) == 0
    assert x.data_ptr() == place
    assert x.equal(before)


@ON_LINUX
def test_another_c_library_keeps_what_it_likes(monkeypatch):
    monkeypatch.setattr(huge_pages.ctypes, "CDLL", lambda name: object())
    x = torch.randn(*SHAPE)
    assert move_to_huge_pages([x]) == x.nbytes


@ON_LINUX
def test_the_memory_of_moved_weights_is_returned():
    def resident():
        return int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[1]) << 10

    torch.ones(1 << 22)  # blocks that are freed let glibc keep smaller ones
    weights = [torch.ones(1 << 18) for _ in range(300)]
    before = resident()
    assert move_to_huge_pages(weights) == 300 << 20
    assert resident() < before + (64 << 20)


def test_few_bytes_stay(monkeypatch):
    x = torch.randn(5)
    place = x.data_ptr()
    assert move_to_huge_pages([x]) == 0 == move_to_huge_pages([])
    monkeypatch.setattr(huge_pages.sys, "platform", "darwin")
    assert move_to_huge_pages([x, torch.randn(*SHAPE)]) == 0
    assert x.data_ptr() == place


@ON_LINUX
def test_a_forked_process_has_memory_of_its_own():
    x = zeros_in_huge_pages(SHAPE, torch.float32)
    child = multiprocessing.get_context("fork").Process(target=x.fill_, args=(1.0,))
    child.start()
    child.join()
    assert child.exitcode == 0
    assert not x.any()
