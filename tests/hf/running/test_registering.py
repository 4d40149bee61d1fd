"""register: regard among transformers' attention functions; masks, caps and sinks included."""

import pytest
import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface

import regard.hf
from regard.hf.running.registering import attention
from zoo import ZOO, inputs, result, tokens

THROUGH = [name for name in ZOO if not name.startswith("falcon")]  # Falcon calls its own
OTHERS = {  # families without a row, through the interface
    "cohere": lambda: transformers.CohereForCausalLM(
        transformers.CohereConfig(**SMALL, logit_scale=1.0)
    ),
    "granite": lambda: transformers.GraniteForCausalLM(
        transformers.GraniteConfig(**SMALL, attention_multiplier=0.3)
    ),
    "glm4": lambda: transformers.Glm4ForCausalLM(transformers.Glm4Config(**SMALL, head_dim=8)),
    "llama4": lambda: transformers.Llama4ForCausalLM(
        transformers.Llama4TextConfig(
            **SMALL, head_dim=8, intermediate_size_mlp=16, num_local_experts=2,
            attention_chunk_size=4, attn_temperature_tuning=False,
        )
    ),
}  # fmt: skip
SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def run(model, given):
    with torch.no_grad():
        return result(model(**given))


def shown(given, output):
    mask = given.get("attention_mask")
    return output[mask.bool()] if mask is not None and mask.shape == output.shape[:2] else output


