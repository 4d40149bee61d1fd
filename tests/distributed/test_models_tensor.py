"""Tensor parallel of transformers models against the model on one device.

The oracle is transformers' own attention, on one device.
"""

import functools
from pathlib import Path

import pytest
import torch
import transformers
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from ranks import on_ranks
from regard.cache_folder import cache_folder
from regard.convert import as_latent
from regard.distributed import counted, tensor_parallel
from regard.distributed.models_tensor import mlps
from regard.distributed.ranks import sum_bytes
from regard.hf import SMOLLM2, attention_modules, attention_of, cache, install, place, register
from session import LONG
from split_models import BUILDERS, SMALL, batch_of, model_of, same_gradients, trained

SPLIT = ["llama", "mistral", "qwen3", "gemma2", "gpt_oss", "deepseek"]
NEW = 5  # tokens generated


def gradients_of(model):
    """Gradients with the shapes of one device."""
    found = {}
    for name, each in model.named_parameters():
        path, _, own = name.rpartition(".")
        module, gradient = model.get_submodule(path), each.grad
        if hasattr(gradient, "full_tensor"):
            gradient = module.shares[own].of_one_device(gradient.full_tensor())
        found[name] = gradient
    return found


def _on_heads(mesh, families, registered):
    return [_one(mesh, model_of(family), registered) for family in families]


def _one(mesh, model, registered=False):
    model.set_attn_implementation(register()) if registered else install(model)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    assert tensor_parallel(model, mesh) is model
    batch = batch_of(9)
    logits, loss, _ = trained(model, batch)
    gradients = gradients_of(model)
    made = _generated(model, None), _generated(model, cache(model))
    whole = StateDictOptions(full_state_dict=True)
    after = get_model_state_dict(model, options=whole)
    assert after.keys() == before.keys() == model.state_dict().keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    return logits, loss, gradients, made


def _generated(model, cached):
    options = {} if cached is None else {"past_key_values": cached}
    with torch.no_grad():
        return model.eval().generate(
            batch_of(9)["input_ids"], max_new_tokens=NEW, do_sample=False, **options
        )


@functools.cache
def _expected(family):
    model = model_of(family)
    return *trained(model, batch_of(9)), _generated(model, None)


