"""The merge of attention to each rank's tokens, against attention to all of them."""

import pytest
import torch

from ranks import on_ranks
from regard.distributed.decode.exchanging import bytes_of_parts, merged_over_ranks
from regard.distributed.ranks import Ranks, counted
from regard.ops.partial import Partial


def _merged(mesh, scores, values, sinks):
    ranks = Ranks(mesh)
    mine, v = scores[ranks.rank], values[ranks.rank]
    found = Partial(mine.softmax(-1).nan_to_num() @ v, mine.logsumexp(-1))
    with pytest.MonkeyPatch.context() as patch, counted() as sent:
        patch.setenv("REGARD_CHECK_BYTES", "1")
        out = merged_over_ranks(ranks, found, sinks)
    return out, sent.bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("number", [2, 3, 4])
def test_one_softmax_over_all_ranks(number, dtype):
    scores = torch.randn(number, 2, 3, 4, 5, dtype=dtype) * 4
    scores[0] = -torch.inf  # a rank whose keys are all hidden
    scores[:, 1, 2, 3] = -torch.inf  # a fully masked row
    values, sinks = torch.randn(number, 2, 3, 5, 6, dtype=dtype), torch.randn(3, dtype=dtype)
    joined = torch.cat([*scores, sinks[None, :, None, None].expand(2, 3, 4, 1)], -1).double()
    rows = torch.cat([*values, torch.zeros(2, 3, 1, 6)], 2).double()
    expected = joined.softmax(-1) @ rows
    results = on_ranks(number, _merged, scores, values, sinks)
    for out, sent in results:
        assert torch.equal(out, results[0][0])
        assert (out - expected).abs().max() < 20 * torch.finfo(dtype).eps
        size = bytes_of_parts((number - 1) * 2 * 3 * 4, 6, dtype)
        assert sent == size == (number - 1) * 2 * 3 * 4 * 7 * dtype.itemsize


def test_no_visible_key_at_all():
    scores, values = torch.full((2, 1, 1, 2, 3), -torch.inf), torch.randn(2, 1, 1, 3, 4)
    for out, _ in on_ranks(2, _merged, scores, values, None):
        assert out.tolist() == torch.zeros(1, 1, 2, 4).tolist()