@pytest.fixture(autouse=True)
def _registered():
    assert regard.hf.register() == "regard"
    regard.hf.register()  # twice is once


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("name", THROUGH)
def test_results_are_the_models_own(name, padding):
    model, given = ZOO[name].build(), inputs(name, padding=padding)
    before = shown(given, run(model, given))
    model.set_attn_implementation("regard")
    after = shown(given, run(model, given))
    torch.testing.assert_close(after, before, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("name", OTHERS)
def test_install_lets_others_call_regard(name):
    torch.manual_seed(0)
    model, ids = OTHERS[name]().eval(), tokens(2, 11)
    before = run(model, {"input_ids": ids})
    regard.hf.register()
    called = []
    own = AttentionInterface._global_mapping["regard"]
    with pytest.MonkeyPatch.context() as patch:
        noting = lambda *a, **o: called.append(1) or own(*a, **o)  # noqa: E731
        report = regard.hf.install(model)
        patch.setitem(AttentionInterface._global_mapping, "regard", noting)
        after = run(model, {"input_ids": ids})
    assert len(called) == len(report.called)
    assert len(report.called) + len(report.layers) == model.config.num_hidden_layers
    torch.testing.assert_close(after, before, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("name", OTHERS)
def test_models_without_a_row_work_too(name):
    torch.manual_seed(0)
    model, ids = OTHERS[name]().eval(), tokens(2, 11)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(0.3 * torch.randn_like(parameter))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    given = {"input_ids": ids, "attention_mask": mask}
    before = run(model, given)[mask.bool()]
    model.set_attn_implementation("regard")
    torch.testing.assert_close(run(model, given)[mask.bool()], before, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gpt-oss", "deepseek-v3", "t5", "whisper"])
@pytest.mark.parametrize("static", [False, True])
def test_generation_writes_the_same(name, static):
    model, given = ZOO[name].build(), inputs(name, padding="left", length=9)
    given.pop("decoder_input_ids", None)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    options = {"max_new_tokens": 16, "do_sample": False, "disable_compile": True}
    if static:
        options["cache_implementation"] = "static"
    before = model.generate(**given, **options)
    model.set_attn_implementation("regard")
    assert model.generate(**given, **options).equal(before)


@pytest.mark.parametrize("name", ["gemma2", "gpt-oss", "mistral", "bart", "t5"])
def test_gradients_are_the_models_own(name):
    model, given = ZOO[name].build().train(), inputs(name)

    def gradients():
        model.zero_grad()
        result(model(**given)).square().mean().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    before = gradients()
    model.set_attn_implementation("regard")
    for after, wanted in zip(gradients(), before, strict=True):
        torch.testing.assert_close(after, wanted, atol=2e-5, rtol=1e-3)


def test_installed_and_registered_at_once():
    model, given = ZOO["gemma2"].build(), inputs("gemma2", padding="left")
    before = shown(given, run(model, given))
    model.set_attn_implementation("regard")
    regard.hf.install(model)
    torch.testing.assert_close(shown(given, run(model, given)), before, atol=2e-5, rtol=2e-5)
    regard.hf.uninstall(model)
    torch.testing.assert_close(shown(given, run(model, given)), before, atol=2e-5, rtol=2e-5)


def test_the_mask_function_comes_along():
    """Without it transformers drops masks, and padded rows are silently wrong."""
    assert AttentionInterface._global_mapping["regard"] is attention
    assert "regard" in AttentionMaskInterface._global_mapping


def heads(*shape):
    return torch.randn(1, *shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_a_window_counts_where_no_mask_came():
    module = torch.nn.Module()
    q, k = heads(2, 5, 4), heads(1, 5, 4)
    windowed, _ = attention(module, q, k, k, None, sliding_window=2, scaling=1.0)
    rows, columns = torch.arange(5)[:, None], torch.arange(5)
    keep = (columns <= rows) & (columns > rows - 2)
    masked, _ = attention(module, q, k, k, keep[None, None], sliding_window=1, scaling=1.0)
    torch.testing.assert_close(windowed, masked)


def test_selected_keys_beyond_those_of_the_span_are_hidden():
    """A static cache has slots for later tokens, and an indexer may select such."""
    q, k = heads(2, 2, 4), heads(2, 5, 4)
    keep = torch.tensor([[[[1, 1, 0, 0, 0], [1, 1, 1, 0, 0]]]]).bool()
    indices = torch.tensor([[[0, 4, 3], [2, 0, 4]]], dtype=torch.int32)
    out, weights = attention(
        torch.nn.Module(), q, k, k, keep, indices=indices, output_attentions=True
    )
    chosen = torch.tensor([[[[1, 0, 0, 0, 0], [1, 0, 1, 0, 0]]]]).bool()
    wanted, _ = attention(torch.nn.Module(), q, k, k, chosen)
    torch.testing.assert_close(out, wanted)
    assert weights[..., 1].eq(0).all()
    with pytest.raises(ValueError, match=r"\[B, L, K\] with L = 2, got shape \(3,\)"):
        attention(torch.nn.Module(), q, k, k, keep, indices=torch.zeros(3, dtype=torch.int32))


@pytest.mark.parametrize("wanted", [False, True])
def test_a_sink_of_each_query_takes_part_in_the_softmax(wanted):
    q, k, v = heads(2, 3, 4), heads(2, 5, 4), heads(2, 5, 6)
    sinks = heads(2, 3, 1).requires_grad_()
    keep = torch.ones(1, 1, 3, 5).bool()
    keep[..., 1, :] = False  # nothing is visible but the sink
    out, weights = attention(
        torch.nn.Module(), q, k, v, keep, sinks=sinks, scaling=0.5, output_attentions=wanted
    )
    scores = (0.5 * q @ k.transpose(2, 3)).masked_fill(~keep, -torch.inf)
    shares = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    torch.testing.assert_close(out, (shares @ v).transpose(1, 2))
    torch.testing.assert_close(weights, shares if wanted else None)
    (own,) = torch.autograd.grad(out.square().sum(), sinks)
    (plain,) = torch.autograd.grad((shares @ v).square().sum(), sinks)
    torch.testing.assert_close(own, plain)


@pytest.mark.parametrize("option", ["block_table", "cache"])
def test_what_cannot_be_honoured_raises(option):
    q = heads(1, 2, 4)
    with pytest.raises(ValueError, match=f"{option}= would change the result"):
        attention(torch.nn.Module(), q, q, q, None, **{option: torch.zeros(1)})


def test_weights_are_returned_if_requested():
    model, given = ZOO["llama"].build("eager"), inputs("llama")
    wanted = model(**given, output_attentions=True).attentions
    model.set_attn_implementation("regard")
    found = model(**given, output_attentions=True).attentions
    for after, before in zip(found, wanted, strict=True):
        torch.testing.assert_close(after, before, atol=1e-5, rtol=1e-5)
    assert attention(torch.nn.Module(), *[heads(1, 2, 4)] * 3, None)[1] is None
