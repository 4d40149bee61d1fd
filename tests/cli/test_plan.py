"""regard plan: its table and JSON, and what it refuses."""

import io
import json
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
from rich.console import Console

import regard.cli.plan as cli
from pages import PRINTS, blocks, read
from regard.cli.app import run
from regard.plan.devices import DEVICES
from regard.plan.planning import plan
from regard.plan.shapes import LayerShape, ModelShape

GUIDES = ["docs/guides/plan.md", "docs/zh/guides/plan.md"]
SIZES = ["--num-heads", "8", "--hidden-size", "64", "--num-kv-heads", "4", "--num-layers", "3"]
LAYER = LayerShape(
    hidden_size=64, num_heads=8, num_kv_heads=4, head_dim=8, v_head_dim=8, qk_rope_head_dim=8
)
MODEL = ModelShape(
    name="a <b> model",
    architecture="llama",
    layers=(LAYER, LAYER),
    hidden_size=64,
    weight_bytes=5_000,
    remarks=("Layer 1 is odd.",),
)


@pytest.fixture(autouse=True)
def no_stored_rates(tmp_path, monkeypatch):
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path / "rates"))


def command(monkeypatch, capsys, *arguments):
    """The exit code, stdout and stderr."""
    monkeypatch.setattr("sys.argv", ["regard", "plan", *map(str, arguments)])
    code = run()
    return code, *capsys.readouterr()


def printed(found, width=80, show=cli.show):
    console = Console(file=io.StringIO(), width=width, highlight=False)
    show(found, console)
    return console.file.getvalue()


def test_a_plan_by_sizes(monkeypatch, capsys):
    code, out, err = command(monkeypatch, capsys, *SIZES, "--device", "h100", "--context", 100)
    assert (code, err) == (0, "")
    for text in (
        "a model of these sizes: 3 layers, float32; 100 tokens in 1 row; 1 GiB for the",
        "GQA-4, as shipped",
        "MLA(24+8), 50 %",
        "K8V4,",
        "Times: at least, on NVIDIA H100.",
        "100 tokens in 1 row take 75 KiB as shipped; 1 GiB holds 1,398,101 tokens",
        "The smallest conversion, ",
        "Next: regard compare",
    ):
        assert text in " ".join(out.split()), text
    assert max(map(len, out.splitlines())) <= 80


def test_reasons_and_every_storage_are_asked_for(monkeypatch, capsys):
    given = (*SIZES, "--device", "h100")
    _, short, _ = command(monkeypatch, capsys, *given)
    assert "blocks" not in short.partition("Next:")[0] and "data sheet" not in short
    _, out, _ = command(monkeypatch, capsys, *given, "--why", "--all")
    flat = " ".join(out.split())
    for text in (
        "the buffers of its caches, which double when they are full",
        "NVIDIA H100 data sheet",
        "decoding is bound by memory, prefill by ",
    ):
        assert text in flat, text
    _, blocks, _ = command(monkeypatch, capsys, *given, "--block", "32", "--why")
    assert "blocks of 32, as serving engines" in blocks.replace(":", ",")


def test_an_answer_fits_a_screen():
    """24 lines of 80 columns: a model with all kinds of rows, and times on one device."""
    layer = replace(
        LAYER, num_heads=32, num_kv_heads=8, hidden_size=2048, head_dim=64, v_head_dim=64
    )
    model = replace(MODEL, layers=(layer,) * 30, hidden_size=2048, remarks=())
    for devices in ([], ["h100"]):
        for width in (80, 120):
            lines = printed(plan(model, devices=devices), width).splitlines()
            assert len(lines) <= 24, "\n".join(lines)


def test_what_does_not_fit_is_said_with_what_does():
    text = " ".join(printed(plan(MODEL, context=1024, memory=1 << 18)).split())
    assert "take 512 KiB as shipped, more than 256 KiB. They fit with" in text
    assert "or converted to MHA; GQA-2; MQA; MLA(24+8), 50 %;" in text
    text = " ".join(printed(plan(MODEL, context=1024, memory=100)).split())
    assert "more than 100 B. Nothing here fits." in text


