"""Pixels as PNG, decoded by another program, and a sentence where matplotlib is missing."""

import io
import sys

import pytest
import torch
from matplotlib.image import imread

from regard.see.figures import GAP, INK, cells, figure, sheet


def test_cells_of_heads_lie_side_by_side():
    overview = torch.arange(24.0).view(2, 3, 2, 2)
    plane = cells(overview)
    assert plane.shape == (4 + GAP, 6 + 2 * GAP)
    assert torch.equal(plane[2 + GAP :, :2], overview[1, 0])
    assert torch.equal(plane[:2, 2 + GAP : 4 + GAP], overview[0, 1])


def test_the_sheet_has_one_colour_and_the_weights_as_opacity():
    overview = torch.rand(2, 3, 5, 4)
    picture = torch.from_numpy(imread(io.BytesIO(sheet(overview))))
    assert (picture[..., :3] * 255).round().flatten(0, 1).unique(dim=0).tolist() == [list(INK)]
    torch.testing.assert_close(picture[..., 3], cells(overview).sqrt(), rtol=0, atol=0.003)


def test_without_matplotlib_the_sentence_says_how_to_install_it(monkeypatch):
    for module in ("matplotlib.figure", "matplotlib.image"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=r"pip install 'regard\[bench\]'"):
        figure(1, 1)
    with pytest.raises(ImportError, match=r"pip install 'regard\[bench\]'"):
        sheet(torch.zeros(1, 1, 2, 2))
