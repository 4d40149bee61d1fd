"""Which layers a plan changes, and what it refuses."""

import copy

import jaxtyping
import pytest
import torch
from torch import nn

from covering import few
from layers import LAYERS, assert_same, inputs, make
from ranks import on_ranks
from regard import (
    NTK,
    Attention,
    Dense,
    LatentKVAttention,
    Rotary,
)
from regard.distributed.context.parallel import context_parallel
from regard.distributed.context.summing import sum_gradients
from regard.distributed.tensor.parallel import tensor_parallel
from regard.masks import EVERYTHING
from session import LONG
from token_shards import on_one_device, seed_of


class Own(Attention):
    def forward(self, x):
        return x


def _hooked():
    layer = make("MLA")
    layer.kv_b_proj.register_forward_hook(lambda module, args, out: out)
    return layer


def _bound():
    layer = make("GQA")
    layer.forward = lambda x: x
    return layer


def _by_length():
    rope = Rotary(6, scaling=NTK(2.0, 4))
    return LatentKVAttention(12, 2, num_kv_heads=1, head_dim=6, kv_lora_rank=4, rope=rope)


REFUSED = [  # (what makes the module, options, what the error says)
    (lambda: nn.Linear(2, 2), {}, "Linear has no attention layer of regard"),
    (lambda: Own(8, 2), {}, "Own has a forward of its own"),
    (lambda: nn.Sequential(make("GQA"), _bound()), {}, "1 has a forward of its own"),
    (_hooked, {}, "MultiHeadLatentAttention has hooks on kv_b_proj"),
    (_by_length, {}, "whose frequencies depend on the length"),
    (lambda: make("GQA"), {"exchange": "star"}, "exchange is 'ring' or 'gather', got 'star'"),
    (lambda: make("GQA"), {"layout": "striped"}, "got 'striped'"),
    (lambda: "model", {}, "model_or_layer is a module, got str"),
]


def _refused(mesh, make_module, options, here):
    """The error of this rank, where only the ranks in `here` give what is refused."""
    jaxtyping.config.update("jaxtyping_disable", True)  # they raise before the library's errors
    refused = mesh.get_local_rank() in here
    module = make_module() if refused else make("GQA")
    before = dict(vars(module)) if isinstance(module, nn.Module) else {}
    with pytest.raises((TypeError, ValueError)) as caught:
        context_parallel(module, mesh, **(options if refused else {}))
    assert not before or vars(module).keys() == before.keys()
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_what_is_refused_on_every_rank(case):
    text = REFUSED[case][2]
    for here, said in (((0, 1), "every rank: "), ((1,), "rank 1: ")):
        one, other = on_ranks(2, _refused_case, case, here)
        assert one == other
        assert one[1].startswith(said)
        assert text in one[1]


def _refused_case(mesh, case, here):
    make_module, options, _ = REFUSED[case]
    return _refused(mesh, make_module, options, here)


def _others(mesh):
    layer = make("GQA")
    context_parallel(layer, mesh)
    with pytest.raises(ValueError, match="is context parallel already"):
        context_parallel(layer, mesh)
    chosen = "ring" if mesh.get_local_rank() else "gather"
    other = make("GQA")
    with pytest.raises(ValueError, match="differ in exchange: rank 0 gather, rank 1 ring"):
        context_parallel(other, mesh, exchange=chosen)
    assert "forward" not in vars(other)
    with pytest.raises(ValueError, match="differ in layers: rank 0 MHA"):
        context_parallel(make("MLA" if mesh.get_local_rank() else "MHA"), mesh)


def test_plans_that_differ_and_a_second_plan():
    on_ranks(2, _others)


def test_a_mesh_of_several_dimensions_is_refused():
    on_ranks(4, _several, mesh=(2, 2))


def _several(mesh):
    with pytest.raises(ValueError, match="mesh has one dimension"):
        context_parallel(make("GQA"), mesh)
    assert context_parallel(make("GQA"), mesh["b"]).ranks.size == 2


def test_every_kind_of_layer_is_found():
    assert on_ranks(2, _found) == [len(LAYERS)] * 2


def _found(mesh):
    model = nn.ModuleList([make(name) for name in LAYERS])
    twin = copy.deepcopy(model)
    assert len(context_parallel(twin, mesh).layers) == len(LAYERS)
    return len(context_parallel(model, mesh).layers)


def _heads_and_tokens(mesh, name, mask):
    """Heads split over one dimension of a mesh, tokens over the other."""
    layer, x = make(name), inputs(2, 7)
    out, truth = on_one_device(layer, x, mask=mask)
    tensor_parallel(layer, mesh["b"])
    plan = context_parallel(layer, mesh["a"])
    own = plan.shard(x).requires_grad_()
    found = layer(own, mask=mask)
    (found * plan.shard(seed_of(out))).sum().backward()
    sum_gradients(layer, mesh["a"])
    assert_same(plan.gathered(found.detach()), out)
    assert_same(plan.gathered(own.grad), truth["x"])
    for key, each in layer.named_parameters():
        module = layer.get_submodule(key.rpartition(".")[0])
        share = module.shares[key.rpartition(".")[2]]  # of padded heads, rows are zero
        assert_same(share.of_one_device(each.grad.full_tensor()), truth[key])


@pytest.mark.parametrize("name", few(LAYERS, 2))
def test_heads_split_over_other_ranks(name):
    keep = Dense(torch.rand(1, make(name).num_heads, 7, 7) < 0.5)
    for mask in (EVERYTHING, keep) if LONG else (keep,):
        on_ranks(4, _heads_and_tokens, name, mask, mesh=(2, 2))


def _same_ranks(mesh):
    layer = make("GQA")
    tensor_parallel(layer, mesh)
    with pytest.raises(ValueError, match=r"Attention has its heads split over ranks \[0, 1\]"):
        context_parallel(layer, mesh)
    layer = make("GQA")
    plan = context_parallel(layer, mesh)
    tensor_parallel(layer, mesh)
    with pytest.raises(ValueError, match="every rank: the layer has its heads split"):
        layer(plan.shard(inputs(1, 4)))


def test_heads_and_tokens_over_the_same_ranks_are_refused():
    on_ranks(2, _same_ranks)
