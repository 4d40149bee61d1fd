"""Encoder-decoders made of two families that are usually alone."""

import pytest
import torch
import transformers as t

import regard.hf
from regard.hf.families.finding import find
from zoo import ENCODER, GPT2, SPECIAL, tokens

WRITER = {**ENCODER, **SPECIAL, "is_decoder": True, "add_cross_attention": True}
PAIRS = {
    "bert to bert": lambda: t.EncoderDecoderModel(
        encoder=t.BertModel(t.BertConfig(**ENCODER)),
        decoder=t.BertLMHeadModel(t.BertConfig(**WRITER)),
    ),
    "roberta to roberta": lambda: t.EncoderDecoderModel(
        encoder=t.RobertaModel(t.RobertaConfig(**ENCODER)),
        decoder=t.RobertaForCausalLM(t.RobertaConfig(**WRITER)),
    ),
    "bert to gpt2": lambda: t.EncoderDecoderModel(
        encoder=t.BertModel(t.BertConfig(**ENCODER)),
        decoder=t.GPT2LMHeadModel(t.GPT2Config(**GPT2, add_cross_attention=True)),
    ),
}


@pytest.fixture(params=PAIRS)
def model(request):
    torch.manual_seed(0)
    model = PAIRS[request.param]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(0.3 * torch.randn_like(parameter))
    model.config.decoder_start_token_id, model.config.pad_token_id = 1, 0
    return model


def given():
    ids, mask = tokens(2, 7), torch.ones(2, 7, dtype=torch.long)
    mask[1, 5:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def test_cross_attention_is_the_models_own(model):
    more = {"decoder_input_ids": tokens(2, 5)}
    with torch.no_grad():
        before = model(**given(), **more).logits
        report = regard.hf.install(model)
        after = model(**given(), **more).logits
    torch.testing.assert_close(after, before, atol=2e-5, rtol=2e-5)
    assert len(report.layers) == len(find(model).known)
    assert any("Cross" in type(m).__name__ or "cross" in n for n, m in find(model).known.items())


def test_the_same_text(model):
    config = t.GenerationConfig(
        decoder_start_token_id=1, pad_token_id=0, max_new_tokens=12, do_sample=False
    )
    before = model.generate(**given(), generation_config=config)
    regard.hf.install(model)
    assert model.generate(**given(), generation_config=config).equal(before)


def test_a_cache_without_room_for_the_other_side_is_refused():
    torch.manual_seed(0)
    model = PAIRS["bert to gpt2"]().eval()
    regard.hf.install(model)
    block = model.decoder.transformer.h[0].crossattention
    states = torch.randn(1, 3, 24)
    with pytest.raises(ValueError, match="EncoderDecoderCache, got DynamicCache"):
        block(states, encoder_hidden_states=states, past_key_values=t.DynamicCache())
