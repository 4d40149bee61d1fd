"""`Context` and `context_of`: what tells two models apart, and what does not."""

import copy
import gc
import json
import time
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from regard import (
    NTK,
    Attention,
    Causal,
    Frequencies,
    MultiHeadLatentAttention,
    Rotary,
    SlidingWindow,
    Where,
)
from regard.cache.paging import contexts
from regard.cache.paging.contexts import Context, context_of, fingerprint


def test_contexts_are_text():
    assert Context("5e1f", "a") == Context("5e1f", "a") != Context("5e1fa", "")
    for wrong in ((7, ""), ("5e1f", None)):
        with pytest.raises(TypeError, match="is text"):
            Context(*wrong)


# ---- of a model ----


def equal(layer, **changed):
    """A layer of the same weights, and other arguments."""
    other = type(layer)(**{**layer.arguments, **changed})
    other.load_state_dict(layer.state_dict())
    return other


LAYER = Attention(32, 4, num_kv_heads=2, rope=Rotary(8), mask=Causal())
OTHER = {
    "theta": {"rope": Rotary(8, theta=500.0)},
    "pairing": {"rope": Rotary(8, pairing="pairs")},
    "part": {"rope": Rotary(4)},
    "frequencies": {"rope": Rotary(8, scaling=Frequencies((1.0, 0.5, 0.25, 0.125)))},
    "window": {"mask": SlidingWindow(4)},
    "scale": {"scale": 0.5},
    "softcap": {"softcap": 30.0},
    "score bias": {"score_bias": torch.ones(1)},
}


@pytest.mark.parametrize("name", OTHER)
def test_equal_weights_that_compute_something_else_have_another_context(name):
    one, other = context_of(LAYER), context_of(equal(LAYER, **OTHER[name]))
    assert one.weights == other.weights and one.key != other.key
    assert one == context_of(equal(LAYER))


def test_tensors_among_the_arguments_count_by_their_content():
    one, other = (equal(LAYER, score_bias=torch.tensor([x])) for x in (1.0, 2.0))
    assert context_of(one) != context_of(other)
    assert context_of(one) == context_of(equal(one, score_bias=torch.ones(1)))


def test_how_a_layer_computes_is_no_part_of_its_context():
    other = equal(LAYER, backend="eager", dropout=0.1, precision="fast")
    assert context_of(other) == context_of(LAYER)


def test_layers_in_order_are_a_model():
    layers = [LAYER, equal(LAYER, rope=Rotary(8, theta=500.0))]
    assert context_of(layers) == context_of(nn.ModuleList(layers))
    assert context_of(layers) != context_of(layers[::-1])


def test_another_dtype_is_another_context():
    assert context_of(equal(LAYER).to(torch.bfloat16)).weights != context_of(LAYER).weights


def test_mla_and_compiled_models_have_contexts():
    layer = MultiHeadLatentAttention(
        32,
        2,
        kv_lora_rank=8,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
        rope=Rotary(4),
    )
    compiled = nn.Module()  # as torch.compile returns it
    compiled._orig_mod = layer
    assert context_of(compiled) == context_of(layer)


def test_frequencies_that_depend_on_the_length_are_refused():
    layer = equal(LAYER, rope=Rotary(8, scaling=NTK(4.0, original_max_position=16)))
    with pytest.raises(ValueError, match="change with the length of a call"):
        context_of(layer)


def test_an_argument_without_a_description_is_refused():
    layer = equal(LAYER, mask=Where(lambda b, h, q, k: q >= k))
    with pytest.raises(ValueError, match="holds for this process only"):
        context_of(layer)


def test_active_adapters_are_found():
    class Adapted(nn.Linear):
        active_adapters, disable_adapters = ("one",), False

    model, keys = nn.Sequential(Adapted(2, 2), nn.Linear(2, 2)), set()
    for state in ({}, {"disable_adapters": True}, {"active_adapters": ("two",)}):
        vars(model[0]).update(state)
        keys.add(context_of(model).key)
    assert len(keys) == 3


def test_numbers_in_containers_of_a_module_count_as_its_own_do():
    model, keys = nn.Sequential(nn.Linear(2, 2)), set()
    states = [{"a": 1.0}, {"a": 5.0}, {"b": 1.0}, {"a": [1.0, True]}, {"a": {"b": (1.0,)}}]
    for state in states:
        model[0].scaling = state  # as PEFT has it: of each adapter
        keys.add(context_of(model).key)
    assert len(keys) == len(states)
    del model[0].scaling
    without = context_of(model)
    model[0].names = {"a": object(), "b": "text"}
    assert context_of(model) == without


def test_names_tell_contexts_apart_as_nothing_else_does():
    names = ["", "a", '", "', "float32"]
    assert len({context_of(LAYER, name=each) for each in names}) == 4
    assert json.loads(context_of(LAYER, name="a").key)[0] == "a"


# ---- of transformers models ----


class Config(SimpleNamespace):
    def to_dict(self):
        return dict(vars(self))


class Rotating(nn.Module):
    """As in transformers: frequencies in a buffer that is not saved."""

    rope_type = "default"

    def __init__(self, theta):
        super().__init__()
        frequencies = theta ** -torch.linspace(0, 1, 4)
        self.register_buffer("inv_freq", frequencies, persistent=False)
        self.register_buffer("original_inv_freq", frequencies.clone(), persistent=False)


def model(theta=1e4, **entries):
    found = nn.ModuleDict({"rotary_emb": Rotating(theta), "lm": nn.Linear(2, 2, bias=False)})
    nn.init.ones_(found["lm"].weight)
    entries = {"rope_parameters": {"rope_theta": 1e4}, "rms_norm_eps": 1e-6, **entries}
    found.config = Config(**entries)
    return found


def test_the_config_and_the_frequencies_tell_models_apart():
    one = context_of(model())
    assert context_of(model(use_cache=False, _name_or_path="elsewhere", dtype="x")) == one
    others = [
        model(theta=500.0),
        model(rope_parameters={"rope_theta": 500.0}),
        model(rms_norm_eps=1e-5),
    ]
    assert len({one, *(context_of(each) for each in others)}) == 4
    assert all(context_of(each).weights == one.weights for each in others)


def test_frequencies_that_transformers_changes_are_refused():
    changing = model()
    changing["rotary_emb"].rope_type = "dynamic"
    with pytest.raises(ValueError, match="'dynamic' change with the length"):
        context_of(changing)


# ---- fingerprints ----


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
    model = nn.Linear(64, 129)
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


def test_a_model_that_was_read_can_be_converted_and_freed():
    """`swap_tensors` refuses tensors that others refer to, weakly too."""
    model = small()
    before = fingerprint(model)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        assert fingerprint(model.to(torch.float64)) != before
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    weight = weakref.ref(model[0].weight)
    del model
    gc.collect()
    assert weight() is None


def test_tied_weights_are_read_once(monkeypatch):
    model, read = nn.ModuleList([nn.Linear(3, 3, bias=False) for _ in range(2)]), []
    model[1].weight = model[0].weight
    right = contexts.tensor_digest
    monkeypatch.setattr(contexts, "tensor_digest", lambda *of: read.append(1) or right(*of))
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
    with pytest.raises(ValueError, match="holds for this process only"):
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
    assert fingerprint(model) == first
