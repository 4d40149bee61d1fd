"""accelerate's hooks on single projections, offloaded or changed: they are called, never read."""

import pytest
import torch
from accelerate import cpu_offload, dispatch_model
from accelerate.hooks import ModelHook, add_hook_to_module

import regard.hf
from regard.convert import as_latent, regroup
from regard.convert.linear import weight_and_bias
from regard.hf import attention_modules, attention_of, place
from regard.hf.loading.offloaded import fetched
from tiny import tiny, tokens
from zoo import ZOO

CLOSE = {"atol": 2e-5, "rtol": 2e-5}


class Tripling(ModelHook):
    """A hook that changes what a projection computes."""

    def post_forward(self, module, output):
        return 3 * output


def deepseek():
    return ZOO["deepseek-v3"].build()


def latent_kv(family="llama"):
    model = tiny(family)
    layers = [as_latent(attention_of(module)) for module in attention_modules(model).values()]
    return place(model, layers)


def to_the_cpu(model):
    return cpu_offload(model, execution_device=torch.device("cpu"))


def to_the_disk(model, folder):
    parts = {name: "disk" for name, _ in model.named_children()}
    return dispatch_model(model, parts, offload_dir=folder, main_device="cpu")


MODELS = {
    "deepseek": deepseek,
    "latent KV": latent_kv,
    "latent KV, normed": lambda: latent_kv("qwen3"),
}
OFFLOADED = {"cpu": lambda model, folder: to_the_cpu(model), "disk": to_the_disk}


def written(model, ids, cache=None):
    """Logits of a prompt and of single tokens after it."""
    pieces = [ids[:, :5], *ids[:, 5:].split(1, dim=1)]
    with torch.no_grad():
        out = [model(piece, past_key_values=cache, use_cache=True).logits for piece in pieces]
    return torch.cat(out, dim=1)


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("where", OFFLOADED)
@pytest.mark.parametrize("kind", MODELS)
def test_an_offloaded_model_writes_what_it_wrote_in_memory(kind, where, ours, tmp_path):
    from transformers import DynamicCache

    def cache(model):
        return regard.hf.cache(model) if ours else DynamicCache(config=model.config)

    model, ids = MODELS[kind](), tokens(2, 9)
    with torch.no_grad():
        wanted = model(ids).logits
    regard.hf.install(model)
    torch.testing.assert_close(written(model, ids, cache(model)), wanted, **CLOSE)
    away = OFFLOADED[where](model, tmp_path)
    assert any(each.is_meta for each in away.parameters())
    torch.testing.assert_close(written(away, ids, cache(away)), wanted, **CLOSE)
    with torch.no_grad():
        torch.testing.assert_close(away(ids).logits, wanted, **CLOSE)


@pytest.mark.parametrize("where", OFFLOADED)
def test_sinks_that_are_offloaded_are_loaded_for_regard(where, tmp_path):
    model, ids = ZOO["gpt-oss"].build("eager"), tokens(2, 9)
    with torch.no_grad():
        wanted = model(ids).logits
        away = OFFLOADED[where](model, tmp_path)
        for change in (regard.hf.install, regard.hf.uninstall):
            change(away)
            torch.testing.assert_close(away(ids).logits, wanted, **CLOSE)
    assert next(iter(attention_modules(away).values())).sinks.is_meta


def test_regard_is_uninstalled_below_hooks_that_came_later():
    model, ids = ZOO["gpt-oss"].build("eager"), tokens(2, 9)
    with torch.no_grad():
        wanted = model(ids).logits
        regard.hf.install(model)
        to_the_cpu(model)
        regard.hf.uninstall(model)
        assert model(ids).logits.equal(wanted)


@pytest.mark.parametrize("name", ["kv_b_proj", "o_proj", "q_proj", "kv_a_proj"])
@pytest.mark.parametrize("kind", ["deepseek", "latent KV"])
def test_a_projection_whose_forward_was_replaced_is_called(kind, name):
    """In prefill and in decoding alike; replaced by a hook, and by hand."""
    model, ids = MODELS[kind](), tokens(2, 9)
    model_name = {"q_proj": "q_b_proj", "kv_a_proj": "kv_a_proj_with_mqa"}.get(name, name)
    name = model_name if kind == "deepseek" else name
    regard.hf.install(model)
    before = written(model, ids, regard.hf.cache(model))
    for module in attention_modules(model).values():
        add_hook_to_module(module.get_submodule(name), Tripling())
    with torch.no_grad():
        wanted = model(ids).logits
    assert (wanted - before).abs().max() > 0.01
    torch.testing.assert_close(written(model, ids, regard.hf.cache(model)), wanted, **CLOSE)
    regard.hf.uninstall(model)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, wanted, **CLOSE)


@pytest.mark.parametrize("name", ["q_proj", "k_proj"])
def test_a_conversion_refuses_what_it_would_have_to_read(name):
    layer = attention_of(tiny("llama").model.layers[0].self_attn)
    add_hook_to_module(layer.get_submodule(name), Tripling())
    with pytest.raises(ValueError, match=f"{name} has a forward of its own"):
        weight_and_bias(layer, name)
    with pytest.raises(
        ValueError, match="merge adapters, undo quantisation and remove hooks first"
    ):
        as_latent(layer)
    plain = attention_of(tiny("llama").model.layers[0].self_attn)
    plain.k_proj.register_forward_hook(lambda module, given, out: 3 * out)
    with pytest.raises(ValueError, match="k_proj has forward hooks"):
        regroup(plain, 1, covariance=torch.eye(24))


def test_offloaded_numbers_are_read_where_they_are():
    model = tiny("llama")
    wanted = model.model.layers[0].self_attn.k_proj.weight.clone()
    to_the_cpu(model)
    layer = attention_of(model.model.layers[0].self_attn)
    assert torch.equal(weight_and_bias(layer, "k_proj")[0], wanted)
    assert torch.equal(fetched(layer.k_proj, "weight"), wanted)
