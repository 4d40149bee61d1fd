"""The comparison of tiny models: every row runs, exact rows are exact, and rows are measured."""

import json
import math
import random
from types import SimpleNamespace

import pytest
import torch

import regard
from regard.cli.app import run
from regard.compare import CANDIDATES, Runner, Texts, chosen, compare
from regard.compare.candidates import ALL
from regard.compare.measure import DECODED, PREFILLS, STEPS
from regard.convert import measuring
from regard.hf.generating.predicting import hidden_states, losses_of
from regard.ops.backends import BACKENDS
from regard.turns import LEAST
from tiny import VOCABULARY, tiny, tokens

COLUMNS = {
    "cache_bytes_per_token",
    "run_bytes_per_token",
    "context_in_memory",
    "prefill_tokens_per_second",
    "decode_tokens_per_second",
    "prefill_speed",
    "decode_speed",
    "perplexity_ratio",
    "decode_perplexity_ratio",
    "perplexity",
    "decode_perplexity",
    "largest_logit_difference",
}

RATIOS = {"prefill_speed", "decode_speed", "perplexity_ratio", "decode_perplexity_ratio"}


def rows_of(result):
    return {row.name: row for row in result.rows}


def ran(result):
    return [row for row in result.rows if not row.remark]


def test_every_row_was_measured(result):
    usual = {each.name.format(kind="GQA") for each in chosen([ALL])}
    assert [row.name for row in result.rows if row.name in usual] == [
        "GQA, as shipped",
        "GQA, int8 cache",
        "GQA, int4 cache",
        "GQA, K8V4 cache",
        "GQA, K6V4 cache",
        "MHA, spelled out",
        "MQA, aligned",
        "joint latent, full rank",
        "joint latent, 75 %",
        "joint latent, 50 %",
        "DeepSeek's MLA, 50 %",
        "DeepSeek's MLA, 50 %, int8 cache",
    ]
    for row in result.rows:
        if row.remark:  # in a long run: two key heads cannot be merged into fewer than two
            assert row.name == "GQA, half the key heads"
            continue
        numbers = COLUMNS - RATIOS - {"largest_logit_difference"}
        assert all(getattr(row, column) > 0 for column in numbers)
        ratios = [getattr(row, column) for column in sorted(RATIOS)]
        if row is result.rows[0]:
            assert ratios == [None] * 4
            continue
        assert all(0 < each.low <= each.value <= each.high for each in ratios)
        decoding, steps, reading, prefills = [each.pairs for each in ratios]
        assert (decoding, reading, prefills) == (2 * DECODED, 2 * 39, PREFILLS)
        assert LEAST <= steps <= STEPS // 2


def test_exact_rows_are_exact(result):
    shipped = result.rows[0]
    for row in ran(result):
        if row.exact:
            assert row.largest_logit_difference <= result.proof.tolerance
            assert row.perplexity == pytest.approx(shipped.perplexity, rel=1e-5)
            assert row.decode_perplexity == pytest.approx(shipped.decode_perplexity, rel=1e-5)
        elif row.name != "joint latent, 75 %":  # 24 of 32 elements: as many as the width
            assert row.largest_logit_difference > result.proof.tolerance


