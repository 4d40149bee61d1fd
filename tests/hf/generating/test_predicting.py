"""The hidden states and the head of a model, run apart, give the logits of the whole."""

import pytest
import torch
import torch.nn.functional as F
import transformers

from regard.convert.measuring import divergence
from regard.hf.generating.predicting import hidden_states, logits_of, losses_of

SIZES = {
    "vocab_size": 13,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
}
HEADS = {  # what a head's logits become before they are returned
    "llama": ("Llama", {}),
    "capped": ("Gemma2", {"final_logit_softcapping": 0.3}),
    "scaled up": ("Cohere", {"logit_scale": 3.0}),
    "scaled down": ("Granite", {"logits_scaling": 5.0}),
    "with cross-attentions": ("GPT2", {"n_embd": 8, "n_head": 2, "n_layer": 1}),
}
LM_HEADS = ("GPT2",)  # whose classes end so


def model_of(name):
    torch.manual_seed(0)
    family, extra = HEADS[name]
    extra = {**extra, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = getattr(transformers, f"{family}Config")(**SIZES, **extra)
    end = "LMHeadModel" if family in LM_HEADS else "ForCausalLM"
    return getattr(transformers, f"{family}{end}")(config).eval()


@pytest.mark.parametrize("name", HEADS)
def test_two_halves_are_the_whole(name):
    model, tokens = model_of(name), torch.randint(3, 13, (2, 7))
    with torch.no_grad():
        whole = model(input_ids=tokens, use_cache=False).logits
        halves = logits_of(model, hidden_states(model, tokens))
    torch.testing.assert_close(halves, whole, rtol=0, atol=1e-6)
    assert float(whole.abs().max()) > 1e-3
    with torch.no_grad():
        again = model(input_ids=tokens, use_cache=False).logits
    assert torch.equal(again, whole)  # the model is as it was


def test_a_cap_on_the_logits_counts_when_a_student_is_compared():
    student, teacher = model_of("capped"), model_of("capped")
    ours, theirs = torch.randn(2, 1, 3, SIZES["hidden_size"])
    for model in (student, teacher):
        model.lm_head.weight.data.mul_(50.0)
    capped = divergence(student, ours, teacher, theirs)
    student.config.final_logit_softcapping = teacher.config.final_logit_softcapping = None
    assert 0 < capped < 0.5 * divergence(student, ours, teacher, theirs)


@pytest.mark.parametrize("length", [2, 257, 300])
def test_losses_are_of_the_token_that_follows(length):
    model, tokens = model_of("llama"), torch.randint(3, 13, (length,))
    with torch.no_grad():
        logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1]
        losses = losses_of(model, hidden_states(model, tokens[None])[0], tokens)
    wanted = F.cross_entropy(logits, tokens[1:], reduction="none")
    torch.testing.assert_close(losses, wanted, rtol=1e-5, atol=1e-6)
