"""The drawings of the documents are those that the programs in `drawings/` draw."""

import re

import pytest

from covering import few
from interpreters import run_python
from pages import ROOT, pages, read

DRAWINGS = sorted(path for path in (ROOT / "drawings").glob("*.py") if path.stem != "common")
PICTURES = ROOT / "docs/pictures"
NUMBER = re.compile(r"-?\d+\.\d+|-?\d+")


@pytest.mark.parametrize("program", few(DRAWINGS, 10), ids=lambda path: path.stem)
def test_a_drawing_is_what_its_program_draws(program, tmp_path):
    done = run_python(program, tmp_path, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    drawn = sorted(tmp_path.glob("*.svg"))
    assert drawn
    for path in drawn:
        new, old = (each.read_text() for each in (path, PICTURES / path.name))
        assert NUMBER.sub("N", new) == NUMBER.sub("N", old), f"{program} draws {path.name} anew"
        for one, other in zip(NUMBER.findall(new), NUMBER.findall(old), strict=True):
            assert float(one) == pytest.approx(float(other), abs=0.05, rel=1e-3)


def test_every_picture_has_its_program_and_its_page():
    names = {path.name for path in PICTURES.glob("*.svg")}
    programs = "".join(path.read_text() for path in DRAWINGS)
    shown = "".join(read(page) for page in pages())
    for name in names:
        assert f'"{name.removesuffix(".svg")}"' in programs, f"no program draws {name}"
        assert f"pictures/{name}" in shown, f"no page shows {name}"
