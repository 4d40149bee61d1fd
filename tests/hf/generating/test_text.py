"""regard generate: the same text under each attention and cache, time, memory, errors."""

import json
import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import invented
import regard.hf
from regard.cache.paging.pool import PagePool
from regard.cli import generate
from regard.cli.app import run
from regard.hf.generating import text
from regard.hf.generating.pool_of_model import FILE
from regard.hf.generating.text import ATTENTIONS, Written, _size
from regard.names import CACHES
from regard.ops.backends import BACKENDS
from zoo import VOCABULARY, ZOO

PROMPT = "to be or not to be"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model as a folder, with a tokenizer of letters."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("model")
    vocabulary = {chr(ord("@") + at): at for at in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="@"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.chat_template = "{% for m in messages %}{{ m['content'] }}?{% endfor %}"
    fast.save_pretrained(path)
    model = ZOO["mistral"].build()
    model.generation_config.eos_token_id = None
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def loaded(folder):
    return regard.hf.load(folder)


def test_the_text_does_not_depend_on_attention_or_cache(loaded):
    model, tokenizer = loaded
    implementation = model.config._attn_implementation
    texts = {
        regard.hf.write(
            model, tokenizer, PROMPT, attention=attention, cache=cache, max_new_tokens=12
        ).tokens
        for attention in ATTENTIONS
        for cache in ("growing", "static", "sliding", "paged", "transformers")
    }
    assert len(texts) == 1
    assert len(texts.pop()) == 12
    assert not any("forward" in vars(module) for module in model.modules())
    assert model.config._attn_implementation == implementation


@pytest.mark.parametrize("cache", [*CACHES, "transformers"])
def test_the_bytes_are_those_of_the_cache(loaded, cache):
    model, tokenizer = loaded
    written = regard.hf.write(model, tokenizer, PROMPT, cache=cache, max_new_tokens=9)
    assert written.prompt_tokens == len(PROMPT)
    numbers = 3 * 2 * 2 * 6  # of a token: layers, keys and values, heads, channels
    window = 6  # tokens that the steps left in the buffers of a window of 5
    held = {
        "growing": 26 * numbers * 4,
        "static": 26 * numbers * 4,
        "int8": window * 3 * 2 * 2 * (6 + 4),
        "int4": window * 3 * 2 * 2 * (3 + 4),
        "K8V4": window * 3 * 2 * (6 + 4 + 3 + 4),
        "K4V4": window * 3 * 2 * 2 * (3 + 4),
        "paged": 26 * numbers * 4,
    }
    if cache in held:
        assert written.cache_bytes == held[cache]
    else:
        assert 0 < written.cache_bytes < held["growing"] / 2
    assert written.prefill_tokens_per_second > 0
    assert written.decode_tokens_per_second > 0
    assert written.peak_memory > 50 << 20
    assert f"cache {_size(written.cache_bytes)}, peak memory" in str(written)
    assert set(written.prefill_backend.split(" and ")) <= set(BACKENDS)
    assert set(written.decode_backend.split(" and ")) <= set(BACKENDS)
    assert f"/s on {written.decode_backend}, cache" in str(written)


def test_a_pool_finds_what_prompts_have_in_common(loaded):
    pool = PagePool(400, 4)
    options = {"cache": "paged", "pool": pool, "max_new_tokens": 5}
    first, second = (regard.hf.write(*loaded, PROMPT + end, **options) for end in ("", " sir"))
    assert (first.prefix_tokens, second.prefix_tokens) == (0, 16)
    assert "prefill 22 tokens, 16 of them found, at " in str(second)
    assert f", first token after {second.seconds_to_first_token:.2f} s, decode 5 at" in str(second)
    alone = regard.hf.write(*loaded, PROMPT + " sir", max_new_tokens=5)
    assert alone.tokens == second.tokens
    assert (alone.prefix_tokens, alone.seconds_to_first_token > 0) == (0, True)


def test_transformers_own_attention_has_its_own_name(loaded):
    options = {"attention": "transformers", "cache": "transformers", "max_new_tokens": 3}
    written = regard.hf.write(*loaded, PROMPT, **options)
    assert (written.prefill_backend, written.decode_backend) == ("sdpa", "sdpa")
    (one,) = {regard.hf.write(*loaded, PROMPT, max_new_tokens=1).decode_backend}
    assert one == ""  # the prompt alone was read


def test_pieces_are_shown_when_generated(loaded):
    model, tokenizer = loaded
    pieces = []
    written = regard.hf.write(model, tokenizer, PROMPT, max_new_tokens=6, shown=pieces.append)
    assert "".join(pieces).strip() == written.text.strip()
    assert len(pieces) > 1


def test_sampling_follows_the_seed(loaded):
    model, tokenizer = loaded

    def once(seed):
        torch.manual_seed(seed)
        return regard.hf.write(model, tokenizer, PROMPT, temperature=2.0, max_new_tokens=12).tokens

    assert once(1) == once(1) != once(2)


def test_encoder_decoders_generate_too(loaded):
    model = ZOO["t5"].build()
    written = regard.hf.write(model, loaded[1], PROMPT, max_new_tokens=5)
    assert isinstance(written, Written)
    assert written.cache_bytes > 0


def test_sizes_are_for_reading():
    assert [_size(n) for n in (12, 2048, 3 << 20, 5 << 30)] == [
        "12 B", "2.0 KiB", "3.0 MiB", "5.00 GiB",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": ""}, "the prompt is empty"),
        ({"cache": "K9V9"}, "cache='K9V9' is not one of 'auto', 'growing', 'static'"),
        ({"format": "K8V4"}, "format='K8V4' is of pages, got cache='auto'"),
        ({"pool": PagePool(4, 4)}, "pool=PagePool.4, 4. is of pages, got cache='auto'"),
        (
            {"cache": "paged", "pool": PagePool(4, 4), "format": "K8V4"},
            "format='K8V4' is not that of pool=PagePool",
        ),
        ({"attention": "flash"}, "attention='flash' is not one of regard, interface"),
        ({"tokenizer": None}, "has no tokenizer, which a prompt needs"),
        ({"model": ZOO["bert"].build()}, "BertModel does not generate text"),
        *[
            ({"temperature": each}, "temperature is 0, or a number from 1e-6 on, got")
            for each in (-1.0, 1e-39, float("nan"), float("inf"), "1")
        ],
        ({"max_new_tokens": 2.5}, "max_new_tokens is a whole number, got 2.5"),
        ({"max_new_tokens": "3"}, "max_new_tokens is a whole number, got '3'"),
        ({"max_new_tokens": 0}, "max_new_tokens is at least 1, got 0"),
        ({"cache": "paged", "pool": 3}, "pool is a PagePool, got int"),
    ],
)
def test_what_cannot_be_written_is_a_sentence(loaded, options, message, unchecked):
    given = {"model": loaded[0], "tokenizer": loaded[1], "prompt": PROMPT, **options}
    with pytest.raises(ValueError, match=message):
        regard.hf.write(**given)


