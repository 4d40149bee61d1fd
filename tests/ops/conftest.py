"""What tests of operations share: blocks of another size."""

import pytest

from blocks import BLOCKS
from regard.ops import blocks as planned
from regard.ops.backends import blocked


@pytest.fixture(params=BLOCKS, ids="blocks of {}".format)
def blocks(request, monkeypatch):
    """Blocks that divide nothing, or are queries, or are larger than some tests' sequences."""
    monkeypatch.setattr(blocked, "BLOCK", request.param)
    monkeypatch.setattr(planned, "GAP", 2)
    monkeypatch.setattr(planned, "SHORT", 2)
    return request.param
