"""install changes the implementation alone: hooks, adapters, copies, files and reports stay."""

import copy
import json
import pickle
import re
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from torch import nn

import regard.hf
from interpreters import run_python
from regard.hf import attention_modules, packages
from regard.hf.running import calls, heads, latent
from regard.hf.running.binding import is_bound
from regard.hf.running.masks import visible
from session import LONG
from tiny import tiny
from zoo import ZOO, inputs, result, tokens

CLOSE = {"atol": 2e-5, "rtol": 2e-5}
KINDS = ["llama", "gpt2", "bert", "t5", "deepseek-v3"]


def run(model, given):
    with torch.no_grad():
        return result(model(**given))


PARTS = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 99}
PARTS |= {"num_attention_heads": 2, "pad_token_id": 0, "eos_token_id": 1}


def halved(module, *args, **given):
    out, weights = type(module).forward(module, *args, **given)
    return out / 2, weights


class Halving(ModelHook):
    def post_forward(self, module, output):
        return output[0] / 2, output[1]


@pytest.mark.parametrize("name", ["Llama", "Phi"])
def test_a_forward_that_was_set_on_a_module_stays_and_is_reported(name):
    config = getattr(transformers, f"{name}Config")(**PARTS)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    first, given = "model.layers.0.self_attn", {"input_ids": tokens(2, 7)}
    patched = model.get_submodule(first)
    theirs = patched.forward = partial(halved, patched)
    before = run(model, given)
    report = regard.hf.install(model)
    torch.testing.assert_close(run(model, given), before, **CLOSE)
    assert f"{type(patched).__name__} has a forward of its own, which stays" in str(report)
    assert first in report.called
    regard.hf.uninstall(model)
    assert patched.forward is theirs
    assert run(model, given).equal(before)


def test_a_method_that_was_set_on_a_module_stays():
    config = transformers.GPTJConfig(vocab_size=99, n_embd=16, n_layer=1, n_head=2, rotary_dim=4)
    model, given = transformers.GPTJForCausalLM(config).eval(), {"input_ids": tokens(2, 7)}
    for module in (each for each in model.modules() if hasattr(each, "_attn")):
        module._attn = partial(halved_method, module)
    before = run(model, given)
    with pytest.raises(ValueError, match="so regard cannot run it"):
        regard.hf.install(model)
    assert run(model, given).equal(before)


def halved_method(module, *args):
    out, weights = type(module)._attn(module, *args)
    return out / 2, weights


@pytest.mark.parametrize("name", ["llama", "deepseek-v3"])
def test_hooks_of_accelerate_stay_and_may_go_before_regard_does(name):
    model, given = ZOO[name].build(), inputs(name)
    modules, plain = attention_modules(model).values(), run(model, given)
    for module in modules:
        add_hook_to_module(module, Halving())
    before = run(model, given)
    report = regard.hf.install(model)
    assert len(report.layers) == len(modules) and not report.called
    torch.testing.assert_close(run(model, given), before, **CLOSE)
    regard.hf.uninstall(model)
    assert run(model, given).equal(before) and not any(map(is_bound, modules))
    regard.hf.install(model)
    for module in modules:
        remove_hook_from_module(module)
        assert module.forward.func in (heads.forward, latent.forward)
    torch.testing.assert_close(run(model, given), plain, **CLOSE)
    regard.hf.uninstall(model)
    assert run(model, given).equal(plain)


@pytest.mark.parametrize("later", ["a hook", "a patch"])
def test_a_forward_that_was_set_after_regards_stays(later):
    model, given = ZOO["llama"].build(), inputs("llama")
    attention = next(iter(attention_modules(model).values()))
    regard.hf.install(model)
    if later == "a hook":
        add_hook_to_module(attention, Halving())
    else:
        attention.forward = partial(halved, attention)
    theirs, before = attention.forward, run(model, given)
    regard.hf.install(model)
    torch.testing.assert_close(run(model, given), before, **CLOSE)
    regard.hf.uninstall(model)
    assert attention.forward is theirs and "precision" not in vars(attention)
    torch.testing.assert_close(run(model, given), before, **CLOSE)
    if later == "a hook":
        assert attention._old_forward.__func__ is type(attention).forward