def test_a_plan_of_a_model(monkeypatch, capsys, tmp_path):
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, out, _ = command(monkeypatch, capsys, tmp_path, "--device", "h100")
    assert code == 0
    assert "2 layers" in out
    assert "GQA-4, as shipped" in out


def test_every_width_holds_the_table():
    found = plan(MODEL, devices=["h100", "rtx-4090", "mi300x"], context=10**9, batch=1000)
    for width in (60, 80, 120):
        assert max(map(len, printed(found, width).splitlines())) <= width


def test_the_row_as_shipped_by_hand():
    """2 layers x 1,024 tokens x 4 heads x 16 channels x 4 bytes are 512 KiB."""
    found = plan(MODEL, context=1024, memory=1 << 30, devices=["h100"])
    row = next(line for line in printed(found).splitlines() if line.startswith("GQA-4"))
    assert row.split()[3] == "512"
    assert "2,097,152" in row  # tokens in 1 GiB
    text = printed(found, show=partial(cli.show, every=True, why=True))
    row = next(line for line in text.splitlines() if line.startswith("GQA-4"))
    assert row.split()[3:7] == ["plain", "0.0246", "512", "1,024"]
    assert "the weights take 4.88 KiB" in text
    assert "Layer 1 is odd." in text


def test_json_is_strict_and_whole(monkeypatch, capsys):
    code, out, _ = command(monkeypatch, capsys, *SIZES, "--json", "--device", "h100")
    assert code == 0
    data = json.loads(out, parse_constant=pytest.fail)
    row = data["rows"][0]
    assert row["cost"]["cache_bytes"] == 3 * 4096 * 64 * 4
    assert row["cost"]["decode_intensity"] > 0
    assert row["storage"]["name"] == "plain"
    assert row["layers"][0]["indices"] == [0, 1, 2]
    assert (data["block"], row["block_bytes"]) == (0, None)
    assert data["devices"]["h100"]["source"] == "NVIDIA H100 data sheet"
    assert row["decode"][0]["bound"] == "memory"


def test_what_ranks_send_is_printed(monkeypatch, capsys):
    options = ("--device", "h100", "--tp", 2, "--cp", 2)
    code, out, _ = command(monkeypatch, capsys, *SIZES, *options, "--context", 1024)
    assert code == 0
    # 3 layers: half of the tokens' outputs, added up in float32, and their 2 key heads of 8 + 8
    nbytes = 3 * (512 * 64 * 4 + 512 * 2 * 16 * 4 + 32)
    sent = [line.split() for line in out.splitlines() if line.startswith("GQA-4")][1:]
    cells = [cell for line in sent for cell in line[3:]]
    assert cells[2:4] == [f"{nbytes / 2**10:.0f}", "KiB"]
    _, out, _ = command(monkeypatch, capsys, *SIZES, *options, "--context", 1024, "--why")
    flat = re.sub(r"\s+", " ", out)
    assert "for its attention; rank 1, which sends most" in flat
    assert max(map(len, out.splitlines())) <= 80


def test_what_ranks_send_is_in_json(monkeypatch, capsys):
    options = ("--json", "--device", "h100", "--cp", 4)
    _, out, _ = command(monkeypatch, capsys, *SIZES, *options)
    data = json.loads(out, parse_constant=pytest.fail)
    row = data["rows"][0]
    assert row["sent"]["prefill"] == 3 * (3072 * 64 * 4 + 3 * 32)


def test_without_rates_or_a_device_the_way_to_get_them_is_said(monkeypatch, capsys):
    code, out, _ = command(monkeypatch, capsys, *SIZES)
    assert code == 0
    assert "--device h100 or this: times" in out and "decode, ms" not in out
    assert "--device this is this machine" in command(monkeypatch, capsys, *SIZES, "--why")[1]


