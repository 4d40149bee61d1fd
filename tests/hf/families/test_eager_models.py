"""Models whose attention knows no AttentionInterface and has no config: known by a row each."""

import pytest
import torch
import transformers

import regard.hf
from regard.hf.families.table import FAMILIES

SIZES = {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"intermediate_size": 24, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES |= {"dropout": 0.0, "attention_dropout": 0.0, "max_position_embeddings": 64}
DECODER = {**SIZES, "d_model": 16, "num_layers": 2, "attention_heads": 2, "ffn_dim": 24}
DECODER |= {"decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 24}
DECODER |= {"encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 24}
BERT = {**SIZES, "is_decoder": True, "embedding_size": 16}
EAGER = {
    "XGLMAttention": ("XGLM", DECODER),
    "TrOCRAttention": ("TrOCR", DECODER),
    "MvpAttention": ("Mvp", DECODER | {"is_decoder": True}),
    "MegatronBertSelfAttention": ("MegatronBert", BERT),
    "RemBertSelfAttention": ("RemBert", BERT | {"input_embedding_size": 16}),
}


@pytest.fixture(params=EAGER)
def model(request):
    name, options = EAGER[request.param]
    torch.manual_seed(2)
    kind = getattr(transformers, f"{name}ForCausalLM")
    made = kind(getattr(transformers, f"{name}Config")(**options)).eval()
    made.generation_config.eos_token_id = None
    assert FAMILIES[request.param].folder
    return made


def run(model, padding):
    ids = torch.tensor([[5, 6, 7, 8, 9, 10], [7, 9, 5, 11, 6, 5]])
    valid = torch.ones_like(ids)
    if padding:
        valid[0, :2] = 0 if padding == "left" else 1
        valid[0, 4:] = 0 if padding == "right" else 1
    return model(input_ids=ids, attention_mask=valid).logits[valid.bool()], ids, valid


def test_logits_gradients_and_text(model):
    plain = {each: run(model, each)[0] for each in ("left", "right", "")}
    _, ids, valid = run(model, "left")
    options = {"attention_mask": valid, "max_new_tokens": 8, "do_sample": False}
    text, beams = model.generate(ids, **options), model.generate(ids, num_beams=2, **options)
    plain["left"].square().mean().backward()
    before = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    report = regard.hf.install(model)
    assert report.layers
    assert not report.left_alone
    for padding, expected in plain.items():
        torch.testing.assert_close(run(model, padding)[0], expected, rtol=1e-4, atol=1e-5)
    assert model.generate(ids, **options).equal(text)
    assert model.generate(ids, num_beams=2, **options).equal(beams)
    cached = model.generate(ids, past_key_values=regard.hf.cache(model), **options)
    assert cached.equal(text)
    model.zero_grad()
    run(model, "left")[0].square().mean().backward()
    for name, each in model.named_parameters():
        if name in before:
            torch.testing.assert_close(each.grad, before[name], rtol=1e-3, atol=1e-5)


def test_prompts_of_keys_are_refused():
    model = transformers.MvpModel(transformers.MvpConfig(**DECODER, use_prompt=True)).eval()
    regard.hf.install(model)
    with pytest.raises(ValueError, match="attn_prompt= would change the result"):
        model(input_ids=torch.tensor([[5, 6]]))
