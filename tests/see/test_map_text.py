"""Maps as text: every line fits, and shades grow with weights."""

import torch

from regard import Attention, Causal
from regard.see import attention
from regard.see.map_text import SHADES, bar, best, map_text, readable, shaded


def test_shades_grow_with_weights():
    row = torch.tensor([0.0, 0.06, 0.07, 0.13, 0.3, 0.5, 1.0])
    assert (
        shaded(row)
        == f"{SHADES[0]}{SHADES[0]}{SHADES[1]}{SHADES[2]}{SHADES[3]}{SHADES[4]}{SHADES[4]}"
    )


def test_lines_fit_and_the_last_keys_are_shown():
    layer = Attention(8, 1, mask=Causal())
    names = [f" token{at}" for at in range(90)]
    maps = attention(layer, torch.randn(1, 90, 8), layers=[0], queries=[3, 89], names=names)
    lines = map_text(maps, 0, 0, width=40).splitlines()
    assert [line.split()[:2] for line in lines] == [["3", "token3"], ["89", "token89"]]
    assert all(len(line) <= 40 for line in lines)
    assert lines[0].split() == ["3", "token3"], "its keys are left of those shown"


def test_names_fit_in_a_line():
    assert readable(" Paris") == "Paris"
    assert readable("\n\t") == r"\n\t"
    assert readable(" ") == " "
    assert readable("a" * 30) == "a" * 11 + "…"


def test_bars_and_best():
    assert [bar(share, 4) for share in (-1.0, 0.0, 0.5, 1.0, 2.0)] == ["", "", "██", "████", "████"]
    values = torch.tensor([[0.5, 1.0], [0.0, 2.0]])
    assert best(values, 1, least=True) == [(1, 0, 0.0)]
    assert len(best(values, 9)) == 4