def test_cache_bytes_are_those_of_the_shapes(result):
    layers, kv_heads, heads, dim = 2, 2, 4, 8
    bytes_of = {name: row.cache_bytes_per_token for name, row in rows_of(result).items()}
    assert bytes_of["GQA, as shipped"] == layers * 2 * kv_heads * dim * 4
    assert bytes_of["MHA, spelled out"] == layers * 2 * heads * dim * 4
    assert bytes_of["GQA, int8 cache"] == layers * 2 * kv_heads * (dim + 4)
    assert bytes_of["GQA, K8V4 cache"] == layers * kv_heads * (dim + dim // 2 + 2 * 4)
    assert bytes_of["GQA, K6V4 cache"] == layers * kv_heads * (dim * 10 // 8 + 2 * 4)
    assert bytes_of["joint latent, full rank"] == layers * (24 * 4 + 4)  # the width is 24
    assert bytes_of["joint latent, 50 %"] == layers * 16 * 4
    assert bytes_of["DeepSeek's MLA, 50 %"] == layers * 16 * 4
    assert bytes_of["MQA, aligned"] == layers * 2 * dim * 4
    assert rows_of(result)["GQA, as shipped"].context_in_memory == (1 << 20) // 256


def test_bytes_are_those_of_the_checkpoint_and_both_are_shown(folder, monkeypatch, capsys):
    """A model of 16 bits that runs in float32 still has a cache of 16 bits where it is used."""
    tiny("llama").half().save_pretrained(folder)
    given = ["compare", folder, "--context", 20, *FEW]
    assert command(monkeypatch, *given, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["dtype"], found["cache_dtype"]) == ("float32", "float16")
    shipped, int8, _ = found["rows"]
    ratios = [each["run_bytes_per_token"] / each["cache_bytes_per_token"] for each in found["rows"]]
    assert ratios == [2.0, 1.0, pytest.approx((24 * 4 + 4) / (24 * 2 + 4))]
    assert shipped["cache_bytes_per_token"] == 2 * 2 * 2 * 8 * 2
    assert shipped["context_in_memory"] == found["memory"] // 128
    assert int8["cache_bytes_per_token"] / 128 == (8 + 4) / 16  # of the checkpoint's, not 3 / 8
    assert "of the shipped float16 cache" in found["verdict"]
    assert command(monkeypatch, *given) == 0
    assert "float16 run in float32" in capsys.readouterr().out
    assert command(monkeypatch, *given, "--dtype", "float16") == 0
    assert "in float32" not in capsys.readouterr().out


def test_perplexity_is_the_models_own(result, texts):
    model = tiny("llama")
    with torch.no_grad():
        losses = [model(input_ids=w[None], labels=w[None]).loss.item() for w in texts.windows]
    assert result.rows[0].perplexity == pytest.approx(math.exp(sum(losses) / 2), rel=1e-5)


def test_decode_perplexity_is_the_models_own_over_the_last_tokens(result, texts):
    model, count = tiny("llama"), result.decoded // 2
    assert count == DECODED
    with torch.no_grad():
        losses = [losses_of(model, hidden_states(model, w[None])[0], w) for w in texts.windows]
    mean = torch.cat([each[-count:] for each in losses]).mean()
    assert result.rows[0].decode_perplexity == pytest.approx(float(mean.exp()), rel=1e-5)


def test_a_row_that_cannot_be_made_says_why(texts):
    rows = rows_of(compare(tiny("qwen3"), texts, candidates=chosen(["mqa", "mha"])))
    assert "has no place for qk_norm" in rows["MQA, aligned"].remark
    assert rows["MQA, aligned"].perplexity is None
    assert rows["MHA, spelled out"].perplexity == pytest.approx(rows["GQA, as shipped"].perplexity)


def test_a_context_beyond_the_models_positions_is_refused():
    long = Texts(tokens(2, 200), tokens(1, 50), "")
    with pytest.raises(ValueError, match="more than the 128 positions"):
        compare(tiny("llama"), long)


def test_progress_counts_to_its_end(texts):
    seen = []
    compare(
        tiny("llama"),
        texts,
        candidates=chosen(["int8", "mqa"]),
        progress=lambda *given: seen.append(given),
    )
    _, *seen = seen  # the model's own logits, before the work is known
    done = [each for _, each, _ in seen]
    assert done == sorted(done) and len({total for _, _, total in seen}) == 1
    assert seen[-1] == ("done", seen[-1][2], seen[-1][2])
    steps = list(dict.fromkeys(what for what, _, _ in seen if ": " not in what))
    assert steps == [
        "GQA, as shipped", "GQA, int8 cache", "converting", "MQA, aligned", "prefills in turns",
        "done",
    ]  # fmt: skip


def test_rows_are_given_as_they_are_finished(texts):
    given = []
    result = compare(
        tiny("llama"),
        texts,
        candidates=chosen(["int8", "mha"]),
        prefills=False,
        on_row=given.append,
    )
    assert [len(each.rows) for each in given] == [1, 2, 3]
    assert [row.name for row in given[-1].rows] == [row.name for row in result.rows]
    for so_far in given[1:]:
        assert so_far.rows[1].decode_speed is not None and so_far.rows[1].prefill_speed is None
        assert so_far.rows[1].prefill_tokens_per_second > 0
        assert so_far.verdict != given[0].verdict


def test_rows_say_which_backends_ran(result):
    for row in ran(result):
        assert set(row.prefill_backend.split(" and ")) <= set(BACKENDS)
        assert set(row.decode_backend.split(" and ")) <= set(BACKENDS)


@pytest.fixture
def folder(tmp_path):
    """A model as a folder, with a tokenizer of letters."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {chr(ord("@") + at): at for at in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="@"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
    tiny("llama").save_pretrained(tmp_path)
    return tmp_path


FEW = ("--attention", "int8", "--attention", "latent-100")


def command(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["regard", *map(str, arguments)])
    return run()


def test_json_alone_on_stdout(folder, monkeypatch, capsys):
    assert command(monkeypatch, "compare", folder, "--context", 20, *FEW, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert set(result) == {
        "processor", "model", "kind", "num_layers", "context", "memory", "dtype", "threads", "text",
        "proof", "rows", "verdict", "seconds", "decoded", "cache_dtype",
    }  # fmt: skip
    assert set(result["proof"]) == {"largest_difference", "tolerance", "largest_logit"}
    ran = {"prefill_backend", "decode_backend"}
    others = {"name", "exact", "remark", "share", "found", "best"}
    assert all(set(row) == COLUMNS | ran | others for row in result["rows"])
    assert result["context"] == 20
    assert result["decoded"] == 19


def test_a_command_that_is_stopped_prints_the_rows_so_far(folder, monkeypatch, capsys):
    whole = compare

    def stopping(*given, on_row, **named):
        def stop(so_far):
            on_row(so_far)
            if len(so_far.rows) == 2:
                raise KeyboardInterrupt

        return whole(*given, on_row=stop, **named)

    monkeypatch.setattr("regard.compare.compare", stopping)
    assert command(monkeypatch, "compare", folder, "--context", 20, *FEW) == 130
    out, err = capsys.readouterr()
    assert "GQA, as shipped (exact)" in out and "GQA, int8 cache" in out
    assert "joint latent" not in out
    assert "regard: stopped after 2 of 3 rows\n" in err
    monkeypatch.setattr("regard.compare.compare", interrupted)
    assert command(monkeypatch, "compare", folder, "--context", 20, *FEW) == 130
    assert capsys.readouterr().out == ""


def interrupted(*given, **named):
    raise KeyboardInterrupt


def test_own_text(folder, monkeypatch, capsys, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be " * 50)
    given = ["--context", 20, *FEW, "--text", text]
    assert command(monkeypatch, "compare", folder, *given) == 0
    out, err = capsys.readouterr()
    assert "joint latent, full rank" in out
    assert "Traceback" not in err


def test_version(monkeypatch, capsys):
    assert command(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"regard {regard.__version__}\n"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda at: at / "nowhere", "does not exist; give a folder with config.json"),
        (lambda at: at, "has no config.json"),
        (lambda at: _file(at / "model.gguf", "no"), "a GGUF file begins with b'GGUF'"),
        (lambda at: _file(at / "config.json", "{}").parent, "needs weights in model.safetensors"),
        (lambda at: _pickled(at), "pickles can run code"),
        (lambda at: _broken(at), "it must begin with a header of up to"),
    ],
)
def test_what_is_not_a_model_is_a_sentence_and_exit_code_2(
    make, message, tmp_path, monkeypatch, capsys
):
    assert command(monkeypatch, "compare", make(tmp_path)) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert "Traceback" not in err
    assert out == ""


@pytest.mark.parametrize(
    "arguments", [["--text", "nowhere.txt"], ["--memory", "0"], ["--context", "1"], ["--what"]]
)
def test_wrong_options_are_exit_code_2(arguments, monkeypatch, capsys):
    assert command(monkeypatch, "compare", *arguments) == 2
    assert capsys.readouterr().out == ""


def _file(path, text):
    path.write_text(text)
    return path


def _pickled(at):
    _file(at / "config.json", "{}")
    return _file(at / "pytorch_model.bin", "").parent


def _broken(at):
    _file(at / "config.json", '{"model_type": "llama"}')
    return _file(at / "model.safetensors", "x").parent


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_a_model_with_qk_norm_is_compared_with_joint_latents(family, texts):
    keys = ["latent-100", "latent-50", "deepseek-50", "mqa"]
    found = rows_of(compare(tiny(family), texts, candidates=chosen(keys)))
    assert found["joint latent, full rank"].largest_logit_difference < 1e-3
    assert found["joint latent, 50 %"].perplexity is not None
    for name in ("DeepSeek's MLA, 50 %", "MQA, aligned"):
        assert "no place for qk_norm" in found[name].remark
        assert "a joint latent of keys and values does" in found[name].remark
        assert "larger budget" not in found[name].remark


class Slowing:
    """A clock on which every step and prefill of a comparison takes a cost of its cache's class,
    on a machine that becomes twice as slow in the meantime, with noise of 3 %."""

    def __init__(self, monkeypatch, costs, calls):
        self.now, self.done, self.calls, self.costs = 0.0, 0, calls, costs
        self.random = random.Random(0)
        monkeypatch.setattr(measuring, "time", SimpleNamespace(perf_counter=lambda: self.now))
        for name in ("step", "hidden"):
            own = getattr(Runner, name)
            monkeypatch.setattr(Runner, name, lambda runner, x, own=own: self.run(runner, x, own))

    def run(self, runner, tokens, own):
        self.done += 1
        noise = math.exp(self.random.gauss(0.0, 0.03))
        self.now += self.costs[type(runner.caches[0])] * 2 ** (self.done / self.calls) * noise
        return own(runner, tokens)


@pytest.mark.parametrize("speed", [1.0, 0.8, 1.25])
def test_a_machine_that_slows_down_is_no_verdict(speed, texts, monkeypatch):
    """Equal true speeds are no difference; 0.8 of the shipped speed is found, without a reason,
    since fewer bytes are read."""
    costs = {regard.KVCache: 1.0, regard.QuantizedCache: 1 / speed}
    Slowing(monkeypatch, costs, calls=150)
    result = compare(tiny("llama"), texts, candidates=chosen(["int8"]))
    (_, row) = result.rows
    for found in (row.prefill_speed, row.decode_speed):
        assert found.differs == (speed != 1.0)
        assert found.value == pytest.approx(speed, rel=0.05)
    wanted = "no measurable difference in speed" if speed == 1.0 else f"decodes at {speed:.1f}"[:-1]
    assert wanted in result.verdict
    assert ("because" in result.verdict) <= (speed > 1.0)


def test_the_shipped_attention_is_the_first_row(texts):
    int8, shipped = CANDIDATES[1], CANDIDATES[0]
    rows = compare(tiny("llama"), texts, candidates=[int8, shipped]).rows
    assert [row.name for row in rows] == ["GQA, as shipped", "GQA, int8 cache"]
    assert rows[0].decode_speed is None and rows[1].decode_speed is not None


def test_windows_are_windows(texts):
    """Rows of a model with windows hold no more than these, and decode what one pass gives."""
    result = compare(tiny("mistral"), texts, candidates=chosen(["int8", "latent-100"]))
    shipped, int8, latent = result.rows
    assert shipped.cache_bytes_per_token == 5 * 256 / 40
    assert int8.cache_bytes_per_token == 5 * 96 / 40
    assert shipped.context_in_memory is None
    assert latent.decode_perplexity == pytest.approx(shipped.decode_perplexity, rel=1e-5)
    assert result.decoded == 2 * DECODED
    assert "any" in result._repr_html_()


def test_a_model_that_cannot_be_installed_is_refused_with_the_reason(texts, monkeypatch):
    def refuse(model):
        raise ValueError("masks that regard does not read")

    monkeypatch.setattr("regard.compare.runner.install", refuse)
    with pytest.raises(ValueError, match="masks that regard does not read"):
        compare(tiny("llama"), texts, candidates=chosen(["int8"]))