@pytest.mark.parametrize("name", ["llama", "deepseek-v3"])
def test_the_precision_is_that_of_every_layer_until_uninstall(name):
    model = ZOO[name].build().to(torch.bfloat16)
    with pytest.raises(ValueError, match="precision is 'strict' or 'fast', got 'quick'"):
        regard.hf.install(model, precision="quick")
    assert all("forward" not in vars(each) for each in attention_modules(model).values())
    regard.hf.install(model, precision="fast")
    seen, prepared = [], calls.prepare
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            calls, "prepare", lambda *a, **given: seen.append(given) or prepared(*a, **given)
        )
        run(model, inputs(name))
        assert {given["precision"] for given in seen} == {"fast"}
        regard.hf.uninstall(model)
        regard.hf.install(model)
        seen.clear()
        run(model, inputs(name))
    assert {given["precision"] for given in seen} == {"strict"}


@pytest.mark.parametrize("name", KINDS)
def test_hooks_still_run(name):
    model, seen = ZOO[name].build(), []
    attention = next(iter(attention_modules(model).values()))
    attention.register_forward_pre_hook(lambda module, given: seen.append("before"))
    attention.register_forward_hook(lambda module, given, out: seen.append(out[0].shape[-1]))
    for child in attention.children():
        child.register_forward_hook(lambda module, given, out: seen.append("child"))
    regard.hf.install(model)
    seen.clear()  # of the trial on random tokens, where this class is the first of the process
    run(model, inputs(name))
    assert seen[0] == "before"
    assert seen[-1] == {"deepseek-v3": 32}.get(name, 24)
    assert seen.count("child") >= 3 or name == "gpt2"


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_is_installed_as_precisely_and_can_be_uninstalled(copied):
    model = ZOO["llama"].build()
    regard.hf.install(model, precision="fast")
    other = copied(model)
    modules = attention_modules(other).values()
    assert {calls.precision_of(module) for module in modules} == {"fast"}
    assert all(module.forward.func is heads.forward for module in modules)
    assert all(module.forward.args == (module,) for module in modules)
    regard.hf.uninstall(other)
    assert {calls.precision_of(module) for module in modules} == {"strict"}
    left = {"forward", "precision", "_before_regard"}
    assert not any(left & vars(module).keys() for module in modules)
    assert all(left <= vars(module).keys() for module in attention_modules(model).values())


def test_a_copy_runs_on_its_own_weights():
    model = ZOO["llama"].build()
    regard.hf.install(model)
    other, given = copy.deepcopy(model), inputs("llama")
    before = run(model, given)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert run(other, given).equal(before)


@pytest.mark.parametrize("name", KINDS)
def test_saving_saves_the_same(name, tmp_path):
    model, given = ZOO[name].build(), inputs(name)
    before = run(model, given)
    regard.hf.install(model)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    torch.testing.assert_close(run(again, given), before, **CLOSE)


def test_moving_to_another_dtype():
    model, given = ZOO["gemma3"].build(), inputs("gemma3", padding="left")
    before = run(model, given)
    regard.hf.install(model)
    torch.testing.assert_close(run(model.to(torch.float64), given).float(), before, **CLOSE)


