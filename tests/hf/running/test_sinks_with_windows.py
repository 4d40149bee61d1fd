"""Models with sinks and windows: under rules as masks no `L x S` cells are made.

transformers computes them with its eager forward alone, since its SDPA takes no sinks.
"""

import pytest
import torch

import regard.hf
from regard.hf.running.mask_rules import RuleMask
from regard.masks import Dense
from zoo import EXPERTS, HEADS_OF_8, ZOO, Kind, tokens

TYPES = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"] * 2}
SMALL = {**HEADS_OF_8, **TYPES, "num_hidden_layers": 4}
MODELS = {
    "gpt-oss": ZOO["gpt-oss"],
    "granite_swa": Kind("GraniteSWAForCausalLM", "GraniteSWAConfig", SMALL),
    "flint": Kind("FlintForCausalLM", "FlintConfig", {**SMALL, **EXPERTS, "num_experts": 3}),
    "mimo_v2_flash": Kind(
        "MiMoV2FlashForCausalLM",
        "MiMoV2FlashConfig",
        {**SMALL, "v_head_dim": 6, "n_routed_experts": 4, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 16, "n_group": 1, "topk_group": 1},
    ),
}
IDS = tokens(2, 13)


def masked(padding: str) -> torch.Tensor:
    mask = torch.ones_like(IDS)
    hidden = {"": slice(0, 0), "left": slice(0, 3), "right": slice(10, 13)}[padding]
    mask[1, hidden] = 0
    return mask


def no_cells(*args, **options):
    raise AssertionError("cells of L x S")


@torch.no_grad()
@pytest.mark.parametrize("padding", ["", "left", "right"])
@pytest.mark.parametrize("way", ["register", "register and install"])
@pytest.mark.parametrize("name", MODELS)
def test_no_cells_of_queries_by_keys_are_made(name, way, padding, monkeypatch):
    model, mask = MODELS[name].build("eager"), masked(padding)
    shown = mask.bool()
    wanted = model(input_ids=IDS, attention_mask=mask).logits[shown]
    model.set_attn_implementation(regard.hf.register())
    if way != "register":
        regard.hf.install(model)
    monkeypatch.setattr(RuleMask, "made", no_cells)
    monkeypatch.setattr(Dense, "__init__", no_cells)
    out = model(input_ids=IDS, attention_mask=mask).logits[shown]
    torch.testing.assert_close(out, wanted, rtol=0, atol=3e-5 * float(wanted.abs().max()))


@torch.no_grad()
def test_peak_memory_of_a_long_prompt_is_no_matrix(monkeypatch):
    """Attention of 2,048 tokens under a window of 64: no tensor has as many cells as scores."""
    heads, tokens_, largest = 2, 2048, 0

    class Counting(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            for each in out if isinstance(out, tuple | list) else (out,):
                if isinstance(each, torch.Tensor):
                    largest = max(largest, each.untyped_storage().nbytes())
            return out

    module = torch.nn.Module()
    module.is_causal, module.config, module.precision = True, None, "strict"
    q, k, v = torch.randn(3, 1, heads, tokens_, 8)
    from regard.hf.running.registering import attention

    with Counting():
        attention(module, q, k, v, None, sliding_window=64, s_aux=torch.zeros(heads))
    assert largest < heads * tokens_ * tokens_ * 4 / 4
