"""How a cache is passed to a layer, found out from its signature and its calls."""

import pytest
import torch
from torch import nn

from regard_verify import check

LAWS = ["decode_equals_full", "chunked_prefill"]


class Past(nn.Module):
    """A cache of keys and values, called `past`: None before the first token."""

    top_left = False

    def __init__(self, size=16, heads=2):
        super().__init__()
        self.qkv, self.o_proj = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.heads = heads

    def forward(self, x, past=None):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if past is not None:
            k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
        new, total = q.size(2), k.size(2)
        first = 1 if self.top_left else total - new + 1
        future = torch.ones(new, total).triu(first).bool()
        weights = (q @ k.mT / q.size(-1) ** 0.5).masked_fill(future, -torch.inf).softmax(-1)
        return self.o_proj((weights @ v).transpose(1, 2).flatten(2)), (k, v)


class TopLeft(Past):
    top_left = True


@pytest.mark.parametrize(("made", "broken"), [(Past, False), (TopLeft, True)])
def test_a_past_that_may_be_none_is_a_cache(made, broken):
    report = check(made, quick=True, only=LAWS)
    assert report.inferred["cache"] == "past, tuple"
    assert ("decode_equals_full" in report.failed) == broken
    assert {each.law for each in report.asked} == set(LAWS)
