"""Maps of models' attention equal transformers' own weights, and the output keeps its bits."""

import copy
import threading

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    BartConfig,
    BartModel,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
)

import regard.hf
import regard.see.row_weights
from regard import (
    Alibi,
    Attention,
    Causal,
    GroupedQueryAttention,
    KVCache,
    LatentKVAttention,
    MultiHeadLatentAttention,
    Padding,
    Rotary,
    SlidingCache,
    SlidingWindow,
    attend,
)
from regard.convert import as_latent
from regard.ops.observed import CALLS
from regard.see import attention
from tiny import SIZES, tiny, tokens

WINDOWED = ["sliding_attention", "full_attention"]
MLA = {
    "kv_lora_rank": 12,
    "q_lora_rank": 10,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "num_key_value_heads": 4,
    "head_dim": 4,
    "first_k_dense_replace": 2,
}
OTHERS = {
    "gemma2": lambda: Gemma2ForCausalLM(
        Gemma2Config(
            **SIZES, sliding_window=5, layer_types=WINDOWED, attn_logit_softcapping=3.0
        )
    ),
    "gpt-oss": lambda: GptOssForCausalLM(
        GptOssConfig(
            **SIZES, sliding_window=5, layer_types=WINDOWED, num_local_experts=2,
            num_experts_per_tok=1,
        )
    ),
    "deepseek": lambda: DeepseekV3ForCausalLM(DeepseekV3Config(**(SIZES | MLA))),
}  # fmt: skip


def build(name):
    """A tiny model whose scores are far from equal."""
    if name not in OTHERS:
        return tiny(name)
    torch.manual_seed(0)
    model = OTHERS[name]().eval()
    with torch.no_grad():
        for each in model.parameters():
            each.copy_(torch.randn_like(each) * (0.5 if each.dim() > 1 else 1.0))
    return model


def by_transformers(model, ids):
    """All weights as transformers' own eager attention has them, `[layers, B, H, L, S]`."""
    eager = copy.deepcopy(model)
    if not isinstance(eager, GptOssForCausalLM):  # torch multiplies its experts in float32 alone
        eager.double()
    regard.hf.uninstall(eager)
    eager.set_attn_implementation("eager")
    with torch.no_grad():
        return torch.stack(eager(ids, output_attentions=True).attentions).double()


FAMILIES = ["llama", "gemma3", *OTHERS]


