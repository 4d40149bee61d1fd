"""The frontier: losses are the model's, intervals a bootstrap, bytes those of the cache."""

import copy
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

import regard.hf
from regard.cli import compare as verb
from regard.cli.app import run
from regard.compare import (
    CANDIDATES,
    Document,
    Frontier,
    Row,
    Texts,
    documents_of,
    frontier,
)
from regard.compare.candidates import condensed, evicted, in_pages, methods, within
from regard.compare.frontiers import DECODED, bootstrap
from regard.compare.needles import answered
from regard.compare.runner import Runner
from regard.hf import attention_modules, attention_of
from regard.plan import LayerShape
from regard.plan.modules import shape_of
from regard.see.pages.curves import write_result
from regard.sparse import EvictingCache, ExpectedAttention
from regard.turns import Ratio

SHIPPED = CANDIDATES[0]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=2, vocab_size=60,
        num_hidden_layers=2, intermediate_size=32,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def texts():
    torch.manual_seed(1)
    return Texts(torch.randint(60, (3, 150)), torch.randint(60, (2, 64)), "random tokens")


@pytest.fixture(scope="module")
def result(model, texts):
    rows = [SHIPPED, evicted(0.5), evicted(0.25, "streaming"), evicted(0.5, format="K8V8")]
    rows += [condensed(0.5), condensed(0.25, "K8V8"), in_pages("K4V4")]
    latent = next(each for each in CANDIDATES if each.key == "latent-50")
    return frontier(model, texts, candidates=[*rows, latent], name="tiny")


@torch.no_grad()
def test_losses_of_the_shipped_row_are_the_models_own(model, texts, result):
    logits = model(texts.windows).logits[:, :-1]
    losses = F.cross_entropy(logits.mT, texts.windows[:, 1:], reduction="none")
    begin = 150 - DECODED
    first = result.rows[0]
    assert first.perplexity == pytest.approx(losses[:, : begin - 1].mean().exp().item(), rel=1e-4)
    assert first.decode_perplexity == pytest.approx(
        losses[:, begin - 1 :].mean().exp().item(), rel=1e-4
    )
    assert first.perplexity_ratio is None


@torch.no_grad()
def test_losses_of_an_evicted_row_are_those_of_its_cache(model, texts, result):
    """By transformers' own generate loop, with regard installed."""
    other = copy.deepcopy(model)
    regard.hf.install(other)
    cache = regard.hf.cache(other, "evicting", budget=0.5, score=ExpectedAttention())
    begin = 150 - DECODED
    logits = [other(texts.windows[:, :begin], past_key_values=cache).logits[:, -1:]]
    for at in range(begin, 149):
        logits.append(other(texts.windows[:, at : at + 1], past_key_values=cache).logits)
    losses = F.cross_entropy(torch.cat(logits, 1).mT, texts.windows[:, begin:], reduction="none")
    assert result.rows[1].decode_perplexity == pytest.approx(losses.mean().exp().item(), rel=1e-4)
    held = cache.caches[0].rows
    assert result.rows[1].share == pytest.approx(held / 149)
    assert result.rows[1].perplexity == pytest.approx(result.rows[0].perplexity, rel=1e-5)


@torch.no_grad()
def test_losses_of_a_condensed_row_are_those_of_a_cache_condensed_before_the_end(
    model, texts, result
):
    own, begin = copy.deepcopy(model), 150 - DECODED
    regard.hf.install(own)
    cache = regard.hf.cache(own, "condensing")
    logits = [own(texts.windows[:, :begin], past_key_values=cache).logits[:, -1:]]
    regard.hf.condense(cache, texts.windows[:, :begin], 0.5)
    for at in range(begin, 149):
        logits.append(own(texts.windows[:, at : at + 1], past_key_values=cache).logits)
    losses = F.cross_entropy(torch.cat(logits, 1).mT, texts.windows[:, begin:], reduction="none")
    row = next(row for row in result.rows if row.name.endswith("condensed to 50 %"))
    assert row.decode_perplexity == pytest.approx(losses.mean().exp().item(), rel=1e-4)
    assert row.share == pytest.approx((begin / 2 + DECODED) / 150, abs=0.01)


@torch.no_grad()
def test_losses_and_bytes_of_a_row_in_pages_are_those_of_its_cache(model, texts, result):
    begin = 150 - DECODED
    cache = regard.hf.cache(model, "paged", format="K4V4", page_size=64)
    logits = [model(texts.windows[:, :begin], past_key_values=cache).logits[:, -1:]]
    for at in range(begin, 149):
        logits.append(model(texts.windows[:, at : at + 1], past_key_values=cache).logits)
    losses = F.cross_entropy(torch.cat(logits, 1).mT, texts.windows[:, begin:], reduction="none")
    row = next(row for row in result.rows if row.name.endswith("K4V4 in pages"))
    assert row.decode_perplexity == pytest.approx(losses.mean().exp().item(), rel=1e-4)
    # of 149 tokens 64 and 21 in float32, and 64 in codes: half a byte, 4 bytes of scale and zero
    # for each of 16 channels of the keys, and for each token of the values
    codes = 64 * 16 // 2 + 4 * 16 + 64 * (16 // 2 + 4)
    assert row.cache_bytes_per_token * 149 == 2 * 2 * (85 * 2 * 16 * 4 + codes)


