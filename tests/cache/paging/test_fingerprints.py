"""`fingerprint`: every byte counts, and no memoised digest is of earlier bytes."""

import copy
import gc
import time
import weakref

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from regard.cache.paging import fingerprints
from regard.cache.paging.fingerprints import fingerprint


def small(dtype=torch.float32):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2, bias=False))
    return model.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_change_of_any_element_changes_it(dtype):
    model = small(dtype)
    before = fingerprint(model)
    assert fingerprint(small(dtype)) == before
    for tensor in model.state_dict().values():
        flat = tensor.view(-1)
        for i in range(len(flat)):
            old = flat[i].clone()
            flat[i] += 1
            assert fingerprint(model) != before
            flat[i] = old
    assert fingerprint(model) == before


def test_names_shapes_and_dtypes_count():
    def of(name, tensor):
        module = nn.Module()
        module.register_buffer(name, tensor)
        return fingerprint(module)

    zeros = torch.zeros(4)
    changed = [
        of("b", zeros),
        of("a", zeros.view(2, 2)),
        of("a", zeros.int()),
        of("a", zeros.double()[:2]),
        of("aa", zeros),
    ]
    assert len({of("a", zeros), *changed}) == 6
    assert of("a", zeros) == of("a", torch.zeros(8)[::2])  # wherever the elements lie


def test_every_write_is_noticed():
    """However a byte is written: with a version counter, `.data`, numpy or a memory view."""
    model = nn.Linear(64, 129)  # two sums of 1,024 words each, and a rest
    weight, found = model.weight, {fingerprint(model)}

    def adds(change):
        change()
        found.add(fingerprint(model))
        return len(found)

    assert adds(lambda: weight.data[100].normal_()) == 2  # no version counter counts it
    assert adds(lambda: weight.detach().numpy().__setitem__((128, 63), 7.0)) == 3
    with torch.no_grad():
        assert adds(lambda: weight.add_(1)) == 4
        assert adds(lambda: weight.data.neg_()) == 5  # the top bit of each word
        assert adds(lambda: weight.copy_(weight.flip(0).clone())) == 6
        assert adds(lambda: setattr(weight, "data", weight + 1)) == 7
        assert adds(lambda: setattr(model, "weight", nn.Parameter(weight.clone() * 2))) == 8
    assert adds(lambda: None) == 8


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8])
def test_two_signs_are_noticed_wherever_they_are(dtype):
    """Two flipped top bits cancel in a sum of words modulo a power of two."""
    torch.manual_seed(0)
    module = nn.Module()
    module.register_buffer("a", torch.randn(64, 128).mul(9).add(1).to(dtype))
    before, flat = fingerprint(module), module.a.data.view(-1)
    bits = flat.view(
        {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    )
    top = torch.iinfo(bits.dtype).min
    for _ in range(100):
        two = torch.randperm(len(flat))[:2]
        bits[two] ^= top
        assert fingerprint(module) != before
        bits[two] ^= top
    assert fingerprint(module) == before


def test_threads_that_share_a_tensor_read_the_same(monkeypatch):
    weight = torch.randn(100, 1024)
    alone = fingerprints._checksum(b"", weight)
    monkeypatch.setattr(fingerprints, "_SHARED", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert fingerprints._checksum(b"", weight) == alone
    weight.data[99, 1023] += 1
    assert fingerprints._checksum(b"", weight) != alone


@pytest.fixture
def no_digests(monkeypatch):
    """A tensor of an earlier test may have had the same bytes at the same address."""
    monkeypatch.setattr(fingerprints, "_DIGESTS", {})


def test_a_digest_is_computed_again_only_after_a_write(monkeypatch, no_digests):
    model, read = small(), []
    memory = fingerprints.sha256
    monkeypatch.setattr(fingerprints, "sha256", lambda *parts: read.append(1) or memory(*parts))
    first = fingerprint(model)
    tensors = len(read)
    assert fingerprint(model) == first and len(read) == tensors == len(model.state_dict())
    model[0].weight.data[0, 0] += 1
    assert fingerprint(model) != first and len(read) == tensors + 1


def test_a_model_that_was_read_can_be_converted_and_freed(monkeypatch):
    """`swap_tensors` refuses tensors that others refer to, weakly too."""
    monkeypatch.setattr(fingerprints, "_MOST", 2)
    monkeypatch.setattr(fingerprints, "_DIGESTS", {})
    model = small()
    before = fingerprint(model)
    assert len(fingerprints._DIGESTS) <= 2
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        assert fingerprint(model.to(torch.float64)) != before
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    weight = weakref.ref(model[0].weight)
    del model
    gc.collect()
    assert weight() is None


def test_tied_weights_are_read_once(monkeypatch, no_digests):
    model, read = nn.ModuleList([nn.Linear(3, 3, bias=False) for _ in range(2)]), []
    model[1].weight = model[0].weight
    memory = fingerprints.sha256
    monkeypatch.setattr(fingerprints, "sha256", lambda *parts: read.append(1) or memory(*parts))
    fingerprint(model)
    assert len(read) == 1


def test_elements_at_any_address_are_read():
    for dtype in (torch.bfloat16, torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn):
        whole = (torch.arange(9001) % 5 - 2).to(dtype)
        shifted, module = whole[1:], nn.Module()
        module.register_buffer("a", shifted)
        copied = nn.Module()
        copied.register_buffer("a", shifted.clone())
        assert fingerprint(module) == fingerprint(copied), dtype


def test_copies_and_other_callers_have_the_same_one():
    model = small()
    found = {fingerprint(model), fingerprint(copy.deepcopy(model)), fingerprint([*model])}
    with torch.device("meta"):
        found.add(fingerprint(small_on_cpu := copy.deepcopy(model)))
    with torch.inference_mode():
        found.add(fingerprint(copy.deepcopy(small_on_cpu)))
    torch.set_default_dtype(torch.float64)
    try:
        found.add(fingerprint(copy.deepcopy(model)))
    finally:
        torch.set_default_dtype(torch.float32)
    assert len(found) == 1


def test_tensors_of_inference_mode_are_read_too():
    with torch.inference_mode():
        model = small()
        before = fingerprint(model)
        model[0].weight[0, 0] += 1
        assert fingerprint(model) != before


def test_models_without_data_are_refused():
    with torch.device("meta"):
        model = small()
    with pytest.raises(ValueError, match=r"'0.weight' is on device 'meta' without data"):
        fingerprint(model)
    with FakeTensorMode():
        model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="without data"):
        fingerprint(model)


def test_sparse_tensors_are_refused():
    module = nn.Module()
    module.register_buffer("a", torch.eye(3).to_sparse())
    with pytest.raises(ValueError, match=r"layout torch\.sparse_coo"):
        fingerprint(module)


class Packed(nn.Module):
    """As quantised modules: the state has codes in a tuple, numbers and text."""

    def __init__(self, *state):
        super().__init__()
        self.state = state

    def get_extra_state(self):
        return {"state": self.state}


def test_the_state_of_quantised_modules_counts():
    codes = torch.arange(4, dtype=torch.int8)
    states = [
        (codes, 0.5, None),
        (codes + 1, 0.5, None),
        (codes, 0.25, None),
        (codes, 0.5, b"x"),
        (codes, 0.5, torch.int8),
        (codes, 0.5),
        (codes, [0.5, None]),
    ]
    assert len({fingerprint(Packed(*state)) for state in states}) == len(states)
    with pytest.raises(ValueError, match="is a object"):
        fingerprint(Packed(object()))


class Wrapper(torch.Tensor):
    """As torchao's tensors: a subclass around others."""

    @staticmethod
    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self):
        return ["codes"], {"scale": self.scale}

    def __repr__(self):
        return "Wrapper"

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return args[0] if "detach" in str(function) else NotImplemented


