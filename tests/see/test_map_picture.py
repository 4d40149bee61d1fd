"""Pictures of maps: files of the right kind, with the names of tokens."""

import re

import pytest
import torch
from matplotlib.image import imread

from regard import Attention, Causal
from regard.see import attention
from regard.see.figures import inked
from regard.see.map_picture import draw


def maps_of(tokens=4, **choice):
    layers = torch.nn.Sequential(*(Attention(8, 2, mask=Causal()) for _ in range(3)))
    names = [f"n{at}$" for at in range(tokens)]
    return attention(layers, torch.randn(1, tokens, 8), names=names, **choice)


def words_of(path):
    return re.findall(r"<!-- (.*?) -->", path.read_text(encoding="utf-8"))


def test_an_overview_is_drawn_if_no_head_is_named(tmp_path):
    draw(maps_of(layers=[0]), tmp_path / "all.svg")
    words = words_of(tmp_path / "all.svg")
    assert {"layer", "head", "0", "1", "2"} <= set(words)


def test_maps_have_the_names_of_their_tokens(tmp_path):
    maps = maps_of(layers=[0, 2], heads=[1])
    draw(maps, tmp_path / "maps.svg", [(0, 1), (2, 1)])
    words = words_of(tmp_path / "maps.svg")
    assert [each for each in words if "layer" in each] == ["layer 0, head 1", "layer 2, head 1"]
    assert words.count("n3$") == 4


def test_of_long_texts_the_ends_are_numbered(tmp_path):
    draw(maps_of(40, layers=[0]), tmp_path / "long.svg", [(0, 0)])
    assert {"0", "39"} <= set(words_of(tmp_path / "long.svg"))


def test_a_png_is_on_white_paper(tmp_path):
    draw(maps_of(layers=[0]), tmp_path / "maps.png", [(0, 0)])
    corner = imread(tmp_path / "maps.png")[0, 0]
    assert corner.tolist() == [1, 1, 1, 1]


def test_opacity_is_the_square_root_of_a_weight():
    assert inked(torch.tensor([[0.25, 1.0]]))[0, :, 3].tolist() == [0.5, 1.0]


def test_pictures_that_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"a picture is .svg or .png, got .*maps.gif"):
        draw(maps_of(), tmp_path / "maps.gif")
    with pytest.raises(ValueError, match="a picture has 24 maps at most, got 25"):
        draw(maps_of(layers=[0]), tmp_path / "maps.svg", [(0, 0)] * 25)
