"""The plain torch form of the callers against the loops of `oracle` and the layers in numpy."""

import pytest
import torch

import oracle
from callers.cell import CALLS
from callers.judging import wide

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