@pytest.mark.parametrize("name", ["llama", "deepseek-v3"])
def test_adapters_train_and_merge(name):
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "v_proj"] if name == "llama" else ["kv_b_proj", "o_proj"]
    options = {"r": 2, "target_modules": targets, "init_lora_weights": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(ZOO[name].build(), LoraConfig(**options))
    given = inputs(name, padding="left")
    shown = given["attention_mask"].bool()
    before = run(model, given)[shown]
    regard.hf.install(model)
    torch.testing.assert_close(run(model, given)[shown], before, **CLOSE)
    model.train()
    result(model(**given)).square().mean().backward()
    trained = {n: p.grad.abs().max() for n, p in model.named_parameters() if p.requires_grad}
    assert all("lora" in n for n in trained)
    assert all(grad > 0 for grad in trained.values())
    model.eval()
    merged = model.merge_and_unload()
    torch.testing.assert_close(run(merged, given)[shown], before, **CLOSE)


def test_an_adapter_on_kv_b_proj_is_not_absorbed():
    from peft import LoraConfig, get_peft_model

    options = {"r": 2, "target_modules": ["kv_b_proj"], "init_lora_weights": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(ZOO["deepseek-v3"].build(), LoraConfig(**options))
    ids = tokens(1, 9)
    report = regard.hf.install(model)
    assert "decode: expanded" in str(report)
    whole = run(model, {"input_ids": ids})
    cache = regard.hf.cache(model.base_model.model)
    pieces = [run(model, {"input_ids": ids[:, :8], "past_key_values": cache})]
    pieces.append(run(model, {"input_ids": ids[:, 8:], "past_key_values": cache}))
    torch.testing.assert_close(torch.cat(pieces, 1), whole, **CLOSE)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*:FutureWarning")
@pytest.mark.parametrize("name", ["llama", "t5", "deepseek-v3"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(name, reentrant):
    model, given = ZOO[name].build().train(), inputs(name)

    def gradients():
        model.zero_grad()
        result(model(**given, use_cache=False)).square().mean().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    before = gradients()
    regard.hf.install(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    for after, wanted in zip(gradients(), before, strict=True):
        torch.testing.assert_close(after, wanted, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt-oss", "gpt2", "bert", "bart", "t5"])
def test_attention_weights_are_returned(name, implementation):
    model, given = ZOO[name].build("eager"), inputs(name)
    wanted = model(**given, output_attentions=True)
    if implementation == "sdpa" and name not in ("gemma2", "gpt-oss"):
        model.set_attn_implementation("sdpa")
    regard.hf.install(model)
    found = model(**given, output_attentions=True)
    kinds = [key for key in wanted if key.endswith("attentions") and wanted[key]]
    assert kinds
    for key in kinds:
        for after, before in zip(found[key], wanted[key], strict=True):
            torch.testing.assert_close(after, before, atol=1e-5, rtol=1e-5)


@pytest.fixture(scope="module")
def traced():
    script = Path(__file__).parents[2] / "support/traced_models.py"
    done = run_python(script)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_static_decoding_compiles_to_two_graphs_at_most(traced):
    assert len(traced["decoded"]) == (7 if LONG else 1)
    assert all(each["same"] for each in traced["decoded"].values())
    assert max(each["graphs"] for each in traced["decoded"].values()) <= 2


def test_compiled_models_train_as_eager_ones(traced):
    assert max(traced["trained"].values()) <= 1e-5


def test_the_report_names_what_runs():
    text = str(regard.hf.install(ZOO["smollm3"].build()))
    assert text.startswith("SmolLM3ForCausalLM: 3 attention layers run on regard\n")
    assert "layers.0.self_attn .. model.layers.2.self_attn (2): " in text
    assert "GQA 4 heads on 2 of 6, window 5; prefill: " in text
    assert "softcap 2" in str(regard.hf.install(ZOO["gemma2"].build()))
    assert "sinks" in str(regard.hf.install(ZOO["gpt-oss"].build()))
    assert "bidirectional, relative bias" in str(regard.hf.install(ZOO["t5"].build()))
    latent = str(regard.hf.install(ZOO["deepseek-v3"].build()))
    assert "MLA 4 heads on 1 of 16; prefill: expanded by sdpa, decode: absorbed by" in latent


class Both(nn.Module):
    """A model that regard knows, beside attention that it does not know."""

    def __init__(self):
        super().__init__()
        self.known = ZOO["llama"].build()
        self.other = nn.MultiheadAttention(8, 2)


def test_what_is_not_known_is_left_alone_and_reported():
    model = Both()
    report = regard.hf.install(model)
    assert report.left_alone == {
        "other": "MultiheadAttention has no row in regard.hf.families",
    }
    assert "  other: left alone: MultiheadAttention has no row" in str(report)
    assert "forward" not in vars(model.other)
    with pytest.raises(ValueError, match=r"MultiheadAttention \(1 modules\); regard\.hf\.FAMILIES"):
        attention_modules(model)


def test_a_model_of_unknown_attention_is_refused_by_its_type():
    sizes = {"vocab_size": 32, "hidden_size": 16, "n_layer": 2, "n_head": 2}
    model = transformers.BloomForCausalLM(transformers.BloomConfig(**sizes))
    with pytest.raises(ValueError, match=re.escape("(model_type 'bloom') has attention that")):
        regard.hf.install(model)
    with pytest.raises(ValueError, match=re.escape("BloomAttention (2 modules); regard.hf.")):
        regard.hf.install(model)
    with pytest.raises(ValueError, match="does not go through transformers' AttentionInterface"):
        regard.hf.install(model)
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_subclass_may_do_something_else():
    class Mine(transformers.models.llama.modeling_llama.LlamaAttention):
        def forward(self, *args, **given):
            out, weights = super().forward(*args, **given)
            return 2 * out, weights

    model = ZOO["llama"].build()
    for layer in model.model.layers:
        layer.self_attn.__class__ = Mine
    with pytest.raises(ValueError, match="Mine"):
        regard.hf.install(model)


def test_attention_that_is_not_known_calls_regard_and_says_how_it_differs():
    sizes = {"vocab_size": 99, "hidden_size": 16, "intermediate_size": 16, "eos_token_id": 1}
    config = transformers.CohereConfig(**sizes, num_hidden_layers=2, num_attention_heads=2)
    model = transformers.CohereForCausalLM(config).eval()
    given = {"input_ids": tokens(2, 7)}
    before = run(model, given)
    report = regard.hf.install(model)
    assert list(report.called) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert "CohereAttention most like LlamaAttention, but for `" in str(report)
    seen, prepared = [], calls.prepare
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calls, "prepare", lambda *a, **g: seen.append(a) or prepared(*a, **g))
        torch.testing.assert_close(run(model, given), before, **CLOSE)
        assert len(seen) == 2
        assert model.config._attn_implementation == "sdpa"
        regard.hf.uninstall(model)
        assert run(model, given).equal(before)
        assert len(seen) == 2


@pytest.mark.parametrize("copied", [lambda model: model, copy.deepcopy])
@pytest.mark.parametrize("order", [("eager", "sdpa"), ("sdpa", "eager"), ("regard", "sdpa")])
def test_attention_that_calls_regard_reads_the_masks_that_its_model_makes_now(order, copied):
    model = transformers.PhiForCausalLM(transformers.PhiConfig(**PARTS)).eval()
    for parameter in model.parameters():
        parameter.data.mul_(4)
    given = {"input_ids": tokens(2, 7)}
    before = run(model, given)
    model.set_attn_implementation(regard.hf.register())
    model.set_attn_implementation(order[0])
    regard.hf.install(model)
    model = copied(model)
    for implementation in (*order, "eager"):
        model.set_attn_implementation(implementation)
        torch.testing.assert_close(run(model, given), before, **CLOSE)
        assert model.config._attn_implementation == implementation
    regard.hf.uninstall(model)
    assert model.model.layers[0].self_attn.config is model.config


def test_attention_that_calls_regard_reads_its_models_config_as_it_is_now():
    model = transformers.OlmoeForCausalLM(transformers.OlmoeConfig(**PARTS)).eval()
    other, given = copy.deepcopy(model), {"input_ids": tokens(2, 7)}
    before = run(model, given)
    regard.hf.install(model)
    model.config.clip_qkv = other.config.clip_qkv = 1e-3
    assert not run(other, given).equal(before)
    torch.testing.assert_close(run(model, given), run(other, given), **CLOSE)
    module = model.model.layers[0].self_attn
    module.config.clip_qkv = None
    assert model.config.clip_qkv is None
    regard.hf.uninstall(model)
    assert module.config is model.config


def test_a_model_without_attention_is_refused():
    with pytest.raises(ValueError, match="no attention module that regard knows"):
        regard.hf.install(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"as regard\.hf\.load returns, got str"):
        regard.hf.install("path/to/model")


def test_masks_that_are_not_tensors_are_refused():
    model = ZOO["llama"].build("flex_attention")
    with pytest.raises(ValueError, match="set_attn_implementation"):
        regard.hf.install(model)
    module = next(iter(attention_modules(model).values()))
    with pytest.raises(TypeError, match="regard reads None, bool and additive"):
        visible(module, object(), 2, 2)
    with pytest.raises(ValueError, match=r"must be \[B, H, L, S\]"):
        visible(module, torch.ones(2, 2), 2, 2)


@pytest.mark.parametrize("option", ["softcap", "s_aux", "block_table", "indices"])
def test_what_would_change_the_result_is_refused(option):
    model = ZOO["llama"].build()
    regard.hf.install(model)
    with pytest.raises(ValueError, match=f"{option}= would change the result"):
        model(input_ids=tokens(1, 3), **{option: torch.zeros(2)})


def test_another_version_of_transformers_is_warned_of(monkeypatch):
    monkeypatch.setattr(packages, "version", lambda name: "5.99.0.dev0")
    with pytest.warns(UserWarning, match=r"5\.99\.0\.dev0 is not one of the versions 5\.17 to 5"):
        regard.hf.install(ZOO["llama"].build())
    monkeypatch.setattr(packages, "version", lambda name: "5.17.0")
    regard.hf.install(ZOO["llama"].build())


def test_installing_allocates_nothing():
    model = ZOO["llama"].build()
    before = [id(p) for p in model.parameters()]
    regard.hf.install(model)
    assert [id(p) for p in model.parameters()] == before
    assert not list(model.buffers()) or all(b.numel() < 64 for b in model.buffers())


def test_the_modules_own_scale_is_used():
    model, given = ZOO["llama"].build(), inputs("llama")
    for module in attention_modules(model).values():
        module.scaling = 0.7
    before = run(model, given)
    regard.hf.install(model)
    torch.testing.assert_close(run(model, given), before, **CLOSE)


def test_dropout_drops_as_often():
    """In training, weights are dropped with the module's own probability."""
    model = ZOO["llama"].build().train()
    for module in attention_modules(model).values():
        module.attention_dropout = 0.5
    regard.hf.install(model)
    ids = tokens(1, 6)
    assert not model(input_ids=ids).logits.equal(model(input_ids=ids).logits)
    model.eval()
    assert model(input_ids=ids).logits.equal(model(input_ids=ids).logits)


@pytest.mark.parametrize("way", ["install", "register"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "olmo2"])
@pytest.mark.parametrize("cached", [True, False])
@torch.no_grad()
def test_autocast_runs_models_whose_norms_are_in_float32(family, way, cached):
    """Norms with float32 weights widen queries and keys, values stay in half precision."""
    model, ids = tiny(family), tokens(2, 9)
    exact = model(ids).logits
    with torch.autocast("cpu", torch.bfloat16):
        own = model(ids, use_cache=cached).logits
        if way == "install":
            regard.hf.install(model)
        else:
            model.set_attn_implementation(regard.hf.register())
        ours = model(ids, use_cache=cached).logits
    assert ours.dtype == own.dtype
    assert (ours - exact).abs().max() <= 2 * (own - exact).abs().max()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
@torch.no_grad()
def test_autocast_runs_models_of_other_dtypes(dtype):
    """Their angles are neither float32 nor of the dtype that is cast to."""
    model, ids = tiny("llama").to(dtype), tokens(2, 9)
    exact = model.double()(ids).logits
    model.to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        own = model(ids).logits
        regard.hf.install(model)
        ours = model(ids).logits
    assert ours.dtype == own.dtype
    assert (ours - exact).abs().max() <= 2 * (own - exact).abs().max()
