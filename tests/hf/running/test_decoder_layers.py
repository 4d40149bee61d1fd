"""Decoder layers of installed models for few tokens: the same hidden states, however called."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

pytest.importorskip("numba")

import transformers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import regard.hf
from decoders import (
    MODELS,
    SIZES,
    STEPPED,
    STEPS,
    TOKENS,
    assert_same,
    cache_for,
    logits_of,
    model_of,
)
from layers import scattered
from regard.convert import as_latent
from regard.hf.running import decoder_layers
from regard.hf.running.binding import function_of
from regard.hf.running.decoder_layers import bind_layers
from regard.ops.kernels import chaining


@pytest.fixture(params=["its layers", "all layers at once"])
def form(request):
    """How a model runs a step: some tests are of both ways, the others of the first."""
    return request.param


@pytest.fixture(autouse=True)
def _form(request):
    way = request.getfixturevalue("form") if "form" in request.fixturenames else "its layers"
    if way == "its layers":
        request.getfixturevalue("layers_alone")


@pytest.fixture
def chains(monkeypatch):
    """The number of products in each chain that was run."""
    found, run = [], chaining.PreparedChain.run

    def recorded(self, *inputs):
        out = run(self, *inputs)
        found.append(self.length if out is not None else None)
        return out

    monkeypatch.setattr(chaining.PreparedChain, "run", recorded)
    return found


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_steps_compute_what_the_shipped_model_does(name, batch, chains):
    model = model_of(name)
    shipped = logits_of(model, batch=batch)
    report = regard.hf.install(model)
    assert report.decoder_layers == SIZES["num_hidden_layers"]
    assert "2 decoder layers on a CPU: few tokens by compiled code" in str(report)
    assert_same(logits_of(model, batch=batch), shipped)
    layers = SIZES["num_hidden_layers"]
    # a step that is repeated runs two chains in each layer: projections, and all after the heads
    last = [3, 3] if name in STEPPED else [2]
    assert chains[-len(last) * layers :] == last * layers
    assert 2 in chains
    assert None not in chains
    regard.hf.uninstall(model)
    assert logits_of(model, batch=batch).equal(shipped)


@pytest.mark.parametrize("kind", ["int8", "paged"])
def test_other_caches(kind, chains):
    model = model_of("Llama")
    regard.hf.install(model, linear=False)
    wanted = logits_of(model, regard.hf.cache(model, kind))
    assert chains == []
    regard.hf.install(model)
    assert_same(logits_of(model, regard.hf.cache(model, kind)), wanted)
    assert {*chains} <= {2, 3}
    assert len(chains) >= SIZES["num_hidden_layers"] * STEPS


def test_a_prompt_gradients_and_autocast_are_left_to_the_layer(chains):
    model = model_of("Llama")
    regard.hf.install(model)
    long = TOKENS.view(1, -1)
    with torch.no_grad():
        model(long)
        with torch.autocast("cpu"):
            model(long[:, :1])
    model(long[:, :1]).logits.sum().backward()
    assert model.model.layers[0].mlp.up_proj.weight.grad is not None
    assert chains == []


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("together", [5, 64])
def test_the_mlp_of_a_prompt_is_computed_some_tokens_at_a_time(name, together, monkeypatch):
    """Two rows of 12 tokens as five pieces, or at once: the same hidden states."""
    monkeypatch.setattr(decoder_layers, "TOGETHER", together)
    model = model_of(name)
    prompt, rows = TOKENS.reshape(-1)[:24].view(2, 12), []
    shipped = model(prompt).logits
    regard.hf.install(model)
    run = type(model.model.layers[0].mlp).forward

    def counted(self, x):
        rows.append(x.numel() // x.shape[-1])
        return run(self, x)

    monkeypatch.setattr(type(model.model.layers[0].mlp), "forward", counted)
    assert_same(model(prompt).logits, shipped)
    pieces = [5, 5, 5, 5, 4] if together == 5 else [24]
    assert rows == pieces * SIZES["num_hidden_layers"]


@pytest.mark.parametrize("place", ["mlp", "mlp.gate_proj", "mlp.act_fn", "input_layernorm",
                                   "post_attention_layernorm", "self_attn", "self_attn.q_proj",
                                   "self_attn.o_proj"])  # fmt: skip
def test_hooks_see_every_step_and_may_change_it(place, form):
    model = model_of("Llama")
    module = model.model.layers[1].get_submodule(place)

    def hooked():
        """Logits with a hook that halves the output, set after the first two tokens."""
        cache, calls = cache_for(model), []

        def halve(module, given, out):
            calls.append(1)
            return (out[0] / 2, *out[1:]) if isinstance(out, tuple) else out / 2

        with torch.no_grad():
            for token in TOKENS[:1, :2].split(1, dim=1):
                model(token, past_key_values=cache)
            handle = module.register_forward_hook(halve)
            outs = [model(x, past_key_values=cache).logits for x in TOKENS[:1, 2:6].split(1, dim=1)]
            handle.remove()
        assert len(calls) == 4
        return torch.cat(outs)

    wanted = hooked()
    regard.hf.install(model)
    assert_same(hooked(), wanted)


def test_hidden_states_and_weights_are_returned(form):
    model = model_of("Llama", attn_implementation="eager")
    with torch.no_grad():
        wanted = model(TOKENS[:1, :1], output_hidden_states=True, output_attentions=True)
        regard.hf.install(model)
        found = model(TOKENS[:1, :1], output_hidden_states=True, output_attentions=True)
    for name in ("hidden_states", "attentions"):
        assert len(found[name]) == len(wanted[name])
        for one, other in zip(found[name], wanted[name], strict=True):
            assert_same(one, other)


def test_hooks_that_stay_cost_no_new_plan(monkeypatch, chains):
    """transformers leaves hooks on attention modules after a call that returned hidden states."""
    model = model_of("Llama")
    regard.hf.install(model)
    with torch.no_grad():
        model(TOKENS[:1, :1], output_hidden_states=True)
    assert model.model.layers[0].self_attn._forward_hooks
    logits_of(model)
    monkeypatch.setattr(decoder_layers, "_new_plan", None)
    chains.clear()
    logits_of(model)
    assert {*chains} == {2, 3}  # the prompt's attention by its module, that of steps by chains
    assert chains[-4:] == [3, 3, 3, 3]


def with_latents(**changed):
    """A model whose attention reads a joint latent."""
    model = model_of("Llama", **changed)
    shipped = [regard.hf.attention_of(layer.self_attn) for layer in model.model.layers]
    return regard.hf.place(model, [scattered(as_latent(each)) for each in shipped])


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
def test_joint_latents_are_projected_by_chains(batch, biased, chains):
    model = with_latents(attention_bias=biased)
    shipped = logits_of(model, DynamicCache(config=model.config), batch=batch)
    assert not chains
    regard.hf.install(model)
    for cache in (None, DynamicCache(config=model.config)):
        chains.clear()
        assert_same(logits_of(model, cache, batch=batch), shipped)
        assert chains[-4:] == [2, 3, 2, 3]
        assert None not in chains


def test_joint_latents_return_weights_where_they_are_wanted(chains):
    model = with_latents()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        wanted = model(TOKENS[:1, :4], output_attentions=True).attentions
        regard.hf.install(model)
        found = model(TOKENS[:1, :4], output_attentions=True).attentions
    assert len(found) == len(wanted) == 2
    for one, other in zip(found, wanted, strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("name", ["q_proj", "kv_a_proj", "o_proj", "self"])
def test_hooks_on_joint_latents_see_every_step(name, chains):
    model, seen = with_latents(), []
    regard.hf.install(model)
    logits_of(model)
    attention = model.model.layers[0].self_attn
    hooked = attention if name == "self" else attention.get_submodule(name)
    hooked.register_forward_hook(lambda module, given, out: seen.append(1))
    logits_of(model)
    assert len(seen) == 1 + STEPS


def test_a_hook_in_the_place_of_another_is_called(form):
    model, seen = model_of("Llama"), []
    regard.hf.install(model)
    with torch.no_grad():
        model(TOKENS[:1, :1], output_attentions=True)
    logits_of(model)
    attention = model.model.layers[0].self_attn
    attention._forward_hooks.clear()  # transformers' own
    attention.register_forward_hook(lambda module, given, out: seen.append(1))
    logits_of(model)
    assert len(seen) == 1 + STEPS


def replaced(layer):
    layer.mlp.up_proj.weight = nn.Parameter(layer.mlp.up_proj.weight.detach() / 3)


def moved(layer):
    layer.self_attn.o_proj.weight.data = layer.self_attn.o_proj.weight.data * 2


def written(layer):
    layer.self_attn.q_proj.weight.data.mul_(2)


def with_another_constant(layer):
    layer.input_layernorm.variance_epsilon = 0.5


def with_another_child(layer):
    layer.mlp.act_fn = nn.ReLU()


def with_an_adapter(layer):
    class Adapter(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base, self.more = base, nn.Linear(64, 96)

        def forward(self, x):
            return self.base(x) + self.more(x)

    torch.manual_seed(1)
    layer.mlp.up_proj = Adapter(layer.mlp.up_proj)


@pytest.mark.parametrize("change", [replaced, moved, written, with_another_constant,
                                    with_another_child, with_an_adapter])  # fmt: skip
def test_a_layer_that_changes_between_two_steps(change, form):
    model = model_of("Llama")

    @torch.no_grad()
    def changed():
        own = copy.deepcopy(model)
        cache, outs = cache_for(own), []
        for at, token in enumerate(TOKENS[:1, :6].split(1, dim=1)):
            if at == 3:
                change(own.model.layers[0])
            outs.append(own(token, past_key_values=cache).logits)
        return torch.cat(outs)

    wanted = changed()
    regard.hf.install(model)
    assert_same(changed(), wanted)


def test_copies_and_pickles_have_chains_of_their_own_weights(chains):
    model = model_of("Llama")
    regard.hf.install(model)
    logits_of(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            other.model.layers[0].mlp.down_proj.weight.zero_()
        chains.clear()
        wanted = logits_of(regard_free(other))
        assert_same(logits_of(other), wanted)
        assert None not in chains
        assert chains


def regard_free(model):
    """A copy of an installed model without regard."""
    other = copy.deepcopy(model)
    regard.hf.uninstall(other)
    return other


def test_plans_keep_no_model_alive(form):
    model = model_of("Llama")
    regard.hf.install(model)
    logits_of(model)
    layer = weakref.ref(model.model.layers[0])
    assert layer() in decoder_layers._plans
    del model
    gc.collect()
    assert layer() is None


def test_layers_on_another_device_are_left_alone():
    model = model_of("Llama").to("meta")
    assert bind_layers(model) == 0


def test_layers_of_another_form_are_left_alone():
    class Scaled(transformers.models.llama.modeling_llama.LlamaDecoderLayer):
        def forward(self, hidden_states, **given):
            return 2 * super().forward(hidden_states, **given)

    config = LlamaConfig(**SIZES)
    model = LlamaForCausalLM(config)
    model.model.layers[0] = Scaled(config, 0)
    model.model.layers[1].mlp.act_fn = nn.Tanh()
    assert bind_layers(model) == 0
    assert regard.hf.install(LlamaForCausalLM(config), linear=False).decoder_layers == 0
    twice = LlamaForCausalLM(config)
    assert [regard.hf.install(twice).decoder_layers for _ in range(2)] == [2, 2]
    bound = [x for x in twice.modules() if function_of(x, "forward") is decoder_layers.forward]
    assert len(bound) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_near_to_float32_as_the_shipped_model(dtype):
    model = model_of("Llama")
    exact = logits_of(model)
    model.to(dtype)
    shipped = (logits_of(model).float() - exact).abs().mean()
    regard.hf.install(model)
    found = (logits_of(model).float() - exact).abs().mean()
    assert found <= 1.1 * shipped  # sums in another order round to other sides