def _same(result, expected):
    torch.testing.assert_close(result[0], expected[0], atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(result[1], expected[1], atol=2e-6, rtol=1e-6)
    same_gradients(result[2], expected[2])
    for made in result[3]:
        assert torch.equal(made, expected[3])


CASES = [
    (2, SPLIT if LONG else ["llama", "gpt_oss", "deepseek"], False),
    (3, SPLIT if LONG else ["qwen3", "gemma2", "mistral"], False),
    (2, ["llama", "gpt_oss"], True),
]
if LONG:
    CASES.append((4, SPLIT, False))


@pytest.mark.parametrize(("number", "families", "registered"), CASES)
def test_logits_gradients_tokens_and_state(number, families, registered):
    for rank in on_ranks(number, _on_heads, families, registered):
        for family, result in zip(families, rank, strict=True):
            _same(result, _expected(family))


def _placed():
    model = model_of("llama").eval()
    layers = [as_latent(attention_of(each)) for each in attention_modules(model).values()]
    return place(model, layers).train()


def _of_placed(mesh):
    return _one(mesh, _placed())


def test_placed_latent_layers():
    model = _placed()
    expected = *trained(model, batch_of(9)), _generated(model, None)
    for result in on_ranks(2, _of_placed):
        _same(result, expected)


def _bytes(mesh, family):
    model = model_of(family)
    install(model)
    tensor_parallel(model, mesh)
    batch = batch_of(9)
    with counted() as forward:
        loss = model(batch["input_ids"], labels=batch["input_ids"]).loss
    with counted() as backward:
        loss.backward()
    return forward.bytes, backward.bytes


def test_one_sum_of_attention_and_one_of_the_mlp():
    once = sum_bytes(2 * 9 * 24 * 4, 2)
    assert on_ranks(2, _bytes, "llama") == [(4 * once, 4 * once)] * 2  # of two layers


def _saved(mesh, folder):
    model = model_of("llama")
    install(model)
    tensor_parallel(model, mesh)
    with torch.no_grad():
        other = {name: value + 1 for name, value in model_of("llama").state_dict().items()}
    model.load_state_dict(other)
    model.save_pretrained(folder)
    return (Path(folder) / "model.safetensors").exists()


def test_a_checkpoint_of_one_device_is_loaded_and_saved(tmp_path):
    assert on_ranks(3, _saved, str(tmp_path)) == [True] * 3
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    for name, value in model_of("llama").state_dict().items():
        assert torch.equal(read[name], value + 1), name


def _training(mesh, steps):
    torch.manual_seed(1)
    model = model_of("qwen3")
    if mesh is not None:
        install(model)
        tensor_parallel(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        batch = batch_of(9)
        loss = model(batch["input_ids"], labels=batch["input_ids"]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_training_is_that_of_one_device():
    expected = _training(None, 4)
    for losses in on_ranks(3, _training, 4):
        assert losses == pytest.approx(expected, rel=1e-4)
    assert expected[-1] < expected[0]


def _without_regard():
    return model_of("llama")


def _refused(family, install_first=True):
    def build():
        model = BUILDERS[family]()
        if install_first:
            install(model)
        return model

    return build


def _registered_mla():
    model = model_of("deepseek")
    model.set_attn_implementation(register())
    return model


def _adapted():
    model = model_of("llama")
    install(model)
    model.model.layers[1].mlp.up_proj = torch.nn.Sequential(model.model.layers[1].mlp.up_proj)
    return model


def _dropping():
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, attention_dropout=0.5))
    install(model)
    return model


def _t5():
    sizes = {"d_model": 8, "d_kv": 4, "num_heads": 2, "num_layers": 1, "d_ff": 8, "vocab_size": 9}
    config = transformers.T5Config(**sizes, dropout_rate=0.0)
    model = transformers.T5ForConditionalGeneration(config)
    install(model)
    return model


REFUSED = [
    (_without_regard, "does not run on regard; call regard.hf.install(model) first"),
    (_registered_mla, "does not run on regard; call regard.hf.install(model) first"),
    (_refused("gpt2"), "attn (GPT2Attention) projects queries, keys and values in one linear"),
    (_refused("phi3"), "self_attn (Phi3Attention) projects queries, keys and values in one"),
    (_refused("olmo2"), "self_attn (Olmo2Attention) norms all heads at once"),
    (_dropping, "drops attention weights, alike on all ranks"),
    (_adapted, "up_proj is a Sequential, not a plain nn.Linear; call this before adapters"),
    (_t5, "adds a bias of all heads to its scores"),
]


def _refusals(mesh):
    transformers.logging.set_verbosity_error()
    told = []
    for build, _ in REFUSED:
        model = build()
        with pytest.raises(ValueError, match="cannot be split") as caught:
            tensor_parallel(model, mesh)
        assert not any(hasattr(each, "full_tensor") for each in model.parameters())
        told.append(str(caught.value))
    model = model_of("llama")
    install(model)
    tensor_parallel(model, mesh)
    with pytest.raises(ValueError, match="is split already"):
        tensor_parallel(model, mesh)
    return told


def test_models_that_are_refused():
    for told in on_ranks(2, _refusals):
        for text, (_, expected) in zip(told, REFUSED, strict=True):
            assert expected in text


def test_mlps_of_the_plan_in_the_config():
    (first, _) = mlps(model_of("llama"))
    assert first == (
        "model.layers.0.mlp",
        ("model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"),
        "model.layers.0.mlp.down_proj",
    )
    assert mlps(model_of("gpt_oss")) == []  # experts are replicated


WEIGHTS = cache_folder() / SMOLLM2
LAYERS = {} if LONG else {"num_hidden_layers": 3}  # of 30


def _smollm2():
    transformers.logging.set_verbosity_error()
    options = {"dtype": torch.float32, **LAYERS}
    return transformers.AutoModelForCausalLM.from_pretrained(WEIGHTS, **options).train()


def _of_smollm2(mesh):
    return _one(mesh, _smollm2())


@pytest.mark.skipif(not WEIGHTS.is_dir(), reason="python -m regard.hf fetches the weights")
@pytest.mark.long
@pytest.mark.parametrize("number", [2, 3])
def test_nine_heads_on_three(number):
    model = _smollm2()
    logits, loss, gradients = trained(model, batch_of(9))
    made = _generated(model, None)
    for result in on_ranks(number, _of_smollm2):
        torch.testing.assert_close(result[0], logits, atol=1e-4, rtol=1e-5)  # logits up to 30
        torch.testing.assert_close(result[1], loss, atol=1e-5, rtol=1e-6)
        for name, gradient in gradients.items():
            error = (result[2][name] - gradient).abs().max() / gradient.abs().max()
            assert error < 1e-4, name
        assert all(torch.equal(each, made) for each in result[3])