@pytest.mark.parametrize("option", [{"prompt": ["a", "b"]}, {"cache": 3}, {"cache": None}])
def test_texts_are_text(loaded, option, unchecked):
    ((name, value),) = option.items()
    given = {"prompt": PROMPT, **option}
    with pytest.raises(TypeError, match=re.escape(f"{name} is text, got {value!r}")):
        regard.hf.write(*loaded, **given)


@pytest.mark.parametrize("attention", ["interface", "transformers"])
def test_an_installation_stays_and_is_not_measured_under_another_name(loaded, attention):
    model, tokenizer = loaded
    regard.hf.install(model, precision="fast", linear=False)
    before = {name: dict(vars(each)) for name, each in model.named_modules()}
    try:
        with pytest.raises(
            ValueError, match=r"while regard is in the model; call regard\.hf\.unin"
        ):
            regard.hf.write(model, tokenizer, PROMPT, attention=attention, max_new_tokens=2)
        regard.hf.write(model, tokenizer, PROMPT, max_new_tokens=2)
        for name, module in model.named_modules():
            assert all(vars(module).get(key) is each for key, each in before[name].items())
    finally:
        regard.hf.uninstall(model)


def test_regard_as_the_implementation_is_not_measured_as_transformers(loaded):
    model, tokenizer = loaded
    before = model.config._attn_implementation
    model.set_attn_implementation(regard.hf.register())
    try:
        with pytest.raises(ValueError, match="attention='transformers' does not run while"):
            regard.hf.write(model, tokenizer, PROMPT, attention="transformers", max_new_tokens=2)
    finally:
        model.set_attn_implementation(before)


