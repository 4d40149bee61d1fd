"""How parameters lie on ranks: stored, saved and loaded as on one device."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate

from covering import few
from ranks import on_ranks
from regard.distributed import tensor_parallel
from regard.distributed.tensor.linear import SplitLinear
from regard.distributed.tensor.weights import Share, is_split, split_class
from session import LONG
from split_layers import LAYERS, drawn, inputs, options_of

NAMES = ["mha odd", "smol", "gqa width", "gqa few", "mla", "latent kv width", "relative"]
FEW = {2: ["smol", "latent kv odd", "relative"], 3: ["mha odd", "mla"], 4: ["gqa width", "gqa few"]}
WHOLE = StateDictOptions(full_state_dict=True)


def _rows(mesh):
    order = torch.tensor([2, 0, -1, 1])
    whole = torch.arange(6.0).view(3, 2)
    share = Share(mesh, (Replicate(),), 0, order)
    assert share.stored(whole).tolist() == [[4, 5], [0, 1], [0, 0], [2, 3]]
    assert torch.equal(share.of_one_device(share.stored(whole)), whole)
    assert share.shape(share.stored(whole)) == (3, 2)
    columns = Share(mesh, (Replicate(),), 1, order)
    assert torch.equal(columns.of_one_device(columns.stored(whole.T)), whole.T)
    plain = Share(mesh, (Replicate(),))
    assert plain.stored(whole) is whole is plain.of_one_device(whole)
    assert share.read(whole) is whole


def test_rows_are_stored_in_order_and_padded():
    on_ranks(2, _rows)


def other_values(state):
    drawing = torch.Generator().manual_seed(4)
    return {k: torch.randn(v.shape, generator=drawing, dtype=v.dtype) for k, v in state.items()}


def _state_dicts(mesh):
    for name in NAMES if LONG else FEW[mesh.size()]:
        one, x, options = drawn(LAYERS[name][0]), inputs(), options_of(name)
        layer = tensor_parallel(drawn(LAYERS[name][0]), mesh)
        assert is_split(layer)
        expected, state = one.state_dict(), layer.state_dict()
        assert list(state) == list(expected)
        for key, value in state.items():
            assert isinstance(value, DTensor)
            assert value.shape == expected[key].shape
            assert torch.equal(value.full_tensor(), expected[key]), (name, key)
        other = other_values(expected)
        layer.load_state_dict(other)  # of one device
        one.load_state_dict(other)
        torch.testing.assert_close(layer(x, **options), one(x, **options))
        whole = get_model_state_dict(layer, options=WHOLE)
        assert whole.keys() == other.keys()
        assert all(torch.equal(whole[key], other[key]) for key in other)
        again = tensor_parallel(drawn(LAYERS[name][0]), mesh)
        again.load_state_dict(layer.state_dict())  # of DTensors
        assert torch.equal(again(x, **options), layer(x, **options))
        third = tensor_parallel(drawn(LAYERS[name][0]), mesh)
        set_model_state_dict(third, whole, options=WHOLE)
        assert torch.equal(third(x, **options), layer(x, **options))
        assert torch.equal(copy.deepcopy(third)(x, **options), layer(x, **options))
        with pytest.raises(RuntimeError, match="size mismatch"):
            layer.load_state_dict({key: value[:1] for key, value in other.items()})


@pytest.mark.parametrize("number", few([2, 4, 3], 2))
def test_state_dicts_are_those_of_one_device(number):
    on_ranks(number, _state_dicts)


SAVED = NAMES if LONG else ["smol", "gqa width", "latent kv odd"]


def _save(mesh, folder):
    for name in SAVED:
        layer = tensor_parallel(drawn(LAYERS[name][0]), mesh)
        dcp.save(
            layer.state_dict(), checkpoint_id=f"{folder}/{name}", process_group=mesh.get_group()
        )


def _load(mesh, folder):
    for name in SAVED:
        layer = tensor_parallel(LAYERS[name][0]().double(), mesh)
        state = layer.state_dict()
        dcp.load(state, checkpoint_id=f"{folder}/{name}", process_group=mesh.get_group())
        layer.load_state_dict(state)
        expected = drawn(LAYERS[name][0]).state_dict()
        for key, value in get_model_state_dict(layer, options=WHOLE).items():
            assert torch.equal(value, expected[key]), (name, key)


def test_checkpoints_of_two_ranks_load_on_three_and_on_one(tmp_path):
    on_ranks(2, _save, str(tmp_path))
    on_ranks(3, _load, str(tmp_path))
    for name in SAVED:
        state = LAYERS[name][0]().double().state_dict()
        with pytest.warns(UserWarning, match="in a single process"):
            dcp.load(state, checkpoint_id=f"{tmp_path}/{name}", no_dist=True)
        expected = drawn(LAYERS[name][0]).state_dict()
        assert all(torch.equal(state[key], expected[key]) for key in expected)


def _meta(mesh):
    with torch.device("meta"):
        layer = LAYERS["mqa many"][0]()
    layer = tensor_parallel(layer.double(), mesh).to_empty(device="cpu")
    one = drawn(LAYERS["mqa many"][0])
    layer.load_state_dict(one.state_dict())
    torch.testing.assert_close(layer(inputs()), one(inputs()))


def test_layers_without_storage_are_split_and_then_loaded():
    on_ranks(2, _meta)


def _of_rank_0(mesh):
    torch.manual_seed(mesh.get_local_rank())
    layer = LAYERS["gqa norm"][0]()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    mine = {key: value.clone() for key, value in layer.state_dict().items()}
    return mine, get_model_state_dict(tensor_parallel(layer, mesh), options=WHOLE)


def test_weights_become_those_of_rank_0():
    (first, whole), (second, same) = on_ranks(2, _of_rank_0)
    for key in first:
        assert torch.equal(whole[key], first[key])
        assert torch.equal(same[key], first[key])
        assert not torch.equal(second[key], first[key])


def test_classes_keep_their_names():
    made = split_class(torch.nn.Linear, SplitLinear)
    assert made is split_class(torch.nn.Linear, SplitLinear)
    assert made.__name__ == "Linear"
    assert issubclass(made, torch.nn.Linear)
