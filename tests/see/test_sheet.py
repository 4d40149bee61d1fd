"""The small picture of all heads, decoded by another program."""

import base64
import io

import torch
from matplotlib.image import imread

from regard.see.sheet import GAP, INK, cells, data_address, sheet


def test_cells_of_heads_lie_side_by_side():
    overview = torch.arange(24.0).view(2, 3, 2, 2)
    plane = cells(overview)
    assert plane.shape == (4 + GAP, 6 + 2 * GAP)
    assert torch.equal(plane[2 + GAP :, :2], overview[1, 0])
    assert torch.equal(plane[:2, 2 + GAP : 4 + GAP], overview[0, 1])


def test_the_picture_has_one_colour_and_the_weights_as_opacity():
    overview = torch.rand(2, 3, 5, 4)
    picture = torch.from_numpy(imread(io.BytesIO(sheet(overview))))
    assert (picture[..., :3] * 255).round().unique(dim=0).flatten(0, -2).unique(dim=0).tolist() == [
        list(INK)
    ]
    torch.testing.assert_close(picture[..., 3], cells(overview).sqrt(), rtol=0, atol=0.003)


def test_an_address_holds_the_picture():
    assert base64.b64decode(data_address(b"abc").partition(",")[2]) == b"abc"