def test_names_with_markup_are_text():
    found = plan(MODEL, devices=["h100"])
    assert "a <b> model" in printed(found)
    odd = ModelShape(name="[red]x[/]", architecture="", layers=(LAYER,), hidden_size=64)
    assert "[red]x[/]" in printed(plan(odd, devices=["h100"]))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ([], "give a MODEL, or --num-heads and --hidden-size"),
        (["--num-heads", 8], "give a MODEL"),
        (["nowhere", "--num-heads", 8], "a MODEL has its own sizes"),
        (["--num-heads", 0, "--hidden-size", 64], "should be greater than or equal to 1"),
        ([*SIZES, "--context", 10**15], "is above 1,000,000,000,000"),
        ([*SIZES, "--context", 0], "should be greater than or equal to 1"),
        ([*SIZES, "--memory", "nan"], "nan GiB is not above 0"),
        ([*SIZES, "--memory", "inf"], "inf GiB is not above 0"),
        ([*SIZES, "--memory", 1e9], "1000000000.0 GiB is not above 0 and at most 900,000,000"),
        ([*SIZES, "--memory", -1], "-1.0 GiB is not above 0"),
        ([*SIZES, "--tp", 0], "should be greater than or equal to 1"),
        ([*SIZES, "--dtype", "int8"], "is not one of"),
        ([*SIZES, "--block", -1], "should be greater than or equal to 0"),
        ([*SIZES, "--block", 16, "--page-size", 64], "give block or page_size"),
        ([*SIZES, "--device", "x"], "device='x' is not one of this, b200"),
        ([*SIZES, "--device", "t4", "--dtype", "bfloat16"], "no rate of Tesla T4 in bfloat16"),
        ([*SIZES, "--attention", "x"], "attention='x' is not one of 'shipped', 'mha'"),
        (["--num-heads", 7, "--hidden-size", 64], "does not divide hidden_size=64"),
        (["nowhere"], "nowhere"),
    ],
)
def test_what_is_refused_is_a_sentence(monkeypatch, capsys, options, reason):
    code, out, err = command(monkeypatch, capsys, *options)
    assert (code, out) == (2, "")
    assert reason in re.sub(r"[\s│╭╮╰╯─]+", " ", err)
    assert "Traceback" not in err


def test_refusals_of_options_need_no_torch():
    program = (
        "import sys; from regard.cli.app import run; sys.argv = ['regard', 'plan', '--context', "
        "'0']; run(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize("page", GUIDES)
def test_the_guide_names_every_device(page):
    text = read(page)
    assert [name for name in DEVICES if f"`{name}`" not in text] == []


def shown_commands(page):
    """The commands of a page whose output stands below them."""
    for before, after in pairwise(blocks(page)):
        if before.language == "sh" and after.title == PRINTS:
            yield before.code.split(), after.code


@pytest.mark.parametrize("page", GUIDES)
def test_the_guide_shows_what_is_printed(page, monkeypatch, capsys, tmp_path):
    folder = tmp_path / "my-model"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (snippet,) = (block.code for block in blocks(page, "python") if "config.json" in block.code)
    exec(snippet, {"__name__": "__main__"})  # writes config.json
    capsys.readouterr()
    found = list(shown_commands(page))
    assert [words[1] for words, _ in found] == ["describe", "plan"]
    for words, shown in found:
        monkeypatch.setattr("sys.argv", words)
        assert run() == 0
        assert capsys.readouterr().out.rstrip() == shown.rstrip()


def test_storages_are_rows_in_pages_too(monkeypatch, capsys):
    options = ["--attention", "shipped", "--storage", "K8V4", "--page-size", 64]
    code, out, err = command(monkeypatch, capsys, *SIZES, *options)
    assert (code, err) == (0, "")
    assert "K8V4" in out and "int8 " not in out
    code, _, err = command(monkeypatch, capsys, *SIZES, "--storage", "K3V3")
    assert code == 2 and "'K3V3' is none of plain" in " ".join(err.split())
