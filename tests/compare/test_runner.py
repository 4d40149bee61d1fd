"""A model run with regard's layers computes the same, and is not changed."""

import pytest
import torch

from regard.compare import CANDIDATES, Runner, chosen, runner
from regard.compare.runner import Runners, Work
from regard.convert.exact.expand import spell_out
from regard.hf import attention_modules, attention_of
from tiny import tiny, tokens


@pytest.mark.parametrize("family", ["llama 3 rope", "llama with biases", "mistral", "qwen2"])
def test_layers_of_the_modules_compute_the_same_as_the_model(family):
    model = tiny(family)
    layers = [attention_of(module) for module in attention_modules(model).values()]
    ids = tokens(2, 40)
    with torch.no_grad():
        wanted = model(input_ids=ids).logits
        for own in (None, layers):
            runner = Runner(model, own, cache=CANDIDATES[0].cache, rollback=1)
            hidden = torch.cat([runner.hidden(chunk) for chunk in ids.split(17, dim=1)], 1)
            torch.testing.assert_close(model.lm_head(hidden), wanted, atol=5e-5, rtol=1e-4)
            runner.truncate(39)
            torch.testing.assert_close(
                runner.step(ids[:, 39:]), wanted[:, 39:], atol=5e-5, rtol=1e-4
            )
    assert not any("forward" in vars(module) for module in model.modules())


@torch.no_grad()
def test_a_cache_without_windows_takes_no_rollback():
    runner = Runner(tiny("llama"), cache="growing")
    assert runner.hidden(tokens(1, 5)).shape[1] == runner.caches[0].length == 5


def test_a_runner_shares_the_weights_and_changes_no_configuration():
    model = tiny("llama")
    layers = [attention_of(module) for module in attention_modules(model).values()]
    before = model.config.to_dict()
    runner = Runner(model, [spell_out(layer) for layer in layers], cache="auto")
    assert runner.layers[0].kind == "MHA" and model.config.to_dict() == before
    own = {each.data_ptr() for each in model.parameters()}
    shared = [each.data_ptr() in own for name, each in runner.model.named_parameters()
              if "k_proj" not in name and "v_proj" not in name]  # fmt: skip
    assert all(shared) and len(own) > len(layers)


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
    assert [layer.kind for layer in found["int8"].layers] == [layer.kind for layer in shipped]
    assert not calls
    found |= {each.key: runners.of(each, work) for each in named[2:]}
    assert [len(each) for each in calls] == [2] and not runners.missing
    assert found["mqa"].layers[0].kind == "MQA" and found["mha"].layers[0].kind == "MHA"
    assert "no divisor" in found["gqa"]


def test_shares_of_a_step_lie_between_its_ends():
    seen = []
    work = Work(lambda *given: seen.append(given), total=30)
    work.begin("first", 10)
    work.begin("second", 20)
    for part in range(1, 5):
        work.part("layers", part, 4)
    work.end()
    assert seen == [
        ("first", 0, 30),
        ("second", 10, 30),
        ("layers: 1 of 4", 15, 30),
        ("layers: 2 of 4", 20, 30),
        ("layers: 3 of 4", 25, 30),
        ("layers: 4 of 4", 30, 30),
        ("done", 30, 30),
    ]