def test_tensors_around_others_count_by_what_is_inside():
    def of(codes, scale):
        module = nn.Module()
        module.weight = nn.Parameter(Wrapper(codes, scale))
        return fingerprint(module)

    codes = torch.arange(4, dtype=torch.int8)
    assert of(codes, 1.0) == of(codes.clone(), 1.0)
    assert len({of(codes, 1.0), of(codes + 1, 1.0), of(codes, 2.0)}) == 3


def test_sharded_weights_have_the_fingerprint_of_the_whole(tmp_path):
    from torch import distributed as dist
    from torch.distributed.tensor import Shard, distribute_tensor

    model = small()
    whole = fingerprint(model)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/s", rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        for each in (model[0], model[2]):
            each.weight = nn.Parameter(distribute_tensor(each.weight.detach(), mesh, [Shard(0)]))
        assert fingerprint(model) == whole
    finally:
        dist.destroy_process_group()


@pytest.mark.long
def test_half_a_gigabyte_a_second():
    model = nn.Linear(8192, 8192, bias=False)
    start = time.process_time()  # other programs' time does not count
    first = fingerprint(model)
    took = time.process_time() - start
    assert model.weight.nbytes / took > 0.25e9  # half of what one free core does
    start = time.process_time()
    assert fingerprint(model) == first
    assert time.process_time() - start < took  # a checksum of all bytes
