"""The job of `regard convert`: what cannot be converted is refused before weights are read."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import GptOssConfig, GptOssForCausalLM, PreTrainedTokenizerFast

import regard.hf
from covering import covering
from regard.cli.app import run
from regard.convert import job as jobs
from regard.convert.job import Job, run_job
from regard.convert.measuring import PREFILLS, STEPS
from regard.hf import attention_modules
from regard.hf.loading.checkpoints import skeleton, stored_dtype
from regard.turns import LEAST
from tiny import BUILDERS, SIZES, VOCABULARY, tiny


def words():
    known = {"[UNK]": 0} | {f"w{index}": index for index in range(1, VOCABULARY)}
    made = Tokenizer(WordLevel(known, unk_token="[UNK]"))
    made.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]")


def gpt_oss():
    rope = {"rope_type": "default", "rope_theta": 1e4}
    return GptOssForCausalLM(GptOssConfig(**SIZES, num_local_experts=4, rope_parameters=rope))


def cohere():
    from transformers import CohereConfig, CohereForCausalLM

    sizes = {name: size for name, size in SIZES.items() if name != "head_dim"}
    return CohereForCausalLM(CohereConfig(**sizes))


def smollm3():
    from transformers import SmolLM3Config, SmolLM3ForCausalLM

    return SmolLM3ForCausalLM(SmolLM3Config(**SIZES, no_rope_layers=[1, 0]))


def dynamic():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=rope))


MODELS = {**BUILDERS, "gpt-oss": gpt_oss, "cohere": cohere, "smollm3": smollm3, "ntk": dynamic}
A_LATENT = "a joint latent of keys and values does: to='mla' with a budget"
A_CACHE = r"a quantised cache does: regard.hf.cache\(model, 'quantized', bits=8\)"


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("qwen3", {"to": "mqa"}, f"an aligned merge has no place for qk_norm.*{A_LATENT}"),
        ("gemma3", {"to": "mla:8+4"}, f"DeepSeek's MLA has no place for qk_norm.*{A_LATENT}"),
        (
            "gemma3",
            {"to": "mla", "budget": 0.1, "form": "deepseek"},
            f"has no place for qk_norm.*{A_LATENT}",
        ),
        ("olmo2", {"to": "mha"}, "norms all key heads at once"),
        ("gpt-oss", {"to": "mla:8"}, f"has no place for sinks.*{A_CACHE}"),
        ("cohere", {"to": "mqa"}, "attention that regard does not know: CohereAttention"),
        ("smollm3", {"to": "mla:8+4"}, "no frequencies; a joint latent can be made"),
        ("ntk", {"to": "mla:8"}, "change with the length of a call"),
        ("llama", {"to": "mla:99"}, r"rank=99 is not in 1\.\.24"),
        ("llama", {"to": "gqa:3"}, "can have 1, 2, 4"),
        ("llama", {"to": "mla:8+4", "by_layer": True}, "by_layer allots ranks"),
        ("llama", {"to": "mla"}, "give either a rank"),
        ("gemma3", {"to": "mla:8", "portable": True}, "no place for qk_norm"),
        (
            "mistral",
            {"to": "mla:8+4", "portable": True},
            "cannot hold a layer: its mask is .*regard.hf.load",
        ),
        ("qwen2", {"to": "mla:8+4", "portable": True}, "its queries have a bias"),
    ],
)
def test_what_the_configuration_rules_out_is_refused_before_weights_are_read(
    model, options, message, tmp_path, monkeypatch
):
    MODELS[model]().save_pretrained(tmp_path / "model")
    monkeypatch.setattr(jobs, "load", lambda *given, **named: pytest.fail("weights were read"))
    with pytest.raises(ValueError, match=message):
        run_job(Job(tmp_path / "model", out=tmp_path / "out", **options))


def test_a_converted_model_is_refused_before_its_weights_are_read(tmp_path, monkeypatch):
    from regard.convert import as_latent, save
    from regard.hf import attention_of, place

    model = tiny("llama")
    layers = [as_latent(attention_of(module)) for module in attention_modules(model).values()]
    save(place(model, layers), None, tmp_path / "model", card="", report={})
    monkeypatch.setattr(jobs, "load", lambda *given, **named: pytest.fail("weights were read"))
    with pytest.raises(ValueError, match="this LatentKV layer is regard's own already"):
        run_job(Job(tmp_path / "model", "mqa", tmp_path / "out"))


@pytest.mark.parametrize(
    ("options", "by_layer", "passes"),
    [
        ({"to": "latent-50"}, True, jobs.PASSES),
        ({"to": "mla", "budget": 0.5}, True, jobs.PASSES),
        ({"to": "latent-75"}, False, jobs.PASSES),
        ({"to": "mla:12"}, False, jobs.PASSES),
        ({"to": "mla:12", "by_layer": True}, True, jobs.PASSES),
        ({"to": "latent-50", "low_memory": True}, False, 0),
        ({"to": "deepseek-50"}, False, jobs.PASSES),
        ({"to": "mqa"}, False, jobs.PASSES),
    ],
)
def test_layers_are_refined_and_small_budgets_have_ranks_by_layer(
    options, by_layer, passes, tmp_path
):
    job = Job(tmp_path / "model", out=tmp_path / "out", **options)
    target, _ = jobs._target(job, tiny("llama"), torch.float32, torch.float32)
    assert (target.by_layer, target.passes) == (by_layer, passes)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_skeleton_is_the_model_without_weights(family, tmp_path):
    model = tiny(family)
    model.save_pretrained(tmp_path)
    bare = skeleton(tmp_path)
    assert type(bare) is type(model) and not bare.training
    assert {each.device.type for each in bare.parameters()} == {"meta"}
    assert {n: p.shape for n, p in bare.named_parameters()} == {
        n: p.shape for n, p in model.named_parameters()
    }
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="needs weights"):
        skeleton(tmp_path)


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "olmo2"])
@torch.no_grad()
def test_a_model_with_qk_norm_is_converted_to_a_joint_latent(family, tmp_path):
    torch.manual_seed(0)
    tiny(family).save_pretrained(tmp_path / "model")
    words().save_pretrained(tmp_path / "model")
    text = " ".join(f"w{index}" for index in torch.randint(1, VOCABULARY, (4000,)).tolist())
    job = Job(
        tmp_path / "model",
        "mla",
        tmp_path / "out",
        budget=0.5,
        calibrate={"words": text},
        held_out={"words": text},
    )
    report = run_job(job)
    assert not report.stock and report.calibrated_on == ("words",)
    assert report.after.cache_bytes_per_token < 0.7 * report.before.cache_bytes_per_token
    assert report.before.decode_speed is None and report.before.decode_backend == ""
    assert report.after.prefill_speed.pairs == PREFILLS
    assert LEAST <= report.after.decode_speed.pairs <= STEPS // 2  # fewer once the ratio is known
    assert report.after.decode_backend  # of regard: the shipped model ran its own attention
    model, _ = regard.hf.load(tmp_path / "out")
    layers = list(attention_modules(model).values())
    assert [type(each).__name__ for each in layers] == ["PlacedLatentKV"] * 2
    assert all(each.k_norm is not None for each in layers)
    assert all(report.still_missed < 0.5 for report in report.layers)


@pytest.mark.parametrize(
    ("options", "lr"), [({"to": "mqa"}, 5e-4), ({"to": "mla", "budget": 0.5}, 2e-4)]
)
def test_merged_heads_are_healed_at_a_higher_rate(options, lr, tmp_path, monkeypatch):
    tiny("llama").save_pretrained(tmp_path / "model")
    words().save_pretrained(tmp_path / "model")
    text = " ".join(f"w{index}" for index in range(1, VOCABULARY)) * 50
    seen = []

    def heal(*models, recipe, **given):
        seen.append(recipe.lr)
        raise KeyboardInterrupt

    monkeypatch.setattr(jobs, "heal", heal)
    texts = {"heal": {"words": text}, "held_out": {"words": text}}
    with pytest.raises(KeyboardInterrupt):
        run_job(Job(tmp_path / "model", out=tmp_path / "out", **options, **texts))
    assert seen == [lr]


def bytes_written(folder):
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


@pytest.mark.parametrize(("to", "low_memory"), covering(["mla", "mqa"], [False, True], together=1))
@torch.no_grad()
def test_a_checkpoint_keeps_its_dtype(to, low_memory, tmp_path):
    """And a budget counts the bytes of the result, positions with them."""
    torch.manual_seed(0)
    tiny("llama").half().save_pretrained(tmp_path / "model")
    words().save_pretrained(tmp_path / "model")
    text = " ".join(f"w{index}" for index in torch.randint(1, VOCABULARY, (4000,)).tolist())
    options = {
        "budget": 0.5 if to == "mla" else None,
        "calibrate": {"words": text},
        "held_out": {"words": text},
        "low_memory": low_memory,
    }
    report = run_job(Job(tmp_path / "model", to, tmp_path / "out", **options))
    assert stored_dtype(tmp_path / "out") == torch.float16
    assert bytes_written(tmp_path / "out") < 1.2 * bytes_written(tmp_path / "model")
    assert report.dtype == "float16"
    assert report.before.cache_bytes_per_token == 2 * 2 * 2 * 8 * 2
    assert report.after.cache_bytes_per_token == report.before.cache_bytes_per_token / 2
    model, _ = regard.hf.load(tmp_path / "out")
    windows = jobs.windows_of(words(), [text], length=128, most=2)
    measured = jobs.measure(model, {"words": windows}, torch.float16)
    assert measured.perplexity["words"] == pytest.approx(report.after.perplexity["words"], rel=1e-3)
    wide = Job(tmp_path / "model", to, tmp_path / "wide", dtype=torch.float32, **options)
    report = run_job(wide)
    assert stored_dtype(tmp_path / "wide") == torch.float32
    share = report.after.cache_bytes_per_token / report.before.cache_bytes_per_token
    assert share == (0.5 if to == "mla" else 1.0)


def test_folders_that_are_named_by_a_point(tmp_path, monkeypatch):
    """The model where the command runs, then the empty folder that is to be filled."""
    torch.manual_seed(0)
    model, out = tmp_path / "model", tmp_path / "out"
    tiny("llama").save_pretrained(model)
    words().save_pretrained(model)
    text = " ".join(f"w{index}" for index in torch.randint(1, VOCABULARY, (600,)).tolist())
    texts = {"calibrate": {"words": text}, "held_out": {"words": text}, "low_memory": True}
    out.mkdir()
    monkeypatch.chdir(out)
    run_job(Job(model, "mha", Path(), **texts))
    assert (out / "config.json").exists()
    assert {each.name for each in tmp_path.iterdir()} == {"model", "out"}
    monkeypatch.chdir(model)
    assert run_job(Job(Path(), "mha", tmp_path / "other", **texts)).model == "model"


def test_time_for_healing_without_healing_is_refused(monkeypatch, capsys):
    given = ["somewhere", "--to", "mha", "--out", "elsewhere", "--minutes", "3"]
    monkeypatch.setattr("sys.argv", ["regard", "convert", *given])
    assert run() == 2
    assert "--minutes" in capsys.readouterr().err


def test_weights_that_a_dtype_cannot_hold_are_refused():
    model = tiny("llama")
    model.lm_head.weight.data[0, 0] = 1e5
    with pytest.raises(ValueError, match=r"lm_head.weight has a weight of 1e\+05, and float16"):
        jobs.round_weights(model, torch.float16)
    jobs.round_weights(model, torch.bfloat16)
    assert model.lm_head.weight.dtype == torch.float32
    assert model.lm_head.weight[0, 0] == torch.tensor(1e5).bfloat16()
