"""The conversion of a whole model: exact if it says so, refused before any work, saved to load."""

import json
from dataclasses import replace

import pytest
import torch

from regard.cli.app import run
from regard.cli.convert import _read
from regard.convert import Healed, convert, converting, target_of, windows_of
from regard.convert.job import Job, run_job
from regard.convert.texts import many_kinds
from regard.hf import attention_modules, attention_of, install, load, place
from tiny import SIZES, tiny, tokens

FAMILIES = ("llama", "qwen2", "mistral")


def shipped_of(model):
    return [attention_of(module) for module in attention_modules(model).values()]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("to", ["mha", "mla:24"])
@torch.no_grad()
def test_exact_conversions_change_no_logit(family, to):
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
def test_lossy_conversions_report_their_loss_and_the_refit_reduces_it(family, to):
    model = tiny(family)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    (made,) = convert(model, [target_of(to, shipped_of(model))], tokens(8, 128))
    assert [each.name for each in made.report] == list(attention_modules(model))
    assert all(0 <= each.still_missed <= each.missed for each in made.report)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    placed = place(model, made.layers)
    assert torch.isfinite(placed(tokens(2, 20)).logits).all()


@torch.no_grad()
def test_layers_converted_together_are_those_converted_alone():
    model, text = tiny("llama"), tokens(8, 128)
    targets = [target_of(to, shipped_of(model)) for to in ("mqa", "mla:12")]
    together, alone = convert(model, targets, text), [convert(model, [t], text)[0] for t in targets]
    for one, other in zip(together, alone, strict=True):
        for mine, theirs in zip(one.layers, other.layers, strict=True):
            for name, value in mine.state_dict().items():
                torch.testing.assert_close(value, theirs.state_dict()[name])


@torch.no_grad()
@pytest.mark.parametrize("to", ["mqa", "mla:8", "mla:8+4"])
def test_refined_layers_miss_less_and_leave_the_model_alone(to):
    model, text = tiny("llama"), tokens(8, 128)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    plain = target_of(to, shipped_of(model))
    # a latent that is refined at all is fitted to the predictions, and begins elsewhere
    little = plain if to == "mqa" else replace(plain, passes=1)
    made, refined = convert(model, [little, replace(plain, passes=6)], text)
    for one, other in zip(made.report[:1], refined.report[:1], strict=True):  # on equal inputs
        assert one.missed == other.missed
        assert other.still_missed < one.still_missed
    kept = convert(model, [replace(plain, passes=3, refit=False)], text)[0]
    assert [each.still_missed for each in kept.report] == [each.missed for each in kept.report]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@torch.no_grad()
@pytest.mark.parametrize(
    ("share", "passes", "fitted"),
    [(0.5, 1, True), (0.5, 0, False), (0.3, 1, False), (0.75, 1, False)],
)
@pytest.mark.parametrize("rotary", ["", "+2"])
def test_refined_latents_around_half_are_fitted_to_the_predictions(
    share, passes, fitted, rotary, monkeypatch
):
    runs, model = [], tiny("llama")
    run = converting.gradients_of_predictions
    monkeypatch.setattr(
        converting, "gradients_of_predictions", lambda *a, **b: runs.append(a) or run(*a, **b)
    )
    (first, _) = shipped_of(model)
    rank = int(share * 2 * first.num_kv_heads * first.head_dim) - len(rotary)
    target = replace(target_of(f"mla:{rank}{rotary}", shipped_of(model)), passes=passes)
    convert(model, [target, replace(target, refit=False)], tokens(8, 128))
    assert len(runs) == fitted  # once for all layers and targets


@torch.no_grad()
def test_ranks_by_layer_keep_their_total():
    model = tiny("llama")
    target = replace(target_of("mla:12", shipped_of(model)), by_layer=True)
    (made,) = convert(model, [target], tokens(8, 128))
    assert sum(layer.kv_lora_rank for layer in made.layers) == 24


