"""The tables of docs/conversions.md are those of the files that it was measured in."""

import json
import re

import pytest

from pages import ROOT, read

PAGE = "docs/conversions.md"
ELSEWHERE = json.loads((ROOT / "docs/elsewhere.json").read_text())["results"][1:]
GEMMA = json.loads((ROOT / "docs/elsewhere-gemma.json").read_text())["results"][1:]
RESULTS = json.loads((ROOT / "docs/conversions.json").read_text())["results"]
OWN = RESULTS[0]["perplexity"]
HEALED = {"MQA, 27 minutes": "MQA, aligned"}


def spaced(method):
    """The name of a method as the page writes it: a space before the percent sign."""
    return re.sub(r"(\d)%", r"\1 %", method)


def shown(name):
    """The cells of the first row of this name below the tables of other texts."""
    own = read(PAGE).partition("## Every method and size")[2].splitlines()
    row, *_ = [line for line in own if line.startswith(f"| {name} |")]
    return [cell.strip() for cell in row.strip("|").split("|")][1:]


def figure(ratio):
    return f"{ratio:.3f}" if ratio < 10 else f"{ratio:,.0f}"


@pytest.mark.parametrize("result", RESULTS, ids=lambda each: each["method"])
def test_a_row_is_what_was_measured(result):
    alone = re.fullmatch(r"latent, 50 %, from (.*) alone", result["method"])
    ratios = [result["ratio"], *(result["perplexity"][name] / OWN[name] for name in OWN)]
    wanted = [f"{100 * result['cache']:.0f} %", *map(figure, ratios)]
    assert shown(alone[1] if alone else spaced(result["method"])) == wanted


def test_the_first_table_is_that_of_other_texts():
    found = {each["method"]: f"{each['elsewhere']['value']:.3f}" for each in ELSEWHERE}
    table = read(PAGE).partition("## On other texts")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if " % | " in line]
    assert len(rows) == 6
    for to, share, untrained, *healed in rows:
        form = to.replace("a joint ", "").replace(", which can be absorbed", "")
        form = form.replace(", ranks by layer", " by layer" if share == "50 %" else "")
        name = form if form == "MQA, aligned" else f"{form}, {share}"
        refined = f"{name}, many kinds, refined"
        assert untrained == found.get(f"{refined} in four passes", found[refined]), name
        if healed and healed[0].strip("| "):
            name += ", many kinds, refined, healed"
            assert healed[0] == found.get(f"{name} on both texts", found[name])


def test_healing_begins_where_the_table_ends():
    methods = {each["method"]: each for each in RESULTS}
    for name, method in HEALED.items():
        assert shown(name)[1] == figure(methods[method]["ratio"])


def measured(result):
    """The cells of a row on other texts."""
    groups = [result[name] for name in ("own", "elsewhere")]
    cells = [f"{each['value']:.3f} ({each['low']:.3f}-{each['high']:.3f})" for each in groups]
    cells += [f"{result['texts'][name]:.3f}" for name in ("bible", "perl", "javascript", "german")]
    return [result["method"], f"{100 * result['cache']:.0f} %", *cells]


@pytest.mark.parametrize(
    ("begin", "end", "results"),
    [
        ("## On other texts", "### Gemma 3", ELSEWHERE),
        ("### Gemma 3", "## ", GEMMA),
    ],
    ids=["SmolLM2", "Gemma 3"],
)
def test_the_rows_on_other_texts_are_those_of_their_model(begin, end, results):
    section = read(PAGE).partition(f"\n{begin}")[2].partition(f"\n{end}")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines()]
    rows = [row for row in rows if len(row) == 8 and "(" in row[2]]
    assert sorted(rows) == sorted(measured(result) for result in results)


@pytest.mark.parametrize(
    "result", [each for each in ELSEWHERE if "paired" in each], ids=lambda each: each["method"]
)
def test_a_paired_interval_is_what_was_measured(result):
    groups = [result["paired"][name] for name in ("own", "elsewhere")]
    wanted = [f"{each['value']:.3f} ({each['low']:.3f}-{each['high']:.3f})" for each in groups]
    assert f"| {' | '.join([result['method'], *wanted])} |" in read(PAGE).splitlines()


@pytest.mark.parametrize("result", ELSEWHERE, ids=lambda each: each["method"])
def test_a_row_says_its_own_calibration_and_machine(result):
    many = "many kinds" in result["method"]
    assert result["calibration_tokens"] == (19_968 if many else 8_192)
    assert "torch" in result["machine"]
    if many:  # both are rows of the same windows, so that they can be compared one by one
        assert {len(each) for each in result["losses"].values()} == {4}