def test_bytes_of_codes_and_rows_multiply(result):
    half, codes = result.rows[1].share, result.rows[3].share
    assert codes < half
    # heads of 16 in K8V8: 16 codes and a scale and a zero of 2 bytes, of 64 bytes in float32
    assert codes == pytest.approx(half * 20 / 64, rel=1e-3)


def test_a_row_that_cannot_be_made_says_why(result):
    assert "calibration text" in result.rows[-1].remark
    assert result.rows[-1].decode_perplexity is None


def test_rows_on_the_front_have_no_better_one(result):
    ran = [row for row in result.rows if row.decode_perplexity is not None]
    for row in ran:
        better = [
            each
            for each in ran
            if each.cache_bytes_per_token < row.cache_bytes_per_token
            and each.decode_perplexity < row.decode_perplexity
        ]
        assert not (row.best and better)
    assert any(row.best for row in ran)


def test_a_bootstrap_draws_whole_windows():
    torch.manual_seed(2)
    base = torch.rand(20, 30)
    shift = torch.randn(20, 1) * 0.1
    got = bootstrap(base + shift, base)
    assert got.value == pytest.approx(math.exp(shift.mean()), rel=1e-6)
    error = 1.96 * float(shift.std(correction=0)) / 20**0.5  # of a mean of twenty windows
    assert math.log(got.high) == pytest.approx(float(shift.mean()) + error, abs=0.2 * error)
    assert math.log(got.low) == pytest.approx(float(shift.mean()) - error, abs=0.2 * error)
    assert bootstrap(base[:1] + 1, base[:1]).high == math.inf


def test_a_budget_has_rows_that_fit_it(model, texts):
    layers = [shape_of(attention_of(each)) for each in attention_modules(model).values()]
    rows = within(0.25, layers, context=150, dtype="bfloat16")
    assert rows[0] is SHIPPED
    names = [row.name for row in rows]
    assert "{kind}, evicted to 25 %" in names
    assert any("K4V4" in name for name in names)
    assert not any("pages" in name for name in names)  # two of three are whole
    # the 64 tokens that are decoded are all held: 42 % of 448 are 188, and 252 of 512 fit a half
    longer = [row.name for row in within(0.5, layers, context=512, dtype="bfloat16")]
    assert "{kind}, condensed to 42 %" in longer
    # 127 of 511 tokens are whole: codes of a third fit, 21 bytes of 64 in K4V4, and 25 do not
    assert [name for name in longer if "pages" in name] == ["{kind}, K4V4 in pages"]
    found = frontier(model, texts, candidates=[rows[0], *rows[1:3]], budget=0.25)
    assert all(row.share <= 0.255 for row in found.rows[1:])
    assert found.verdict.startswith("At 25% of the shipped cache")
    with pytest.raises(ValueError, match="between 0 and 1"):
        frontier(model, texts, budget=1.0)
    with pytest.raises(ValueError, match="windows have 120 tokens or more"):
        frontier(model, Texts(texts.windows[:, :50], texts.calibration, ""))


def test_a_layer_with_a_window_shrinks_less_than_the_others():
    """It keeps its 32 tokens, so the other layer keeps 9 % of 3,200, not 10."""
    whole = LayerShape(hidden_size=64, num_heads=8, num_kv_heads=2, head_dim=8, v_head_dim=8)
    rows = within(0.1, [whole, replace(whole, window=32)], context=3200, dtype="bfloat16")
    assert "{kind}, evicted to 9 %" in [row.name for row in rows]
    alone = within(0.1, [whole], context=3200, dtype="bfloat16")
    assert "{kind}, evicted to 10 %" in [row.name for row in alone]
    assert not any(
        "evicted" in row.name for row in within(0.1, [whole], context=90, dtype="bfloat16")
    )


def _letters(text, **options):
    return {"input_ids": [ord(each) for each in text]}


def test_documents_hold_their_facts():
    documents = documents_of(_letters, "filler. " * 4000, context=900, documents=2, facts=3)
    for document in documents:
        text = "".join(map(chr, document.tokens.tolist()))
        assert len(text) == 900
        for question, answer in zip(document.questions, document.answers, strict=True):
            asked = "".join(map(chr, question.tolist()))
            name = asked.split("of ")[-1].removesuffix(" is")
            from regard.compare.needles import WORDS

            assert f"The password of {name} is {WORDS[answer]}." in text
    again = documents_of(_letters, "filler. " * 4000, context=900, documents=2, facts=3)
    assert all(a.tokens.equal(b.tokens) for a, b in zip(documents, again, strict=True))
    with pytest.raises(ValueError, match="give a longer text"):
        documents_of(_letters, "short", context=900)
    with pytest.raises(ValueError, match=r"got context=64; give \d+ or more"):
        documents_of(_letters, "filler. " * 4000, context=64)