def test_too_little_text_is_refused():
    model = tiny("llama")
    with pytest.raises(ValueError, match="at least 1,024 tokens in all"):
        convert(model, [target_of("mqa", shipped_of(model))], tokens(2, 20))


def test_a_target_in_another_form_is_refused(unchecked):
    with pytest.raises(TypeError, match=r"made by target_of\(to, layers\), got 'mqa'"):
        convert(tiny("llama"), ["mqa"], tokens(8, 128))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (torch.full((8, 128), 99), r"tokens are in 0\.\.\d+, as the model has them, got 99 to 99"),
        (torch.full((8, 128), -1), "as the model has them, got -1 to -1"),
        (torch.rand(8, 128), r"got torch\.float32; as windows_of makes them"),
        (torch.ones(8, 128).bool(), r"got torch\.bool; as windows_of makes them"),
        ([[1] * 128] * 8, "got list; as windows_of makes them"),
        (None, "got NoneType; as windows_of makes them"),
    ],
)
def test_text_that_the_model_does_not_have_is_refused_before_any_work(text, message, unchecked):
    model = tiny("llama")
    model.register_forward_pre_hook(lambda *given: pytest.fail("the model ran"))
    with pytest.raises(ValueError, match=message):
        convert(model, [target_of("mqa", shipped_of(model))], text)


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
def test_the_command_saves_a_model_that_loads(folder, options, stock, capsys):
    out, text = folder.parent / "made", folder.parent / "text"
    if options != ["--to", "mqa"]:  # calibrated on the installed texts, which takes longer
        text.write_text("a layer attends to the tokens before its own, and so on. " * 50)
        options = [*options, "--calibrate", str(text)]
    assert run_with(["convert", str(folder), *options, "--out", str(out), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((out / "report.json").read_text())
    assert printed["ratio"] > 0 and printed["stock"] is stock
    assert printed["after"]["cache_bytes_per_token"] < printed["before"]["cache_bytes_per_token"]
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
    card = (out / "README.md").read_text()
    assert "It was then trained to imitate the original" in card
    assert f" {report.healing.tokens:,} tokens of fox; before that" in card
    assert [each.name for each in folder.parent.iterdir() if each.name.startswith(".")] == []


def test_healing_on_text_that_the_model_writes(folder, monkeypatch):
    """On windows for each minute, of three quarters of the length, and passages; by the command."""
    out, text, seen = folder.parent / "made", folder.parent / "text", []
    text.write_text("a layer attends to the tokens before its own, and so on. " * 50)

    def heal(student, teacher, tokens, **given):
        seen.append(tokens)
        return Healed((0.5,), 1.0, tokens.numel())

    monkeypatch.setattr("regard.convert.job.heal", heal)
    options = ["--to", "mqa", "--calibrate", str(text), "--own-text", "--minutes", "0.3"]
    assert run_with(["convert", str(folder), *options, "--out", str(out)]) == 0
    (tokens,) = seen
    _, tokenizer = load(folder)
    passages = windows_of(tokenizer, [many_kinds()], length=tokens.shape[1])
    assert len(tokens) == len(passages) + 3  # 0.3 minutes times 8
    assert tokens[: len(passages)].equal(passages)
    card = (out / "README.md").read_text()
    assert " tokens of short texts of many kinds, text that the original wrote; before" in card
    assert [each.name for each in folder.parent.iterdir() if each.name.startswith(".")] == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--to", "gqa:3"], "can have 1, 2, 4"),
        (["--to", "mla:999"], "rank=999 is not in"),
        (["--to", "elsewhere"], "is not one of mha, gqa:N"),
        (["--to", "mla:12+4", "--by-layer"], "by_layer allots ranks"),
    ],
)
def test_what_cannot_be_made_is_refused_before_any_work(folder, options, message, capsys):
    out = folder.parent / "made"
    assert run_with(["convert", str(folder), *options, "--out", str(out)]) == 2
    assert message in capsys.readouterr().err
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
