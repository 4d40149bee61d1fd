"""Which line of the subject does what."""

from pathlib import Path

import pytest

import subjects
from mutants import defects
from regard_verify import check
from regard_verify.blame import lines_of
from regard_verify.subject.understand import understand

SOURCE = Path(subjects.__file__).read_text().splitlines()
EXPECTED = {
    "Tutorial": {
        "scale": "math.sqrt(self.d_model)",
        "mask": "masked_fill(mask == 1, -1e9)",
        "softmax": "scores.softmax(-1)",
    },
    "ThreeInputs": {"scale": "torch.einsum", "mask": "mask == 0", "softmax": "energy.softmax(3)"},
    "right": {"scale": "q.shape[-1] ** -0.5", "mask": "masked_fill(~mask", "softmax": "softmax"},
    "WithCache": {"cache": "torch.cat", "dropout": "self.dropout(", "causal": "masked_fill(hidden"},
}


@pytest.mark.parametrize("name", EXPECTED)
def test_the_lines_of_a_subject(name):
    found = lines_of(understand(getattr(subjects, name)))
    for topic, code in EXPECTED[name].items():
        file, _, rest = found[topic].partition(":")
        assert file.endswith("subjects.py")
        number, _, line = rest.partition(": ")
        assert code in line
        assert line[:20] in SOURCE[int(number) - 1]


def test_a_broken_law_comes_with_its_line():
    report = check(subjects.Tutorial, quick=True)
    (cause,) = report.causes
    assert cause.law == "scale_closed_form"
    assert "scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_model)" in cause.line
    faulty = defects.variant(defects.How(drops_in_eval=True))
    (cause,) = check(faulty, quick=True).causes
    assert "F.dropout(weights" in cause.line


def test_no_line_is_better_than_one_of_another_file():
    import torch

    assert lines_of(understand(torch.nn.functional.scaled_dot_product_attention)) == {}