@torch.no_grad()
def test_answers_leave_the_caches_as_the_document_did(model):
    torch.manual_seed(3)
    tokens, questions = torch.randint(60, (80,)), tuple(torch.randint(60, (5,)) for _ in range(3))
    options = torch.arange(4, 12)
    layers = [attention_of(each) for each in attention_modules(model).values()]

    def right(question):
        logits = model(torch.cat([tokens, question])[None]).logits[0, -1]
        return int(logits[options].argmax())

    document = Document(tokens, questions, tuple(map(right, questions)), options)
    wrong = Document(tokens, questions, tuple(right(q) ^ 1 for q in questions), options)
    for cache in ("auto", lambda: EvictingCache(1.0)):
        runner = Runner(model, layers, cache=cache)
        got = answered(runner, [document, wrong])
        assert got.tolist() == [[True] * 3, [False] * 3]
        assert {each.length for each in runner.caches} == {80}


def test_it_is_printed_and_drawn(result, tmp_path, capsys):
    for width in (80, 140):
        verb.show(result, Console(width=width))
        shown = capsys.readouterr().out
        assert "evicted to 50 %" in shown
        assert max(map(len, shown.splitlines())) <= width
    path = tmp_path / "page.html"
    write_result(result, path)
    page = Path(path).read_text()
    assert page.count("evicted to 50 %</li>") == 1
    assert "the smallest cache for a loss" in page


def test_usual_methods_are_of_every_kind():
    names = [each.name for each in methods()]
    assert names[0] == "{kind}, as shipped"
    for word in (
        "K4V4 cache",
        "K4V4 in pages",
        "joint latent",
        "evicted to 50 %, K8V4",
        "by streaming",
    ):
        assert any(word in name for name in names)


def test_the_command_prints_a_table_and_a_page(model, texts, monkeypatch, capsys, tmp_path):
    loaded = SimpleNamespace(model=model, tokenizer=_letters, stored=torch.float32, name="tiny")
    monkeypatch.setattr("regard.cli.loading.load_for", lambda *given, **options: loaded)
    monkeypatch.setattr("regard.compare.texts_for", lambda *given, **options: texts)
    monkeypatch.setattr("regard.compare.documents_of", lambda *given, **options: ())
    few = [SHIPPED, evicted(0.5)]
    monkeypatch.setattr("regard.compare.frontiers.within", lambda *given, **options: few)
    page = tmp_path / "page.html"
    command = f"regard compare tiny --budget 0.5 --context 150 --html {page}"
    monkeypatch.setattr("sys.argv", command.split())
    assert run() == 0
    shown = capsys.readouterr()
    assert "evicted to 50 %" in shown.out
    assert "of the shipped cache" in shown.out
    assert page.exists()


@pytest.mark.parametrize(
    "given",
    [
        ["--budget", "1.5"],
        ["--memory", "inf"],
        ["--memory", "1e300"],
        ["--frontier", "--attention", "int8"],
        ["--frontier", "--windows", "7"],
    ],
)
def test_options_that_do_not_fit_are_refused(given, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["regard", "compare", "somewhere", *given])
    assert run() == 2
    assert given[-2] in capsys.readouterr().err


def test_a_verdict_names_the_rows_that_intervals_do_not_tell_apart():
    def row(name, value, low, high):
        ratio = Ratio(value, low, high, 8)
        return Row(name, share=0.2, decode_perplexity_ratio=ratio)

    rows = (row("codes", 1.01, 1.0, 1.03), row("evicted", 1.02, 1.01, 1.05))
    far = row("latent", 1.4, 1.3, 1.5)
    result = Frontier("tiny", 64, 8, "text", 0, 0.25, (*rows, far))
    end = "1.010x the decode perplexity; the intervals do not tell it from evicted."
    assert result.verdict.endswith(end)
    alone = Frontier("tiny", 64, 8, "text", 0, 0.25, (rows[0], far))
    assert alone.verdict.endswith("codes loses least: 1.010x the decode perplexity.")


def test_progress_ends_with_all_work_done(model, texts):
    """No step begins after the seconds of all work that were announced with the first."""
    latent = next(each for each in CANDIDATES if each.key == "latent-25")
    steps, few = [], [SHIPPED, *methods()[1:3], latent]
    frontier(model, texts, candidates=few, progress=lambda *given: steps.append(given))
    assert all(done <= total == steps[0][2] for _, done, total in steps)
    assert steps[-2][1] < steps[-1][1] == steps[-1][2]
