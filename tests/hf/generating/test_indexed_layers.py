"""Sparse attention whose indexer selects keys for each query: models of transformers and caches."""

import pytest
import torch
import transformers

import regard
import regard.hf
from zoo import EXPERTS, Kind, tokens

LATENT = {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12, "kv_lora_rank": 16}
# with few heads, keys may have the same score, 0, of which any may be selected
INDEXER = {"index_topk": 3, "index_n_heads": 32, "index_head_dim": 16, "head_dim": 8}
SMALL = {
    **LATENT,
    **INDEXER,
    **EXPERTS,
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "mlp_layer_types": ["dense"] * 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    "n_routed_experts": 4,
    "pad_token_id": 0,
    "eos_token_id": None,
}
SHARING = {
    "kv_source_layers": [0, 1, 0, 1],
    "no_rope_layers": [1, 0, 1, 0],
    "indexer_types": ["full", "full", "shared", "full"],
    "model_type": "mistral_large4_text",
}
EYES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
EYES |= {"num_attention_heads": 2, "image_size": 16, "patch_size": 8}
ROUTED = {"n_group": 2, "topk_group": 1}
MODELS = {
    "deepseek_v32": Kind(
        "DeepseekV32ForCausalLM", "DeepseekV32Config", {**SMALL, **ROUTED, "q_lora_rank": 16}
    ),
    # two layers read the latents of earlier ones; one of these has an indexer of its own
    "mistral_large4": Kind(
        "MistralLarge4ForConditionalGeneration",
        "MistralLarge4Config",
        {"text_config": SMALL | SHARING, "vision_config": {**EYES, "model_type": "pixtral"}},
    ),
}


def is_old(kind: Kind) -> bool:
    """Whether transformers has no such model, or its layers are of a type that it dropped later."""
    if not kind.is_here:
        return True
    config = getattr(transformers, kind.config)(**kind.options)
    return "deepseek_sparse_attention" in (getattr(config, "layer_types", None) or ())


HERE = [
    pytest.param(kind, id=name, marks=pytest.mark.skipif(is_old(kind), reason="old"))
    for name, kind in MODELS.items()
]
ROWS = torch.tensor([[0, 0, 5, 6, 7, 9, 9], [8, 7, 5, 4, 2, 11, 12]])


def decoder(model):
    return getattr(model.model, "language_model", model.model)


def write(model, cache=None, **options):
    given = {} if cache is None else {"past_key_values": cache}
    given |= {"attention_mask": (ROWS != 0).long(), "max_new_tokens": 9, "do_sample": False}
    return model.generate(ROWS, disable_compile=True, **given, **options)


@torch.no_grad()
@pytest.mark.parametrize("way", ["register", "install"])
@pytest.mark.parametrize("kind", HERE)
def test_the_selected_keys_are_attended_to(kind, way):
    model, mask = kind.build("eager"), (ROWS != 0).long()
    wanted = model(input_ids=ROWS, attention_mask=mask).logits[mask.bool()]
    full = kind.build("eager")
    full.load_state_dict(model.state_dict())
    for layer in decoder(full).layers:
        if layer.self_attn.indexer is not None:
            layer.self_attn.indexer.index_topk = 99
    assert not torch.allclose(full(input_ids=ROWS, attention_mask=mask).logits[mask.bool()], wanted)
    if way == "register":
        model.set_attn_implementation(regard.hf.register())
    else:
        regard.hf.install(model)
    out = model(input_ids=ROWS, attention_mask=mask).logits[mask.bool()]
    torch.testing.assert_close(out, wanted, rtol=0, atol=3e-5 * float(wanted.abs().max()))


@pytest.mark.parametrize(("cache", "options"), [("growing", {}), ("static", {"max_length": 40})])
@pytest.mark.parametrize("kind", HERE)
def test_the_same_text_with_padding_and_with_beams(kind, cache, options):
    model = kind.build("eager")
    greedy, beams = write(model), write(model, num_beams=3)
    regard.hf.install(model)
    assert write(model, regard.hf.cache(model, cache, **options)).equal(greedy)
    assert write(model, regard.hf.cache(model, cache, **options), num_beams=3).equal(beams)


@torch.no_grad()
@pytest.mark.parametrize("kind", HERE)
def test_a_cache_is_cut_forked_saved_and_reordered_with_the_keys_of_indexers(kind, tmp_path):
    model = kind.build("eager")
    regard.hf.install(model)
    ids, more = tokens(2, 11), tokens(2, 12)[:, 11:]
    held = regard.hf.cache(model, "growing")
    model(input_ids=ids, past_key_values=held)
    held.save(tmp_path / "held")
    loaded = regard.hf.cache(model, "growing")
    loaded.load(tmp_path / "held")
    swapped = held.fork()
    swapped.reorder(torch.tensor([1, 0]))
    wanted = model(input_ids=torch.cat([ids[:, :8], more], 1), use_cache=False).logits[:, -1]
    for cache, rows in ((held, [0, 1]), (loaded, [0, 1]), (swapped, [1, 0])):
        cache.truncate(8)
        assert {each.length for each in cache.caches} == {8}
        out = model(input_ids=more[rows], past_key_values=cache).logits[:, -1]
        torch.testing.assert_close(out, wanted[rows], rtol=0, atol=1e-4)
        cache.reset()
        assert cache.get_seq_length() == cache.caches[-1].length == 0


@torch.no_grad()
@pytest.mark.parametrize("kind", HERE)
def test_a_call_that_fails_leaves_the_keys_of_indexers_as_they_were(kind, monkeypatch):
    model = kind.build("eager")
    regard.hf.install(model)
    cache = regard.hf.cache(model, "growing")
    model(input_ids=tokens(2, 7), past_key_values=cache)

    def broken(*args, **given):
        raise RuntimeError("broken")

    monkeypatch.setattr(decoder(model).layers[-1].self_attn.o_proj, "forward", broken)
    with pytest.raises(RuntimeError, match="broken"):
        model(input_ids=tokens(2, 1), past_key_values=cache)
    assert {each.length for each in cache.caches} == {7}


@torch.no_grad()
@pytest.mark.parametrize("kind", HERE)
def test_codes_hold_latents_and_not_the_keys_of_indexers(kind):
    model = kind.build("eager")
    regard.hf.install(model)
    plain, codes = regard.hf.cache(model, "growing"), regard.hf.cache(model, "int8", group=8)
    ids = tokens(1, 9)
    wanted = model(input_ids=ids, past_key_values=plain).logits
    out = model(input_ids=ids, past_key_values=codes).logits
    assert codes.nbytes < plain.nbytes
    assert (out[:, 0] - wanted[:, 0]).norm() < 0.05 * wanted[:, 0].norm()
    assert type(codes.layers[0].index) is regard.KVCache


@pytest.mark.parametrize(
    ("cache", "options"),
    [("evicting", {}), ("paged", {}), (lambda: regard.SlidingCache(3), {})],
)
@pytest.mark.parametrize("kind", HERE)
def test_caches_that_drop_or_scatter_tokens_are_refused(kind, cache, options):
    with pytest.raises(ValueError, match="an indexer selects among all tokens"):
        regard.hf.cache(kind.build("eager"), cache, **options)
