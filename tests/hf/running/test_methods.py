"""Modules that hand their heads to a method of their own."""

import copy
import pickle

import pytest
import torch
import transformers

import regard.hf
from regard.hf.running import registering

SIZES = {"vocab_size": 61, "bos_token_id": 1, "eos_token_id": 2}
GPTJ = {**SIZES, "n_embd": 16, "n_layer": 2, "n_head": 4, "rotary_dim": 2, "n_positions": 64}
JAPANESE = {**SIZES, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
MODELS = {"GPTJ": GPTJ, "CodeGen": GPTJ, "GPTNeoXJapanese": JAPANESE}


def built(name):
    torch.manual_seed(3)
    config = getattr(transformers, f"{name}Config")(**MODELS[name])
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for each in model.parameters():
            each.add_(0.3 * torch.randn(each.shape))
    model.generation_config.eos_token_id = None
    return model


def run(model, left=2):
    ids = torch.tensor([[5, 6, 7, 8, 9, 10], [7, 9, 5, 11, 6, 5]])
    valid = torch.ones_like(ids)
    valid[0, :left] = 0
    return model(input_ids=ids, attention_mask=valid).logits[valid.bool()], ids, valid


@pytest.fixture(params=MODELS)
def model(request):
    return built(request.param)


def test_logits_text_and_gradients_are_the_same_and_come_from_attend(model, monkeypatch):
    before, ids, valid = run(model)
    options = {"attention_mask": valid, "max_new_tokens": 8, "do_sample": False}
    text = model.generate(ids, **options)
    before.square().mean().backward()
    grads = {name: each.grad for name, each in model.named_parameters()}
    calls, own = [], registering.attended
    monkeypatch.setattr(
        registering, "attended", lambda *args, **given: calls.append(1) or own(*args, **given)
    )
    report = regard.hf.install(model)
    assert len(report.called) == 2
    assert not report.left_alone
    calls.clear()
    after, *_ = run(model)
    assert len(calls) == 2
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)
    assert model.generate(ids, **options).equal(text)
    model.zero_grad()
    after.square().mean().backward()
    for name, each in model.named_parameters():
        torch.testing.assert_close(each.grad, grads[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_calls_itself_and_uninstall_restores(model, copied):
    before, *_ = run(model)
    regard.hf.install(model)
    twin = copied(model)
    attention = next(each for each in twin.modules() if registering.METHOD in vars(each))
    own = vars(attention)[registering.METHOD]
    assert own.func is registering.attend
    assert own.args == (attention,)
    regard.hf.uninstall(model)
    assert not any(registering.METHOD in vars(each) for each in model.modules())
    torch.testing.assert_close(run(model)[0], before, rtol=0, atol=0)


def test_dropout_of_training_is_that_of_the_module():
    model = built("GPTJ")
    regard.hf.install(model)
    modules = [each for each in model.modules() if registering.METHOD in vars(each)]
    for each in modules:
        each.attn_dropout.p = 1 - 1e-9
    hidden = torch.randn(1, 3, 16)
    places = torch.arange(3)[None]
    out = modules[0].train()(hidden, position_ids=places)[0]
    assert out.abs().max() == 0
    assert modules[0].eval()(hidden, position_ids=places)[0].abs().max() > 0


def test_a_method_that_hides_keys_itself_is_refused():
    config = transformers.GPTNeoConfig(
        vocab_size=61, hidden_size=16, num_layers=2, num_heads=2,
        attention_types=[[["global", "local"], 1]], window_size=3,
    )  # fmt: skip
    with pytest.raises(ValueError, match="GPTNeoAttention"):
        regard.hf.install(transformers.GPTNeoForCausalLM(config).eval())


def test_other_modules_have_no_such_method():
    assert not registering.can_attend(torch.nn.Linear(2, 2))
