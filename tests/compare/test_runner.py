"""A model run with regard's layers computes the same, and is not changed."""

import pytest
import torch

from regard.compare import CANDIDATES, Runner, chosen, runner
from regard.compare.runner import Runners
from regard.compare.work import Work
from regard.hf import attention_modules, attention_of
from tiny import tiny, tokens


@pytest.mark.parametrize("family", ["llama 3 rope", "llama with biases", "mistral", "qwen2"])
def test_layers_of_the_modules_compute_the_same_as_the_model(family):
    model = tiny(family)
    layers = [attention_of(module) for module in attention_modules(model).values()]
    ids = tokens(2, 40)
    with torch.no_grad():
        wanted = model(input_ids=ids).logits
        runner = Runner(model, layers, cache=CANDIDATES[0].cache)
        hidden = torch.cat([runner.hidden(chunk) for chunk in ids.split(17, dim=1)], 1)
        torch.testing.assert_close(model.lm_head(hidden), wanted, atol=5e-5, rtol=1e-4)
    assert not any("forward" in vars(module) for module in model.modules())


@torch.no_grad()
def test_layers_are_converted_once_when_the_first_row_needs_them(texts, monkeypatch):
    model = tiny("llama")
    shipped = [attention_of(module) for module in attention_modules(model).values()]
    own, calls = runner.convert, []
    named = chosen(["int8", "mqa", "mha", "gqa"])
    monkeypatch.setattr(
        runner, "convert", lambda *given, **named: calls.append(given[1]) or own(*given, **named)
    )
    runners = Runners(model, shipped, named, texts.calibration, torch.float32, rollback=0)
    work = Work(lambda *given: None, total=0)
    assert len(runners.missing) == 2  # two key heads have no divisor between 1 and themselves
    found = {each.key: runners.of(each, work) for each in named[:2]}
    assert found["shipped"].layers == found["int8"].layers == shipped and not calls
    found |= {each.key: runners.of(each, work) for each in named[2:]}
    assert [len(each) for each in calls] == [2] and not runners.missing
    assert found["mqa"].layers[0].kind == "MQA" and found["mha"].layers[0].kind == "MHA"
    assert "no divisor" in found["gqa"]
