"""Weights of loaded models lie in huge pages, with what they were."""

import sys
from itertools import pairwise

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import regard.hf

SIZES = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2, "vocab_size": 99}


@pytest.fixture
def made():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=8)).eval()


@pytest.mark.skipif(sys.platform != "linux", reason="the system has no such advice")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loaded_weights_are_in_huge_pages_already(made, dtype, tmp_path):
    made.to(dtype).save_pretrained(tmp_path / "one")
    model, _ = regard.hf.load(tmp_path / "one", dtype=dtype)
    places = sorted((x.data_ptr(), x.nbytes) for x in model.parameters())
    gaps = [b - a - size for (a, size), (b, _) in pairwise(places)]
    assert all(0 <= gap < 64 for gap in gaps)  # one after the other
    model.save_pretrained(tmp_path / "two")
    for each in (model, regard.hf.load(tmp_path / "two", dtype=dtype)[0]):
        found = each.state_dict()
        assert found.keys() == made.state_dict().keys()
        assert all(found[name].equal(x) for name, x in made.state_dict().items())


@pytest.mark.skipif(sys.platform != "linux", reason="the system has no such advice")
def test_a_step_goes_on_after_its_weights_were_moved(made):
    regard.hf.install(made)
    cache, plain = regard.hf.cache(made), regard.hf.cache(made)
    steps = torch.arange(1, 7)[None]
    with torch.no_grad():
        for at, token in enumerate(steps.split(1, 1)):
            if at == 3:
                assert regard.hf.to_huge_pages(made) > 1 << 22
            found = made(token, past_key_values=cache).logits
        wanted = made(steps, past_key_values=plain).logits[:, -1:]
    torch.testing.assert_close(found, wanted)