@pytest.mark.parametrize("name", FAMILIES)
def test_maps_are_the_weights_of_transformers_own_attention(name):
    model, ids = build(name), tokens(2, 11)
    maps = attention(model, ids, layers=[0, 1], row=1)
    wanted = by_transformers(model, ids)[:, 1]
    torch.testing.assert_close(maps.weights.double(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_padding_on_the_left(name):
    model, ids = build(name), tokens(2, 11)
    padding = torch.ones_like(ids)
    padding[1, :4] = 0
    maps = attention(model, ids, layers=[0, 1], row=1, attention_mask=padding)
    wanted = by_transformers(model, ids[1:, 4:])[:, 0]  # rotated by as much less: the same angles
    torch.testing.assert_close(maps.weights[:, :, 4:, 4:].double(), wanted, rtol=1e-4, atol=1e-5)
    assert not maps.weights[..., :4][:, :, 4:].any()
    assert maps.sink_share.mean() > 0.05, "the first token that is not padding"


@pytest.mark.parametrize("name", FAMILIES)
def test_queries_after_a_cache_read_all_keys(name):
    model, ids = build(name), tokens(1, 11)
    regard.hf.install(model)
    cache = regard.hf.cache(model)
    with torch.no_grad():
        model(ids[:, :8], past_key_values=cache)
    held = cache.get_seq_length()
    maps = attention(model, ids[:, 8:], layers=[0, 1], past_key_values=cache)
    assert cache.get_seq_length() == held == maps.past == 8
    wanted = by_transformers(model, ids)[:, 0, :, 8:]
    torch.testing.assert_close(maps.weights.double(), wanted, rtol=1e-4, atol=1e-5)
    assert maps.queries == (8, 9, 10)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_cache_of_transformers_with_windows(name):
    model, ids = build(name), tokens(1, 11)
    with torch.no_grad():
        cache = model(ids[:, :8], use_cache=True).past_key_values
    maps = attention(model, ids[:, 8:], queries=[-1], past_key_values=cache)
    assert cache.get_seq_length() == 8
    wanted = by_transformers(model, ids)[:, 0, :, -1:]
    torch.testing.assert_close(maps.weights.double(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_looking_changes_no_bit(name):
    model, ids = build(name), tokens(2, 11)
    regard.hf.install(model)
    outputs, own = [], model.model.register_forward_hook(lambda *given: outputs.append(given[2][0]))
    before = {name: each.clone() for name, each in model.state_dict().items()}
    with torch.no_grad():
        model(ids)
    attention(model, ids, layers=[0, 1])
    own.remove()
    assert torch.equal(*outputs)
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())


def test_a_model_is_as_it_was_before():
    model, ids = tiny("llama"), tokens(1, 7)
    model.model.layers[0].self_attn.attention_dropout = 0.5
    model.train()
    state = torch.get_rng_state()
    with torch.no_grad():
        before = model(ids).logits
    torch.set_rng_state(state)
    kept = {id(m): dict(m.__dict__) for m in model.modules()}
    attention(model, ids, layers=[0])
    assert torch.equal(torch.get_rng_state(), state)
    assert CALLS == []
    assert kept == {id(m): dict(m.__dict__) for m in model.modules()}
    assert all(module.training for module in model.modules())
    with torch.no_grad():
        assert torch.equal(model(ids).logits, before)


def test_a_failure_leaves_the_model_as_it_was():
    model = tiny("llama")
    with pytest.raises(IndexError, match="heads=9 is not among 0 to 3"):
        attention(model, tokens(1, 5), heads=[9])
    assert CALLS == []
    assert "forward" not in vars(model.model.layers[0].self_attn)
    assert not model.model.layers[0].self_attn._forward_pre_hooks


def test_the_registered_attention_function():
    model, ids = tiny("llama"), tokens(1, 9)
    model.set_attn_implementation(regard.hf.register())
    maps = attention(model, ids, layers=[1])
    wanted = by_transformers(model, ids)[1:, 0]
    torch.testing.assert_close(maps.weights.double(), wanted, rtol=1e-4, atol=1e-5)


def test_bfloat16_is_seen_in_float32():
    model, ids = tiny("llama").bfloat16(), tokens(1, 9)
    maps = attention(model, ids, layers=[0])
    assert maps.weights.dtype == torch.float32
    assert (maps.weights.sum(-1) - 1).abs().max() < 1e-6
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    with torch.no_grad():
        wanted = eager(ids, output_attentions=True).attentions[0]
    torch.testing.assert_close(maps.weights, wanted.float(), rtol=0.05, atol=0.02)


def test_placed_latent_layers():
    model, ids = tiny("llama"), tokens(1, 9)
    wanted = by_transformers(model, ids)[:, 0]
    own = [regard.hf.attention_of(each) for each in regard.hf.attention_modules(model).values()]
    regard.hf.place(model, [as_latent(each) for each in own])
    maps = attention(model, ids, layers=[0, 1])
    torch.testing.assert_close(maps.weights.double(), wanted, rtol=1e-3, atol=1e-4)


LAYERS = {
    "MHA": lambda: Attention(24, 3, mask=Causal()),
    "GQA": lambda: GroupedQueryAttention(24, 4, 2, mask=Causal() & SlidingWindow(4)),
    "both ways": lambda: Attention(24, 3),
    "sinks": lambda: Attention(24, 3, mask=Causal(), sinks=True, softcap=2.0),
    "ALiBi": lambda: Attention(24, 3, mask=Causal(), score_bias=Alibi([0.5, 0.25, 0.1])),
    "a bias": lambda: Attention(24, 3, mask=Causal(), score_bias=torch.randn(3, 9, 9)),
    "MLA": lambda: MultiHeadLatentAttention(
        24, 3, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4,
        rope=Rotary(4), mask=Causal(),
    ),
    "absorbed": lambda: MultiHeadLatentAttention(
        24, 3, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4,
        rope=Rotary(4), mask=Causal(), form="absorbed",
    ),
    "latent": lambda: LatentKVAttention(
        24, 4, num_kv_heads=2, head_dim=6, kv_lora_rank=8, rope=Rotary(6), mask=Causal()
    ),
}  # fmt: skip


@pytest.mark.parametrize("rows", [1, 1 << 20], ids=["a row at a time", "at once"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_regard(name, rows, monkeypatch):
    monkeypatch.setattr(regard.see.row_weights, "BLOCK", rows)
    layer, x = LAYERS[name]().eval(), torch.randn(3, 9, 24)
    if getattr(layer, "sinks", None) is not None:
        torch.nn.init.normal_(layer.sinks)
    maps = attention(torch.nn.Sequential(torch.nn.Identity(), layer), x, layers=[0], row=2)
    wanted = layer.weights(x)[2:]
    torch.testing.assert_close(maps.weights, wanted.detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("make", [KVCache, lambda: SlidingCache(4)], ids=["growing", "sliding"])
def test_a_layer_with_a_cache(make):
    layer = GroupedQueryAttention(24, 4, 2, mask=Causal() & SlidingWindow(4)).eval()
    x, cache = torch.randn(1, 9, 24), make()
    with torch.no_grad():
        layer(x[:, :6], cache=cache)
        wanted = layer.weights(x)[0]
    maps = attention(layer, x[:, 6:], queries=[7, 8], cache=cache, names=list("abcdefghi"))
    assert cache.length == 6
    torch.testing.assert_close(maps.weights[0], wanted[:, [7, 8]], rtol=1e-4, atol=1e-6)
    assert set(dict(maps.top(0, 1, 8, 9))) == set("fghi")


def test_padding_of_a_layer_counts_for_nothing():
    layer = Attention(24, 3, mask=Causal()).eval()
    x, valid = torch.randn(2, 9, 24), torch.ones(2, 9, dtype=torch.bool)
    valid[1, :4] = False
    padded = attention(layer, x, row=1, mask=Padding(valid))
    alone = attention(layer, x[1:, 4:])
    for name in ("entropy", "distance", "sink_share", "previous_share", "self_share"):
        torch.testing.assert_close(getattr(padded, name), getattr(alone, name))


class Largest(TorchDispatchMode):
    """The elements of the largest tensor that an operator returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for each in torch.utils._pytree.tree_leaves(out):
            if isinstance(each, torch.Tensor):
                self.elements = max(self.elements, each.untyped_storage().nbytes() // 4)
        return out


@pytest.mark.parametrize("queries", [None, [5, -1]])
def test_nothing_is_as_large_as_queries_by_keys(queries, monkeypatch):
    monkeypatch.setattr(regard.see.row_weights, "BLOCK", 1 << 16)
    layer, length = Attention(8, 2, mask=Causal()), 700
    with Largest() as largest:
        maps = attention(layer, torch.randn(1, length, 8), queries=queries)
    assert largest.elements < length * length // 4
    assert maps.weights.shape[-2:] == ((2 if queries else 0), length)


def test_chosen_rows_and_columns():
    model, ids = tiny("llama"), tokens(1, 9)
    whole = attention(model, ids, layers=[0, 1])
    some = attention(model, ids, layers=[-1], heads=[3, 0], queries=[8, 2], keys=(1, 6))
    assert (some.layers, some.heads, some.queries, some.keys) == (
        (1,),
        (3, 0),
        (8, 2),
        (*range(1, 6),),
    )
    wanted = whole.weights[1:][:, [3, 0]][:, :, [8, 2], 1:6]
    assert torch.equal(some.weights, wanted)
    assert torch.equal(some.entropy, whole.entropy)
    assert attention(model, ids).weights.numel() == 0


def test_what_a_tokenizer_returns():
    model, ids = tiny("llama"), tokens(2, 5)
    padding = torch.ones_like(ids)
    padding[0, :2] = 0
    maps = attention(model, {"input_ids": ids, "attention_mask": padding}, layers=[0])
    assert not maps.weights[..., 2:, :2].any()
    assert maps.tokens == tuple(map(str, ids[0].tolist()))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"tokens": "text"}, TypeError, "got text; give tokenizer"),
        ({"tokens": torch.zeros(1, 2, 3).long()}, ValueError, r"got \(1, 2, 3\)"),
        ({"layers": [2]}, IndexError, "layers=2 is not among 0 to 1"),
        ({"queries": [-9]}, IndexError, "queries=-9 is not among 0 to 4"),
        ({"row": 1}, IndexError, "row=1 is not among 0 to 0"),
        ({"names": ["a"]}, ValueError, "names are of the 5 tokens"),
    ],
)
def test_what_is_refused(change, error, message):
    model = tiny("llama")
    with pytest.raises(error, match=message):
        attention(**{"model": model, "tokens": tokens(1, 5)} | change)


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")  # torch.compile's
def test_models_that_are_refused():
    sizes = {"d_model": 16, "vocab_size": 20, "encoder_layers": 1, "decoder_layers": 1}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    bart = BartModel(BartConfig(**sizes, **heads, encoder_ffn_dim=8, decoder_ffn_dim=8)).eval()
    with pytest.raises(ValueError, match="layer 2 reads another sequence, given as key_value"):
        attention(bart, tokens(1, 5) % 20)
    encoder = attention(bart.get_encoder(), tokens(1, 5) % 20, layers=[0])
    assert (encoder.weights.sum(-1) - 1).abs().max() < 1e-6
    with pytest.raises(ValueError, match="no attention module that regard knows"):
        attention(torch.nn.Linear(3, 3), torch.randn(1, 2, 3))
    layer = Attention(8, 2)
    with pytest.raises(ValueError, match="reads another sequence, given as context"):
        attention(layer, torch.randn(1, 2, 8), context=torch.randn(1, 2, 8))
    with pytest.raises(ValueError, match="ran twice"):
        attention(torch.nn.Sequential(layer, layer), torch.randn(1, 2, 8))
    with pytest.raises(ValueError, match="a compiled model"):
        attention(torch.compile(layer), torch.randn(1, 2, 8))


def test_calls_outside_of_layers_are_not_looked_at():
    layer = Attention(8, 2, mask=Causal())

    class Residual(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            heads = self.layer(x).unsqueeze(1)
            return attend(heads, heads, heads)

    x = torch.randn(1, 3, 8)
    found = attention(Residual(), x, layers=[0])
    assert torch.equal(found.weights, attention(layer, x, layers=[0]).weights)


def test_without_sinks_their_weight_is_exactly_0():
    assert not attention(Attention(8, 2, mask=Causal()), torch.randn(1, 50, 8)).learned_sink.any()


def test_no_cache_and_no_logits_that_are_not_wanted_are_made():
    model, given = tiny("llama"), []
    model.register_forward_pre_hook(lambda *each: given.append(each[2]), with_kwargs=True)
    attention(model, tokens(1, 5))
    attention(model, tokens(1, 5), use_cache=True, logits_to_keep=3)
    assert given == [
        {"use_cache": False, "logits_to_keep": 1},
        {"use_cache": True, "logits_to_keep": 3},
    ]


def test_other_threads_are_not_looked_at():
    layer, other = Attention(8, 2, mask=Causal()), Attention(8, 2)
    ran = []

    class Busy(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            thread = threading.Thread(target=lambda: ran.append(other(x)))
            thread.start()
            thread.join()
            return self.layer(x)

    assert attention(Busy(), torch.randn(1, 3, 8), layers=[0]).weights.shape == (1, 2, 3, 3)
    assert len(ran) == 1


def test_smollm2_as_transformers_has_it():
    try:
        model, tokenizer = regard.hf.smollm2()
    except (OSError, ImportError) as error:
        pytest.skip(f"SmolLM2 is not on this machine: {error}")
    inputs = tokenizer("The capital of France is Paris", return_tensors="pt")
    maps = attention(model, inputs, layers=[0, 15, 29])
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model(**inputs, output_attentions=True).attentions
    wanted = torch.cat([out[layer] for layer in (0, 15, 29)])
    torch.testing.assert_close(maps.weights, wanted, rtol=1e-3, atol=1e-5)
    assert maps.overview.shape == (30, 9, 6, 6)
