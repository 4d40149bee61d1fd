"""A model run with regard's layers computes the same, and is not changed."""

import pytest
import torch

from regard.compare import CANDIDATES, Runner
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
