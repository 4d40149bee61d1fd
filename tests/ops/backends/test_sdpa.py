"""torch's own kernel: what it cannot return, and when it needs no dense mask."""

import pytest
import torch

from regard import attend_partial


def test_a_part_needs_a_log_sum_exp():
    q = torch.randn(1, 2, 3, 4)
    with pytest.raises(ValueError, match="sdpa gives no log-sum-exp"):
        attend_partial(q, q, q, backend="sdpa")
