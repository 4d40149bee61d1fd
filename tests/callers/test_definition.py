"""The plain torch form of the callers against the loops of `oracle` and the layers in numpy."""

import pytest
import torch

import oracle
from callers.cell import CALLS
from callers.definition import Leaves
from callers.judging import allowed, largest, wide
from callers.programs import drawn
from callers.table import Found

KINDS = [name for name in CALLS if name.startswith("eager") and name.endswith("float64")]
SMALL = [name for name in KINDS if "long" not in name and "alone" not in name]


@pytest.mark.parametrize("name", SMALL)
def test_attention_is_what_the_loops_say(name):
    program = CALLS[name].build()
    leaves = wide(program.leaves())
    q, k, v = (leaves[each] for each in "qkv")
    shape = (*q.shape[:3], k.shape[2])
    keep = program.keep.expand(shape).tolist()
    added = program.bias(leaves)
    bias = None if added is None else added.detach().expand(shape).tolist()
    judged = oracle.attention(
        q.tolist(),
        k.tolist(),
        v.tolist(),
        visible=lambda b, h, i, j: keep[b][h][i][j],
        bias=None if bias is None else lambda b, h, i, j: bias[b][h][i][j],
        sinks=leaves["sinks"].tolist() if "sinks" in leaves else None,
        **program.row.given,
    )
    torch.testing.assert_close(
        program.define(leaves).detach(),
        torch.tensor(judged.out, dtype=torch.float64),
        rtol=0,
        atol=1e-13,
    )
    bound = program.bound(leaves, torch.float64)
    top = v.abs().max().item()
    assert bound == pytest.approx(2 * 2**-53 * top * (1 + judged.largest))


@pytest.mark.parametrize("seed", range(3))
def test_the_bound_of_a_layer_holds_for_any_order_of_sums(seed):
    """And is less than a hundredth of the error of inputs that are rounded to 10 bits."""
    program = CALLS["SelfAttention"].build()
    inputs = drawn(*program.inputs[0].shape, seed=9 + seed, dtype=torch.float32)
    leaves = {**{name: each.detach() for name, each in program.leaves().items()}, "x": inputs}
    right = program.define(wide(leaves))
    bound = allowed(program, Found({"out": right.float()}, leaves), "out", right)
    generator = torch.Generator().manual_seed(1)
    for _ in range(200):
        permuted = _in_another_order(leaves, generator)
        assert largest(program.define(permuted) - right) <= bound
    rounded = {**leaves, "x": inputs * (1 + 2.0**-10)}
    assert largest(program.define(rounded) - right) > 100 * bound


def _in_another_order(leaves: Leaves, generator: torch.Generator) -> Leaves:
    """The same layer of one head, with the channels of its inputs and of its head permuted."""
    hidden, head = (torch.randperm(n, generator=generator) for n in (32, 16))
    queries, keys, values = (leaves[f"layer.{name}_proj.weight"][:, hidden] for name in "qkv")
    return {
        "x": leaves["x"][..., hidden],
        "layer.q_proj.weight": queries[head],
        "layer.k_proj.weight": keys[head],
        "layer.v_proj.weight": values,
    }
