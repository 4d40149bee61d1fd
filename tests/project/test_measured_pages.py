"""The pages of measurements show what the files of measurements hold."""

import json
import re
import tomllib
from collections import Counter

import pytest

from pages import ROOT, read
from regard.compare import CANDIDATES
from regard.plan import plan
from regard.plan.from_sizes import model_from_sizes

NEAR = 0.05  # from 1: times as fast as the peer's
LANGUAGES = ("docs/guides/machines.md", "docs/zh/guides/machines.md")


def rows_under(page: str, heading: str) -> list[list[str]]:
    """The cells of the first table below a heading of a page."""
    table = re.search(r"(?:^\|.*\n)+", read(page).partition(f"\n## {heading}\n")[2], re.MULTILINE)
    assert table is not None, f"{page} has no table under {heading}"
    lines = table[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def fastest_peers() -> list[tuple[str, str, dict[str, float]]]:
    """Of each case of the suite, its name, its fastest peer and that peer's row."""
    found = []
    for result in json.loads((ROOT / "docs/benchmarks.json").read_text())["results"]:
        peers = {k: v for k, v in result.get("rows", {}).items() if not k.startswith("regard")}
        if peers:
            best = min(peers, key=lambda name: peers[name]["ms"])
            found.append((result["case"], best, peers[best]))
    return found


def test_what_is_slower_is_shown_as_it_was_measured():
    slower = [
        [case, peer, f"{row['ratio']:.2f}", f"{row['low']:.2f} to {row['high']:.2f}"]
        for case, peer, row in fastest_peers()
        if row["ratio"] > 1 + NEAR
    ]
    assert rows_under("docs/speed.md", "Slower than a peer") == slower


def test_every_case_is_counted():
    ratios = [row["ratio"] for _, _, row in fastest_peers()]
    counts = Counter((ratio > 1 + NEAR) - (ratio < 1 - NEAR) for ratio in ratios)
    shown = [int(row[1]) for row in rows_under("docs/speed.md", "Every case")]
    assert shown == [counts[-1], counts[0], counts[1]]
    assert f"runs {len(ratios)} cases" in read("docs/speed.md")


def speed_of(row: dict, phase: str, form: str) -> str:
    """The ratio to the first row's speed with its quartiles, where the file has it."""
    ratio = row.get(f"{phase}_speed")
    if ratio is None:
        return format(row[f"{phase}_tokens_per_second"], form)
    low, high = ratio["low"], ratio["high"]
    value = "same" if low <= 1 <= high else f"{ratio['value']:.2f}"
    return f"{value} ({low:.2f}-{high:.2f})"


def perplexity_of(row: dict, name: str) -> str:
    """With two standard errors of its ratio to the first row's, where the file has it."""
    ratio = row.get(f"{name}_ratio")
    shown = f"{row[name]:.3f}"
    return shown if ratio is None else f"{shown} ±{ratio['high'] / ratio['value'] - 1:.1%}"


def test_ratios_of_caches_are_against_the_checkpoint():
    """The share that the first page names is that of the checkpoint's dtype, on every page."""
    found = json.loads((ROOT / "docs/compare.json").read_text())
    assert (found["cache_dtype"], found["dtype"]) == ("float16", "float32")
    rows = {row["name"]: row["cache_bytes_per_token"] for row in found["rows"]}
    shares = {name: f"{nbytes / rows['GQA, as shipped']:.0%}" for name, nbytes in rows.items()}
    k8v4, int8 = (shares[f"GQA, {name} cache"].replace("%", " %") for name in ("K8V4", "int8"))
    for page in ("README.md", "README.zh-CN.md", "docs/choosing.md"):
        assert f"{k8v4} " in read(page), page
    assert int8 in read("docs/choosing.md")
    sizes = {"num_heads": 9, "hidden_size": 576, "num_kv_heads": 3, "num_layers": 30}
    model = model_from_sizes(**sizes, dtype="float16")
    for row in plan(model, context=1024, attentions=["shipped"]).rows:
        name = "as shipped" if row.storage.name == "plain" else f"{row.storage.name} cache"
        assert row.cost.cache_bytes / 1024 == rows[f"GQA, {name}"], "plan says the same"


@pytest.mark.parametrize(
    ("page", "heading"), [("docs/choosing.md", "The table"), ("docs/zh/choosing.md", "表格")]
)
def test_the_comparison_is_shown_as_it_was_measured(page, heading):
    rows = json.loads((ROOT / "docs/compare.json").read_text())["rows"]
    measured = [
        [
            row["name"] + " (exact)" * row["exact"],
            f"{row['cache_bytes_per_token']:,.0f}",
            f"{row['run_bytes_per_token']:,.0f}",
            f"{row['context_in_memory']:,}",
            perplexity_of(row, "perplexity"),
            perplexity_of(row, "decode_perplexity"),
            f"{row['largest_logit_difference']:.1e}",
            speed_of(row, "prefill", ",.0f"),
            speed_of(row, "decode", ",.1f"),
        ]
        for row in rows
    ]
    assert rows_under(page, heading) == measured


RANKS = [  # the cases of a table, in order
    "prefill: causal layer",
    "training: causal layer",
    "decode: 32 heads on 8 of 128",
    "decode: MLA, 16 heads",
]


@pytest.mark.parametrize(
    ("page", "heading"),
    [
        ("docs/guides/distributed.md", "What was measured"),
        ("docs/zh/guides/distributed.md", "测量了什么"),
    ],
)
def test_two_ranks_are_shown_as_they_were_measured(page, heading):
    """Seconds of two ranks, as a share of those of one process."""
    points = json.loads((ROOT / "docs/distributed.json").read_text())["points"]
    seconds = {
        (each["case"], each["what"], each["dtype"]): each["seconds"]
        for each in points
        if "case" in each
    }
    shown = [[float(cell) for cell in row[1:]] for row in rows_under(page, heading)]
    for case, shares in zip(RANKS, shown, strict=True):
        for share, dtype in zip(shares, ("float32", "bfloat16"), strict=True):
            alone = seconds[case, "one process", dtype]
            assert share == round(seconds[case, "two ranks", dtype] / alone, 2), (case, dtype)


@pytest.mark.parametrize(
    ("page", "heading"),
    [("docs/guides/pages.md", "Low-bit pages"), ("docs/zh/guides/pages.md", "低比特页")],
)
def test_what_formats_lose_is_shown_as_it_was_measured(page, heading):
    results = json.loads((ROOT / "docs/cache-quality.json").read_text())["results"]
    rows = {(each["model"], each["variant"]): each for each in results}
    shown = rows_under(page, heading)
    assert [row[0] for row in shown] == ["`K8V8`", "`K8V4`", "`K6V4`", "`K4V4`"]
    for name, bits, *cells in shown:
        pairs = zip(
            ("SmolLM2-135M-Instruct", "gemma-3-270m-q4_k_m"), (cells[:2], cells[2:]), strict=True
        )
        for model, (ratio, same) in pairs:
            row = rows[model, name.strip("`")]
            assert float(bits) == row["bits"]
            assert ratio == f"{row['ratio']:.3f} ± {row['ratio_error']:.3f}"
            assert same == f"{row['top1']:.3f}"


@pytest.mark.parametrize(
    ("page", "heading"),
    [
        ("docs/choosing.md", "Beside the caches of other engines"),
        ("docs/zh/choosing.md", "与其他引擎的缓存相比"),
    ],
)
def test_caches_of_engines_are_shown_as_they_were_measured(page, heading):
    results = json.loads((ROOT / "docs/engine-caches.json").read_text())["results"]
    measured = [
        "{value:.3f} ({low:.3f}-{high:.3f})".format(**each["ratio"])
        for each in results
        if each["ratio"]["low"] != each["ratio"]["high"]  # not the cache of numbers
    ]
    assert [row[-1] for row in rows_under(page, heading)] == measured


def test_pages_are_shown_as_they_were_measured():
    results = json.loads((ROOT / "docs/pages.json").read_text())["results"]
    found = [(each["case"], target) for each in results for target in each["targets"]]
    sealing = [target["ratio"] for _, target in found if target["of"] == "sealing"]
    steps = [
        [case, target["of"], target["to"], f"{target['ratio']:.2f}"]
        for case, target in found
        if target["of"] != "sealing"
    ]
    assert rows_under("docs/speed.md", "Pages") == steps
    assert f"takes {min(sealing):.1%} to {max(sealing):.1%} of" in read("docs/speed.md")


def test_every_row_that_can_be_compared_is_explained():
    explained = " ".join(row[1] for row in rows_under("docs/choosing.md", "What each row is"))
    assert set(re.findall(r"`([\w-]+)`", explained)) == {each.key for each in CANDIDATES}


@pytest.mark.parametrize("page", LANGUAGES)
def test_the_extras_are_those_of_the_project(page):
    """A line for the package and each extra that users install, with what it brings."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    table = re.search(r"(?:^\| `pip install .*\n)+", read(page), re.MULTILINE)
    assert table is not None
    cells = [line.split("|")[1:3] for line in table[0].splitlines()]
    shown = {re.search(r"regard(?:\[\w+\])?", name)[0]: what for name, what in cells}
    wanted = {"regard": project["dependencies"]} | {
        f"regard[{extra}]": project["optional-dependencies"][extra]
        for extra in ("cpu", "hf", "cli")
    }
    assert shown.keys() == wanted.keys()
    for name, needed in wanted.items():
        packages = {re.match(r"[\w-]+(\[[\w,]+\])?", each)[0] for each in needed}
        assert set(re.findall(r"[\w-]+(?:\[[\w,]+\])?", shown[name])) == packages, name


def test_costs_of_steps_are_shown_as_they_were_measured():
    found = json.loads((ROOT / "docs/step-costs.json").read_text())
    assert found["machine"]["processor"] in read("docs/speed.md")
    wanted = [
        [
            row["case"],
            *(f"{row[name]:.0f}" for name in ("step_us", "starting_us", "python_us")),
            *(str(row[name]) for name in ("started", "python_calls")),
            f"{row['ratio']:.2f} ({row['low']:.2f} to {row['high']:.2f})",
        ]
        for row in found["results"]
    ]
    assert rows_under("docs/speed.md", "Besides arithmetic") == wanted