def command(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["regard", "generate", *map(str, arguments)])
    return run()


def test_the_command_ends_with_a_table(folder, monkeypatch, capsys):
    assert command(monkeypatch, folder, "--prompt", PROMPT, "--max-new-tokens", 8) == 0
    text, size, cost, backends, step = capsys.readouterr().out.rsplit("\n\n", 4)
    assert text and size == "18 tokens of prompt, 8 tokens of text"
    *heads, figures = cost.splitlines()
    assert len(heads) == 2 and re.match(r"regard, auto cache +[\d,]+  ", figures)
    assert backends.startswith("regard: prompt read on ")
    assert step.startswith("Next: --chat asks the model by its chat template; --against")
    assert step.endswith("--cache K8V4 saves memory.\n")


def test_what_was_given_is_no_next_step(folder, monkeypatch, capsys):
    options = ("--prompt", PROMPT, "--max-new-tokens", 2, "--chat", "--cache", "growing")
    assert command(monkeypatch, folder, *options) == 0
    assert capsys.readouterr().out.endswith("Next: --against transformers compares the speeds.\n")


def test_the_first_calls_are_not_timed(loaded, monkeypatch):
    """A first call of a minute, as if it compiled, changes neither the speeds nor the text."""
    now, calls = [0.0], []
    monkeypatch.setattr(text, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    model, tokenizer = loaded
    own = model.forward

    def forward(*given, **options):
        length = options["input_ids"].shape[1]
        now[0] += 0.5 if any((length == 1) == (each == 1) for each in calls) else 60.0
        calls.append(length)
        return own(*given, **options)

    monkeypatch.setattr(model, "forward", forward)
    prompt = PROMPT * 5
    written = regard.hf.write(model, tokenizer, prompt, max_new_tokens=4)
    assert calls == [text.WARM_UP, 1, 1, 90, 1, 1, 1]
    assert written.seconds_to_first_token == 0.5
    assert written.prefill_tokens_per_second == 90 / 0.5
    assert written.decode_tokens_per_second == 1 / 0.5
    again = regard.hf.write(model, tokenizer, prompt, max_new_tokens=4, warm_up=False)
    assert calls[7:] == [90, 1, 1, 1]
    assert again == replace(written, peak_memory=again.peak_memory)


def test_one_step_that_was_interrupted_changes_no_speed(loaded, monkeypatch):
    now, seconds = [0.0], iter([9.0] + [0.25] * 3 + [7.0] + [0.25] * 99)
    monkeypatch.setattr(text, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    own = loaded[0].forward

    def forward(*given, **options):
        now[0] += next(seconds)
        return own(*given, **options)

    monkeypatch.setattr(loaded[0], "forward", forward)
    written = regard.hf.write(*loaded, PROMPT, max_new_tokens=9, warm_up=False)
    assert written.decode_tokens_per_second == 1 / 0.25


@pytest.mark.parametrize("cache", ["paged", "K8V4"])
def test_warming_up_leaves_no_pages_in_a_pool_and_draws_no_numbers(loaded, cache):
    pool = PagePool(400, 4) if cache == "paged" else None
    texts = []
    for warm_up in (True, False):
        torch.manual_seed(0)
        written = regard.hf.write(
            *loaded, PROMPT, cache=cache, temperature=2.0, max_new_tokens=5, warm_up=warm_up,
            pool=pool and PagePool(400, 4),
        )  # fmt: skip
        texts.append((written.tokens, written.prefix_tokens))
    assert texts[0] == texts[1]


def test_the_command_runs_transformers_too(folder, monkeypatch, capsys):
    options = ["--prompt", PROMPT, "--max-new-tokens", 8, "--against", "transformers"]
    assert command(monkeypatch, folder, *options, "--no-stream", "--chat") == 0
    out = capsys.readouterr().out
    assert "19 tokens of prompt" in out
    rows = [line.split("  ")[0] for line in out.split("\n\n")[-2].splitlines()]
    assert rows[2:] == ["regard, auto cache", "transformers"]
    same = " ".join(out[out.rindex("The same text") :].split())
    form = (
        r"(at \d\.\d\dx transformers' speed|with no measurable difference in speed) "
        r"\(quartiles \d\.\d\d to \d\.\d\d[^;]*\)"
    )
    assert re.fullmatch(f"The same text; prefill {form}; decoding {form}.", same)


class Slowing:
    """Runs of `write` of given speeds on a machine that becomes twice as slow in the meantime."""

    def __init__(self, speeds, runs):
        self.speeds, self.runs, self.done = speeds, runs, 0

    def write(self, name):
        self.done += 1
        speed = self.speeds[name] / 2 ** (self.done / self.runs)
        return replace(
            invented.WRITTEN[0], prefill_tokens_per_second=9 * speed, decode_tokens_per_second=speed
        )


@pytest.mark.parametrize("speed", [1.0, 0.8, 1.25])
def test_two_runs_are_compared_in_turns(speed):
    """One after the other, the machine that slows down would make the second look slow."""
    machine = Slowing({"mine": speed, "theirs": 1.0}, 2 * generate.ROUNDS)
    mine, theirs = (partial(machine.write, name) for name in ("mine", "theirs"))
    found = generate._beside(invented.WRITTEN[1], mine, theirs)
    for ratio in (found.prefill_speed, found.decode_speed):
        assert ratio.differs == (speed != 1.0) and ratio.pairs == generate.ROUNDS
        assert ratio.value == pytest.approx(speed, rel=0.05)


def test_a_text_of_one_token_has_no_decode_speed():
    one = replace(invented.WRITTEN[0], decode_tokens_per_second=0.0)
    found = generate._beside(invented.WRITTEN[1], lambda: one, lambda: invented.WRITTEN[0])
    assert found.decode_speed is None and found.prefill_speed is not None
    (said,) = generate._compared([found, invented.WRITTEN[1]])
    assert "prefill" in said and "decoding" not in said
    assert "" in generate._cells(one) and "" not in generate._cells(invented.WRITTEN[0])
    assert " at 0" not in str(one) and "/s" not in str(one).split("decode")[1]


def test_json_alone_on_stdout(folder, monkeypatch, capsys):
    options = ["--prompt", PROMPT, "--max-new-tokens", 4, "--cache", "int8", "--json"]
    assert command(monkeypatch, folder, *options) == 0
    (written,) = json.loads(capsys.readouterr().out)
    assert set(written) == set(Written.__dataclass_fields__)
    assert len(written["tokens"]) == 4


def test_prefixes_in_a_folder(folder, monkeypatch, capsys, tmp_path):
    """Found by the next run, for prompts that begin alike."""
    options = ["--cache", "paged", "--prefix-cache", tmp_path / "new", "--max-new-tokens", 4]
    long, found = PROMPT * 5, []
    for prompt in (long, long + "?", "no" + long):
        assert command(monkeypatch, folder, "--prompt", prompt, *options, "--json") == 0
        (written,) = json.loads(capsys.readouterr().out)
        found.append(written["prefix_tokens"])
    assert found == [0, 64, 0]
    for changed in (["--format", "K8V4"], ["--dtype", "bfloat16"]):
        before = (tmp_path / "new" / FILE).read_bytes()
        assert command(monkeypatch, folder, "--prompt", long, *options, *changed) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert "give another folder for prefixes" in " ".join(err.split())
        assert (tmp_path / "new" / FILE).read_bytes() == before


@pytest.mark.parametrize(
    "options",
    [["--prefix-cache", "x"], ["--format", "K8V4"], ["--format", "K8V4", "--cache", "int8"]],
)
def test_pages_need_a_paged_cache(folder, options, monkeypatch, capsys):
    assert command(monkeypatch, folder, "--prompt", PROMPT, *options) == 2
    assert "it needs --cache paged, got --cache" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    "options",
    [[], ["--prompt", ""], ["--prompt", "a", "--cache", "x"], ["--prompt", "a", "--cache", "int3"]],
)
def test_wrong_options_are_exit_code_2(folder, options, monkeypatch, capsys):
    assert command(monkeypatch, folder, *options) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
