"""What is not declared is found out: rotation, windows and projections of modules."""

import pytest
from torch import nn

from mutants import good
from regard_verify import check, understand


@pytest.mark.parametrize(
    ("pairing", "rotate"),
    [("halves", good.rotate), ("none", lambda q, k, v, past: (q, k, v))],
)
def test_rotation_of_a_layer(pairing, rotate):
    found = understand(good.Layer(good.LayerSteps(rotate=rotate)))
    assert found.conventions.pairing == pairing
    assert found.fixed == {"H": 4, "G": 2, "D": 8, "V": 8}
    assert found.conventions.cache_style == "tuple"


def test_windows_of_a_layer():
    found = understand(good.Layer(good.LayerSteps(window=3)))
    assert found.conventions.window == 3
    assert found.inferred["attends to"] == "a window of 3 keys"


def test_projections_of_all_kinds():
    """Three, one for all, one for all by head: the heads are the same."""

    class By(nn.Module):
        def __init__(self, by_head):
            super().__init__()
            self.num_heads, self.by_head = 4, by_head
            self.to_qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

        def forward(self, x):
            if self.by_head:
                parts = self.to_qkv(x).unflatten(-1, (4, 24)).transpose(1, 2).split(8, -1)
            else:
                parts = (good.split(y, 4) for y in self.to_qkv(x).split(32, -1))
            return self.out(good.merge(good.Steps().function()(*parts)))

    for by_head in (True, False):
        report = check(By(by_head), quick=True)
        assert report.inferred["heads"] == "4 query heads, 4 key heads, 8 channels each"
        assert report.failed == []
        assert {"oracle_forward", "named_heads"} <= {each.law for each in report.having("passed")}
