"""Calls of modules are recorded while a model runs, which may be stopped at one of them."""

import pytest
import torch
from torch import nn

from regard.convert.recording import input_of, recording


def test_calls_are_recorded_by_module():
    one, other = nn.Linear(3, 3), nn.Linear(3, 3)
    x, y = torch.randn(2, 2, 3)
    with recording([one, other]) as (first, second):
        other(one(x))
        one(y)
    one(y)  # after the block: not recorded
    assert [call.x is each for call, each in zip(first, (x, y), strict=True)] == [True, True]
    assert len(second) == 1 and torch.equal(second[0].x, first[0].out)


def test_a_run_is_stopped_at_the_module():
    outputs = []
    model = nn.Sequential(nn.Linear(3, 3), nn.Identity(), nn.Linear(3, 3))
    model[2].register_forward_hook(lambda module, given, out: outputs.append(out))
    x = torch.randn(2, 3)
    assert torch.equal(input_of(model[1], lambda: model(x)), model[0](x))
    assert outputs == [] and torch.equal(model[1](x), x)


def test_a_module_that_is_not_called_is_an_error():
    with pytest.raises(ValueError, match="Linear was not called"):
        input_of(nn.Linear(3, 3), lambda: None)
