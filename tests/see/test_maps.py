"""What was seen: picked out, searched, saved as others read it, and shown in a notebook."""

import base64
import re
import zipfile

import numpy
import pytest
import torch

from regard import Attention, Causal
from regard.see import AttentionMaps, attention, find

WORDS = ["The", " cat", " ßat", "\n", " <b>"]


@pytest.fixture
def maps():
    layers = torch.nn.Sequential(*(Attention(8, 2, mask=Causal()) for _ in range(3)))
    return attention(layers, torch.randn(1, 5, 8), layers=[2, 0], names=WORDS)


def test_one_map_and_the_largest_weights_of_a_query(maps):
    row = maps.weights[1, 1, 3].tolist()
    assert maps.map(0, 1)[3].tolist() == row
    wanted = sorted(zip(row[:4], WORDS[:4], strict=True), reverse=True)
    assert [token for token, _ in maps.top(0, 1, 3)] == [word for _, word in wanted]
    assert maps.top(0, 1, -2, n=1)[0] == (wanted[0][1], pytest.approx(wanted[0][0]))


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ((1, 0, 0), "the map of layer 1 was not computed, but of 2, 0"),
        ((0, 2, 0), "the map of head 2 was not computed"),
        ((0, 0, 5), "the map of query 5 was not computed"),
    ],
)
def test_maps_that_were_not_computed(maps, place, message):
    with pytest.raises(ValueError, match=message):
        maps.top(*place)


def test_a_file_holds_everything(maps, tmp_path):
    maps.save(tmp_path / "maps.npz")
    again = AttentionMaps.load(tmp_path / "maps.npz")
    for name, value in vars(maps).items():
        other = getattr(again, name)
        assert torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other
        assert type(value) is type(other)


def test_a_file_is_read_by_others(maps, tmp_path):
    """`attention[layer]` is [heads, queries, keys] and there is a token for each, as
    circuitsvis.attention.attention_patterns and attnview.display want them; without pickles."""
    maps.save(tmp_path / "maps.npz")
    with numpy.load(tmp_path / "maps.npz", allow_pickle=False) as file:
        stored = {name: file[name] for name in file.files}
    assert not any(array.dtype.hasobject for array in stored.values())
    assert stored["attention"].shape == (2, 2, 5, 5)
    assert stored["attention"].dtype == numpy.float32
    assert stored["tokens"].tolist() == stored["query_tokens"].tolist() == WORDS
    assert all(isinstance(token, str) for token in stored["tokens"].tolist())
    assert stored["layers"].tolist() == [2, 0]


def test_tokens_of_a_file_are_those_of_its_rows_and_columns(tmp_path):
    layer = Attention(8, 2, mask=Causal())
    some = attention(layer, torch.randn(1, 5, 8), queries=[4], keys=(1, 3), names=WORDS)
    some.save(tmp_path / "some.npz")
    with numpy.load(tmp_path / "some.npz") as file:
        assert file["attention"].shape == (1, 2, 1, 2)
        assert file["tokens"].tolist() == WORDS[1:3]
        assert file["query_tokens"].tolist() == WORDS[4:]
    assert AttentionMaps.load(tmp_path / "some.npz").tokens == tuple(WORDS)


def test_a_file_without_maps(tmp_path):
    attention(Attention(8, 2), torch.randn(1, 5, 8)).save(tmp_path / "none.npz")
    assert AttentionMaps.load(tmp_path / "none.npz").weights.shape == (0, 0, 0, 5)


def test_files_that_are_refused(maps, tmp_path):
    with pytest.raises(ValueError, match=r"maps are saved as .npz, got .*maps.json"):
        maps.save(tmp_path / "maps.json")
    with pytest.raises(FileNotFoundError):
        AttentionMaps.load(tmp_path / "missing.npz")
    path = tmp_path / "bad.npz"
    numpy.savez(path, attention=numpy.zeros((1, 1, 2, 2)), tokens=numpy.array(["a", "b"]))
    with pytest.raises(ValueError, match="it lacks tokens, layers"):
        AttentionMaps.load(path)
    numpy.savez(path, tokens=numpy.array([{"a": 1}], dtype=object))
    with pytest.raises(ValueError, match="is not a file of maps"):
        AttentionMaps.load(path)
    for content in (b"", b"text", b"PK\x03\x04 and no more"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="is not a file of maps"):
            AttentionMaps.load(path)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("weights.npy", b"nothing")
    with pytest.raises(ValueError, match="is not a file of maps"):
        AttentionMaps.load(path)


def test_a_notebook_shows_a_small_picture(maps):
    shown = maps._repr_html_()
    assert len(shown) < 20_000
    (picture,) = re.findall(r'src="data:image/png;base64,([^"]*)"', shown)
    assert base64.b64decode(picture)[1:4] == b"PNG"
    assert "3 layers of 2 heads over 5 tokens; 4 maps of 5 queries" in shown
    assert 'alt="overview of 3 layers of 2 heads"' in shown


def test_words_are_found_across_tokens():
    tokens = ["A", " c", "at", " a", "nd", " CATS", "."]
    assert find(tokens, "cat") == (1, 2, 5)
    assert find(tokens, "a.") == ()
    assert find(tokens, "and cats.") == (3, 4, 5, 6)
    with pytest.raises(ValueError, match="the text to find is empty"):
        find(tokens, "")
