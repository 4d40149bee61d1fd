"""What the pages name exists: names of regard, arguments, files, options, commands, variables."""

import pytest

from claims import faults
from pages import ROOT, pages, read, tables_without_source, words_of

EXAMPLES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("examples/*.md"))
# CHANGELOG.md also names what is gone.
PAGES = [page for page in [*pages(), *EXAMPLES] if page != "CHANGELOG.md"]
README = ("README.md", "README.zh-CN.md")


def test_what_a_page_names_exists():
    assert [(page, fault) for page in PAGES for fault in faults(page, read(page))] == []


def test_a_table_of_measurements_says_where_they_come_from():
    assert [(page, table) for page in PAGES for table in tables_without_source(read(page))] == []


def test_the_first_page_is_short():
    lengths = {page: (words_of(read(page)), len(read(page).splitlines())) for page in README}
    assert {page: both for page, both in lengths.items() if both[0] > 900 or both[1] > 150} == {}


BROKEN = {  # a text, and what is found in it
    "`regard.masks.Casual()` hides later keys.": "regard.masks.Casual: no such name",
    "Call `regard.hf.instal(model)`.": "regard.hf.instal: no such name",
    "`torch.nn.functional.attention` is another.": "no such name",
    "`nn.MultiHeadAttention` takes masks.": "no such name",  # torch has MultiheadAttention
    "A `SlidingMask(3)` shows three keys.": "SlidingMask: no such name in regard",
    "`Causal() & SlidingWindow(width=3)`": "SlidingWindow(width=3): no such arguments",
    "`Rotary(64, style='pairs')`": "no such arguments",
    "`Causal(3)`": "no such arguments",
    "`MultiHeadLatentAttention(..., mode='auto')`": "no such arguments",
    "`attend(q, k, v, attn_mask=mask)`": "no such arguments",
    "`regard.hf.install(model, fast=True)`": "no such arguments",
    "`mask=Padding(valid, side='left')`": "no such arguments",
    "`layer.weight_of(x)` returns the weights.": "layer.weight_of: no such attribute",
    "`layer.weights(x, heads=2)`": "no such arguments",
    "`cache.size` is the number of bytes.": "cache.size: no such attribute",
    "`mask.draw(8, colour=True)`": "no such arguments",
    "See `src/regard/masks/rule.py`.": "no such file",
    "See `masks/rule.py`.": "no such file",
    "Run `python benchmarks/decoding.py`.": "no such file benchmarks/decoding.py",
    "Run `python benchmarks/decode_gqa.py --head 3`.": "has no option --head",
    "Run `./scripts/tests`.": "no such file scripts/tests",
    "Choose with `--attentions`.": "--attentions: no such option",
    "`regard compares path/to/model`": "regard has no verb compares",
    "`regard --versions`": "regard has no verb --versions",
    "`regard compare --attentions int8`": "compare has no option --attentions",
    "`regard compare --attention int9`": "attention='int9' is not one of",
    "`regard verify --only scale_closed`": "no law scale_closed",
    "`regard verify a.py:A --like head=4`": "no convention head",
    "`regard verify --budget 0.5`": "verify has no option --budget",
    "```sh\nregard convert model --to mqa\n```": "out",
    "```sh\nregard generate --prompt hi --cache int3\n```": "int3",
    "```sh\nregard bench --heads many\n```": "many",
    "```bash\nregards compare\n```": "unknown command regards",
    "```sh\ncd x && python benchmarks/nothing.py\n```": "no such file benchmarks/nothing.py",
    "```sh\npytest --regards a.py:A\n```": "no option --regards",
    "```sh\npython -m regard.server\n```": "no module regard.server",
    "```sh\ntorchrun --nodes 2 a.py\n```": "no option --nodes",
    "```sh\ntorchrun examples/x.py\n```": "no such file examples/x.py",
    "```\nregard verify a.py:A --fast\n\nbroken\n```": "verify has no option --fast",
    "Set `REGARD_TEMPO=default`.": "REGARD_TEMPO: no such environment variable",
    "`pip install regard[gpu]`": "regard[gpu]: no such extra",
}


def test_what_does_not_exist_is_found():
    found = {text: faults("docs/guides/x.md", text) for text in BROKEN}
    assert {
        text: sentences
        for text, sentences in found.items()
        if len(sentences) != 1 or BROKEN[text] not in sentences[0]
    } == {}


RIGHT = [
    "`regard.masks.Causal()`, `regard.hf.load`, `torch.nn.MultiheadAttention`, `nn.Linear`",
    "`Causal() & SlidingWindow(3) | Padding(valid)`, `Rotary(64, pairing='pairs')`, `NTK(2.0)`",
    "`MultiHeadLatentAttention(..., form='auto')`, `attend(q, k, v, mask=…)`",
    "`layer.weights(x)`, `cache.nbytes`, `mask.draw(8)`, `layer.explain(x, cache=cache)`",
    "`MyAttention`, `LlamaForCausalLM`, `DeepseekV3Attention`, `report.json`, `memory.py`",
    "`regard --version`, `regard VERB --help`, `regard verify --help`, `regard.sh`",
    "```python\nclass Tutorial: ...\n```\n`Tutorial(3)` is a class of the page.",
    "`src/regard/masks/rules.py`, `masks/rules.py`, `tests/laws/`, `path/to/model`, `i + D/2`",
    "`--attention latent-50`, `--collect-only`, `REGARD_SPEED=default`, `regard[hf,cpu]`",
    "`regard compare path/to/model --context 4096 --json`, `regard convert --heal`",
    "```sh\npip install regard  # the library\nREGARD_LONG=1 ./scripts/test -k masks\n```",
    "```sh\nregard convert path/to/model --to mla --budget 0.5 --out half\n```",
    "```\nregard, growing cache: prefill 34 tokens\n```",
    "`x.view(B, H)`, `load(path)`, `flash_attn_func(q, k, v, causal=True)`, `a | b`",
]


def test_what_exists_or_is_of_others_is_let_through():
    assert [fault for text in RIGHT for fault in faults("docs/guides/x.md", text)] == []


def test_contributors_may_name_what_is_inside():
    assert faults("docs/design.md", "`QuantizedStream` is a class.") == []
    assert faults("docs/guides/x.md", "`QuantizedStream` is a class.") != []


TIMES = "## Speed\n\n| what | time |\n|---|---:|\n| decode | {} |\n| prefill | {} |\n\n{}\n"


def test_times_without_a_command_are_found():
    missed = []
    for cell in ("0.34", "1.2x", "12 ms", "3 s", "30 tokens/s", "1.44 倍"):
        beside = TIMES.format(cell, cell, "On two cores.")
        elsewhere = TIMES.format(cell, cell, "") + "## More\n\n`python benchmarks/prefill.py`\n"
        missed += [text for text in (beside, elsewhere) if not tables_without_source(text)]
    assert missed == []


SOURCES = (
    "`python benchmarks/prefill.py`",
    "[all](benchmarks.json)",
    "`regard bench`",
    "```python\n```",
)


def test_times_beside_their_source_are_let_through():
    texts = [TIMES.format("0.34", "12 ms", source) for source in SOURCES]
    assert [text for text in texts if tables_without_source(text)] == []


def test_tables_of_sizes_need_no_source():
    assert tables_without_source(TIMES.format("46,080", "arXiv 2309.00071", "")) == []


def test_words_are_counted_without_code_and_links():
    text = "Two `words`, [a link](docs/somewhere.md).\n\n```python\nnot counted\n```\n"
    assert words_of(text) == 4
    assert words_of("注意力层与掩码") == pytest.approx(7 / 1.7)
