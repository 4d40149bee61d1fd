"""docs/tutorials.md: the tutorial's code and regard agree, and disagree after an edit.

What is run is the page: its blocks, at other sizes and in other dtypes, and with the mistakes in
them that the page names. Mistakes that are no edit of a block are in test_tutorial_mistakes.py.
"""

import re
from importlib import import_module

import pytest
import torch

from pages import read
from regard_verify import check
from tutorial_blocks import (
    CACHED,
    EDITS,
    GQA,
    HEAD,
    INFERENCE,
    MASKS,
    MHA,
    MLA,
    MQA,
    PAGE,
    ROPE,
    SDPA,
    V3,
    code_of,
    difference,
    listed,
    mistakes,
    run,
    sections,
)

SIZES = {  # odd ones, and ones where two axes are equal
    SDPA: [{"L": 3, "D": 5}, {"H": 1, "L": 17, "D": 1}, {"H": 5, "L": 5, "D": 5}],
    MASKS: [{"L": 1, "S": 7}, {"L": 6, "S": 6}, {"L": 3, "S": 4, "E": 12}],
    HEAD: [{"B": 1, "L": 1, "E": 3}, {"B": 3, "L": 7, "E": 11}, {"L": 64}],
    MHA: [{"L": 3, "E": 15, "H": 3}, {"L": 13, "E": 7, "H": 1}, {"L": 5, "E": 25, "H": 5}],
    CACHED: [{"L": 5, "E": 15, "H": 3}, {"B": 1, "L": 13, "E": 7, "H": 7}, {"L": 8, "H": 8}],
    MQA: [{"L": 1, "E": 15, "H": 3}, {"B": 3, "L": 7, "E": 21, "H": 7}, {"L": 4}],
    GQA: [{"L": 5, "E": 24, "G": 3}, {"L": 9, "E": 30, "H": 3, "G": 1}, {"G": 6, "L": 6}],
    ROPE: [{"B": 1, "H": 1, "L": 1, "D": 2}, {"L": 31, "D": 6}, {"H": 5, "L": 10, "D": 10}],
    MLA: [{"B": 1, "L": 1}, {"L": 7, "E": 15, "H": 3, "D": 5, "R": 2, "C": 7}, {"H": 1, "D": 3}],
    V3: [{"L": 7, "H": 3, "D": 5, "R": 2, "V": 3, "C": 7}, {"E": 5, "D": 1, "V": 1}, {"V": 14}],
    INFERENCE: [{"L": 3, "H": 3, "D": 5, "R": 2, "V": 3, "C": 7}, {"B": 1, "L": 21}, {"H": 1}],
}
ANGLES_IN_DEFAULT_DTYPE = (GQA, ROPE)  # as the tutorials have them: not in half precision
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 8 * 2.0**-8}
CASES = [
    pytest.param(section, sizes, dtype, id=f"{section}-{sizes}-{str(dtype)[6:]}")
    for section, each in SIZES.items()
    for sizes in ({}, *each)
    for dtype in TOLERANCE
    if dtype != torch.bfloat16 or section not in ANGLES_IN_DEFAULT_DTYPE
]


def test_every_section_is_run():
    assert list(SIZES) == list(sections())


@pytest.mark.parametrize(("section", "sizes", "dtype"), CASES)
def test_both_agree(section, sizes, dtype):
    names = run(section, dtype=dtype, **sizes)
    largest = max(each.double().abs().max().item() for each in listed(names["expected"]))
    assert difference(names) <= TOLERANCE[dtype] * (1 + largest)


@pytest.mark.parametrize("mistake", EDITS, ids="-".join)
def test_an_edit_is_a_mistake(mistake):
    section, edit = mistake[0], EDITS[mistake]
    if edit.raises:
        with pytest.raises((AttributeError, RuntimeError), match=re.escape(edit.raises)):
            run(section, (edit.old, edit.new), **edit.sizes)
    else:
        assert difference(run(section, (edit.old, edit.new), **edit.sizes)) > 1e-3
    for sizes in edit.hidden_by:
        assert difference(run(section, (edit.old, edit.new), **sizes)) < 1e-12


def test_the_translation_names_as_many_mistakes():
    translated = read(PAGE.replace("docs/", "docs/zh/"))
    assert len(re.findall(r"^- \*\*", translated, re.MULTILINE)) == len(mistakes())


FOUND = {  # the class, the edits, and the laws that the page names
    "scale_closed_form": (MHA, "MHA", ("q.size(-1) ** 0.5", "(q.size(-1) * self.heads) ** 0.5")),
    "gqa_order": (GQA, "GQA", EDITS[GQA, "`repeat` instead of `repeat_interleave`"][:2]),
    "chunked_prefill": (
        CACHED,
        "CachedMHA",
        EDITS[CACHED, "No causal mask once there is a past"][:2],
    ),
    "decode_equals_full": (
        CACHED,
        "CachedMHA",
        EDITS[CACHED, "A causal mask of the new tokens from the top left"][:2],
    ),
    "super_init": (HEAD, "Head", EDITS[HEAD, "`super().__init__()` forgotten"][:2]),
}


@pytest.mark.parametrize("law", FOUND)
def test_verify_names_the_law(law, tmp_path, monkeypatch):
    section, name, edit = FOUND[law]
    monkeypatch.syspath_prepend(tmp_path)
    for edits, found in (((), False), ((edit,), True)):
        module = f"tutorial_{law}_{found}"
        (tmp_path / f"{module}.py").write_text(code_of(section, edits).partition("\nold")[0])
        report = check(getattr(import_module(module), name), quick=True, only=[law])
        assert not report.problem
        assert (report.failed == [law]) == found
    assert f"`{law}` for" in read(PAGE)
