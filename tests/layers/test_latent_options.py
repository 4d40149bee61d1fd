"""MLA with a gate, sinks, no rotation, scaled queries: transformers' classes in float64."""

import pytest
import torch
import transformers as t
from transformers.models.bailing_hybrid import modeling_bailing_hybrid as bailing
from transformers.models.hy_v4 import modeling_hy_v4 as hy
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.mistral4 import modeling_mistral4 as mistral

from forms import CACHES, additive, bound_of, float64, gradients, stepwise
from regard import (
    NO_ROPE,
    Causal,
    KVCache,
    MultiHeadLatentAttention,
    Padding,
    PositionScale,
    Rotary,
)

TOKENS = 9
LATENT = {"kv_lora_rank": 6, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 3}
SIZES = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 4, **LATENT}
PLAIN = {"rope_type": "default", "rope_theta": 50.0}
SCALED = {**PLAIN, "rope_type": "linear", "factor": 1.0}  # "default" rotates whole heads
SCALED |= {"llama_4_scaling_beta": 0.7, "original_max_position_embeddings": 3}
INDEXED = {"index_topk": 64, "index_n_heads": 2, "index_head_dim": 4}  # all of 9 tokens are chosen


def of(name):
    """A module of transformers, its angles, and the options of the layer that computes the same."""
    rope = Rotary(2, theta=50.0, pairing="pairs")
    match name:
        case "kimi":
            config = t.KimiLinearConfig(**SIZES, q_lora_rank=None)
            module, rotary = kimi.KimiLinearAttention(config, 0), None
            options = {"rope": NO_ROPE}
        case "mistral4":
            config = t.Mistral4Config(**SIZES, q_lora_rank=5, rope_parameters=dict(SCALED))
            module = mistral.Mistral4Attention(config, 0)
            rotary = mistral.Mistral4RotaryEmbedding(config)
            options = {"rope": rope, "q_lora_rank": 5, "query_scale": PositionScale(0.7, 3)}
        case "bailing":
            config = t.BailingHybridConfig(**SIZES, head_dim=2, rope_parameters=dict(PLAIN))
            module = bailing.BailingHybridAttention(config, 0)
            rotary = bailing.BailingHybridRotaryEmbedding(config)
            options = {"rope": rope, "gate": "head"}
        case "hy_v4":
            config = t.HYV4Config(**SIZES, **INDEXED, q_lora_rank=5, rope_parameters=dict(PLAIN))
            module = hy.HYV4Attention(config, 0)
            rotary = hy.HYV4RotaryEmbedding(config)
            options = {"rope": Rotary(2, theta=50.0), "q_lora_rank": 5, "gate": "channel"}
            options["sinks"] = True
    config._attn_implementation = "eager"
    eps = getattr(module.kv_a_layernorm, "variance_epsilon", None) or 1e-6
    return module.eval(), rotary, {**LATENT, **options, "norm_eps": eps, "mask": Causal()}


NAMES = ["kimi", "mistral4", "bailing", "hy_v4"]


def both(name):
    """A module, the layer with its parameters, and an input."""
    torch.manual_seed(7)
    module, rotary, options = of(name)
    for each in module.parameters():
        torch.nn.init.normal_(each, std=0.4)
    layer = MultiHeadLatentAttention(16, 4, **options)
    state = {key.replace("g_proj", "gate_proj"): x for key, x in module.state_dict().items()}
    layer.load_state_dict({k: x for k, x in state.items() if not k.startswith("indexer.")})
    return module, rotary, layer, torch.randn(2, TOKENS, 16)


def own(module, rotary, x, mask, positions):
    given = {"attention_mask": mask.expand(len(x), -1, -1, -1), "position_ids": positions}
    if rotary is not None:
        given["position_embeddings"] = rotary(x, positions)
    return module(x, **given)[0]


@pytest.mark.parametrize("form", ["expanded", "absorbed"])
@pytest.mark.parametrize("name", NAMES)
def test_it_is_transformers_class(name, form):
    with float64():
        module, rotary, layer, x = both(name)
        positions = torch.arange(TOKENS)[None]
        wanted = own(module, rotary, x, additive(TOKENS), positions)
        layer.form = form
        torch.testing.assert_close(layer(x), wanted, rtol=0, atol=2e-6)  # norms are in float32
        theirs, ours = gradients(module, wanted), gradients(layer, layer(x))
        for key, value in ours.items():
            other = theirs[key if key in theirs else key.replace("gate_proj", "g_proj")]
            torch.testing.assert_close(value, other, rtol=0, atol=2e-5, msg=key)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("form", ["expanded", "absorbed", "auto"])
@pytest.mark.parametrize("name", NAMES)
def test_a_sequence_in_pieces_is_the_whole(name, form, cache):
    with float64():
        _, _, layer, x = both(name)
        wanted = layer(x)
        layer.form = form
        out = stepwise(layer, x, CACHES[cache]())
        assert (out - wanted).abs().max() <= bound_of(cache)


@pytest.mark.parametrize("name", NAMES)
def test_padded_rows_are_transformers(name):
    with float64():
        module, rotary, layer, x = both(name)
        valid = torch.ones(2, TOKENS, dtype=torch.bool)
        valid[1, :3] = False
        positions = (valid.long().cumsum(1) - 1).clamp(min=0)
        wanted = own(module, rotary, x, additive(TOKENS, [0, 3]), positions)
        out = layer(x, mask=Padding(valid), positions=positions)
        torch.testing.assert_close(out[valid], wanted[valid], rtol=0, atol=2e-6)


def test_a_sink_takes_a_share_of_every_row_once_in_every_part():
    with float64():
        _, _, layer, x = both("hy_v4")
        sums = layer.weights(x).sum(-1)
        assert (sums < 1).all()
        layer.sinks.data.fill_(-1e9)
        torch.testing.assert_close(layer.weights(x).sum(-1), torch.ones_like(sums))


def test_its_code_and_its_shape_have_the_options():
    import regard
    from regard.plan import LayerShape
    from regard.plan.modules import shape_of
    from regard.plan.shapes import Workload
    from regard.plan.weights import parameters

    layer = both("hy_v4")[2]
    again = eval(repr(layer), vars(regard))
    assert {k: v.shape for k, v in again.state_dict().items()} == {
        k: v.shape for k, v in layer.state_dict().items()
    }
    shape: LayerShape = shape_of(layer)
    assert (shape.kind, shape.gate, shape.sinks) == ("MLA", "channel", True)
    assert parameters(shape, Workload(context=1)) == sum(x.numel() for x in layer.parameters())
    assert shape_of(both("mistral4")[2]).query_scale == "PositionScale(0.7, 3)"
    assert shape_of(both("bailing")[2]).gate == "head"


def test_keys_in_the_cache_do_not_depend_on_the_scale_of_queries():
    with float64():
        _, _, layer, x = both("mistral4")
        caches = [KVCache(), KVCache()]
        stepwise(layer, x, caches[0])
        layer.query_scale = PositionScale(9.0, 1)
        stepwise(layer, x, caches[1])
        first, second = (each.peek(x[:, None, :0, :8])[0].streams[0] for each in caches)
        assert torch.equal(first, second)
