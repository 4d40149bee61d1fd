"""A whole model: exact where it says so, refused before any work, and kept as one that loads."""

import json

import pytest
import torch

from regard.cli.convert import _read
from regard.convert import convert, target_of
from regard.convert.job import Job, run_job
from regard.convert.measuring import loss_of, measure, ratio
from regard.convert.texts import calibration, unwrapped
from regard.hf import attention_modules, attention_of, install, load, place
from regard_cli.app import run
from tiny import SIZES, tiny, tokens

FAMILIES = ("llama", "qwen2", "mistral")


def shipped_of(model):
    return [attention_of(module) for module in attention_modules(model).values()]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("to", ["mha", "mla:24"])
@torch.no_grad()
def test_exact_moves_change_no_logit(family, to):
    model, text = tiny(family), tokens(2, 20)
    wanted = model(text).logits
    (made,) = convert(model, [target_of(to, shipped_of(model))], tokens(8, 128))
    assert made.report == []
    placed = place(model, made.layers)
    torch.testing.assert_close(placed(text).logits, wanted, atol=2e-5, rtol=2e-5)
    install(placed)
    torch.testing.assert_close(placed(text).logits, wanted, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("to", ["mqa", "mla:12", "mla:12+4"])
@torch.no_grad()
def test_lossy_ones_say_what_they_lost_and_the_fit_loses_less(family, to):
    model = tiny(family)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    (made,) = convert(model, [target_of(to, shipped_of(model))], tokens(8, 128))
    assert [each.name for each in made.report] == list(attention_modules(model))
    assert all(0 <= each.still_missed <= each.missed for each in made.report)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    placed = place(model, made.layers)
    assert torch.isfinite(placed(tokens(2, 20)).logits).all()


@torch.no_grad()
def test_layers_made_together_are_those_made_alone():
    model, text = tiny("llama"), tokens(8, 128)
    targets = [target_of(to, shipped_of(model)) for to in ("mqa", "mla:12")]
    together, alone = convert(model, targets, text), [convert(model, [t], text)[0] for t in targets]
    for one, other in zip(together, alone, strict=True):
        for mine, theirs in zip(one.layers, other.layers, strict=True):
            for name, value in mine.state_dict().items():
                torch.testing.assert_close(value, theirs.state_dict()[name])


@torch.no_grad()
def test_ranks_by_layer_keep_their_total():
    from dataclasses import replace

    model = tiny("llama")
    target = replace(target_of("mla:12", shipped_of(model)), by_layer=True)
    (made,) = convert(model, [target], tokens(8, 128))
    assert sum(layer.kv_lora_rank for layer in made.layers) == 24


def test_too_little_text_is_refused():
    model = tiny("llama")
    with pytest.raises(ValueError, match="at least 1,024 tokens in all"):
        convert(model, [target_of("mqa", shipped_of(model))], tokens(2, 20))


@torch.no_grad()
def test_measured_perplexity_is_that_of_the_logits():
    model, text = tiny("llama"), tokens(2, 40)
    logits = model(text).logits.double().log_softmax(-1)
    losses = -logits[:, :-1].gather(2, text[:, 1:, None]).squeeze(2)
    found = measure(model, {"a": text, "b": text[:1]})
    assert found.perplexity["a"] == pytest.approx(float(losses.mean().exp()), rel=1e-5)
    assert loss_of(model, text[1]) == pytest.approx(float(losses[1].mean()), rel=1e-5)
    assert found.cache_bytes_per_token == 2 * 2 * 2 * 8 * 4
    assert ratio(found, found) == 1.0


class Words:
    """A tokenizer of characters."""

    def __call__(self, text, **options):
        return {"input_ids": [3 + ord(letter) % 50 for letter in text]}


def test_calibration_has_the_same_share_of_every_text():
    found = calibration(Words(), ["a" * 100, "b" * 100, "c" * 100], windows=6, length=20)
    assert found.shape == (6, 20)
    assert found[:, 0].unique().numel() == 3
    assert calibration(Words(), windows=3, length=10).shape == (3, 10)
    assert unwrapped("a\n  b\n\nc") == "a b\n\nc"


@pytest.fixture
def folder(tmp_path):
    """A tiny model on disk, with a tokenizer of bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    model = LlamaForCausalLM(LlamaConfig(**SIZES | {"vocab_size": 260}))
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = Tokenizer(models.BPE(vocab={x: i for i, x in enumerate(letters)}, merges=[]))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    model.save_pretrained(tmp_path / "model")
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize(
    ("options", "stock"),
    [
        (["--to", "mqa"], True),
        (["--to", "mla", "--budget", "0.5"], False),
        (["--to", "mla:12+4"], False),
        (["--to", "mla:12+4", "--portable"], True),
    ],
)
def test_the_command_keeps_a_model_that_loads(folder, options, stock, capsys):
    out = folder.parent / "made"
    assert run_with(["convert", str(folder), *options, "--out", str(out), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said == json.loads((out / "report.json").read_text())
    assert said["ratio"] > 0 and said["stock"] is stock
    assert said["after"]["cache_bytes_per_token"] < said["before"]["cache_bytes_per_token"]
    card = (out / "README.md").read_text()
    assert ("AutoModelForCausalLM" if stock else "regard.hf.load") in card
    model, tokenizer = load(out)
    text = tokenizer("x = attention(q, k, v)", return_tensors="pt")["input_ids"]
    assert torch.isfinite(model(text).logits).all()
    assert run_with(["convert", str(folder), *options, "--out", str(out)]) == 2
    assert "is not empty" in capsys.readouterr().err


def test_healing_goes_into_the_report(folder):
    out = folder.parent / "made"
    text = "the quick brown fox jumps over the lazy dog and reads a book about attention. " * 40
    job = Job(folder, "mqa", out, heal={"fox": text}, minutes=0.02, calibrate={"fox": text * 2})
    report = run_job(job)
    assert report.healing is not None and report.healing.steps > 0
    assert "It then learned from the original" in (out / "README.md").read_text()
    assert [each.name for each in folder.parent.iterdir() if each.name.startswith(".")] == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--to", "gqa:3"], "can have 1, 2, 4"),
        (["--to", "mla:999"], "rank=999 is not in"),
        (["--to", "elsewhere"], "is not one of mha, gqa:N"),
        (["--to", "mla:12+4", "--by-layer"], "by_layer deals out ranks"),
    ],
)
def test_what_cannot_be_made_is_said_before_any_work(folder, options, said, capsys):
    out = folder.parent / "made"
    assert run_with(["convert", str(folder), *options, "--out", str(out)]) == 2
    assert said in capsys.readouterr().err
    assert not out.exists()


def test_texts_of_one_name_are_all_read(tmp_path):
    files = [tmp_path / name / "text.txt" for name in "ab"]
    for file in files:
        file.parent.mkdir()
        file.write_text(file.parent.name)
    assert _read(files) == {str(file): file.parent.name for file in files}
    assert _read(files[:1]) == {"text.txt": "a"}


def run_with(words):
    import sys

    before, sys.argv = sys.argv, ["regard", *words]
    try:
        return run()
    finally:
        sys.argv = before
