"""The plan: the tokens of each rank, the layout it chooses, what it counts."""

import pytest
import torch
from torch import nn

from layers import WINDOW, assert_same, attention, inputs, make
from ranks import on_ranks
from regard import Causal, Chunked, Padding, Prefix
from regard.distributed.context.parallel import context_parallel
from regard.distributed.context.plan import choose_layout
from regard.distributed.context.summing import sum_gradients
from regard.distributed.ranks import counted
from regard.masks import EVERYTHING
from token_shards import seed_of


def _plan(mesh):
    model = nn.ModuleDict({"a": attention(mask=WINDOW), "b": nn.Sequential(make("MLA window"))})
    plan = context_parallel(model, mesh, exchange="gather")
    whole = torch.arange(14).view(2, 7)
    own = plan.shard(whole)
    assert torch.equal(plan.gathered(own), whole)
    assert torch.equal(plan.gathered(own.mT, -2), whole.mT)
    assert plan.shards(7).lengths == (3, 4)
    assert own.shape[1] == plan.shards(7).lengths[plan.ranks.rank]
    assert plan.layers == (model["a"], model["b"][0])
    return repr(plan)


def test_a_plan_and_its_repr():
    assert on_ranks(2, _plan)[1] == (
        "ContextParallel(2 layers, rank 1 of 2, layout='contiguous', exchange='gather')"
    )


@pytest.mark.parametrize(
    ("masks", "layout"),
    [
        ([Causal()], "zigzag"),
        ([WINDOW, Causal() | Prefix(3)], "zigzag"),
        ([WINDOW, Causal() & Chunked(8)], "contiguous"),
        ([EVERYTHING, Chunked(8)], "contiguous"),
        ([Causal() & Padding(torch.ones(1, 4).bool())], "zigzag"),
    ],
)
def test_the_layout_that_is_chosen(masks, layout):
    assert choose_layout(masks) == layout


def _gradient_of_gathered(mesh):
    plan = context_parallel(make("GQA"), mesh)
    x = inputs(1, 5)
    own = plan.shard(x).requires_grad_()
    (plan.gathered(own) * seed_of(x) * (plan.ranks.rank + 1)).sum().backward()
    assert torch.equal(own.grad, plan.shard(seed_of(x) * 3))
    wrong = x[:, : 1 + plan.ranks.rank * 3]
    with pytest.raises(ValueError, match=r"here \[3, 2\] of 5 in layout='zigzag', got \[1, 4\]"):
        plan.gathered(wrong)


def test_gathered_tokens_have_gradients():
    on_ranks(2, _gradient_of_gathered)


def _counted(mesh, name, exchange, dtype):
    layer = make(name, dtype)
    plan = context_parallel(layer, mesh, exchange=exchange)
    mask = Padding(torch.arange(9) < torch.tensor([[9], [6]]))
    x = plan.shard(inputs(2, 9)).to(dtype).requires_grad_()
    with counted() as forward:
        out = layer(x, mask=mask)
    with counted() as backward:
        out.sum().backward()
    expected = plan.bytes_sent(2, 9, mask=mask, dtype=dtype)
    assert (forward.bytes, backward.bytes) == expected
    return backward.bytes


@pytest.mark.parametrize("exchange", ["ring", "gather"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_bytes_are_those_that_the_plan_counts(exchange, dtype):
    for name in ("GQA", "window", "MLA", "MLA absorbed", "latent KV"):
        assert sum(on_ranks(3, _counted, name, exchange, dtype))


def _elsewhere(mesh):
    layer, x = make("GQA"), inputs(2, 7)
    expected = layer(x)
    plan = context_parallel(layer, mesh)
    with torch.device("meta"):  # what has no device of its own would be made there
        out = plan.gathered(layer(plan.shard(x)))
        out.sum().backward()
        sum_gradients(layer, mesh)
    assert_same(out, expected)


def test_another_default_device_changes_nothing():
    on_ranks(2, _elsewhere)
