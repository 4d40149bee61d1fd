"""Pictures of masks: what is drawn at which size, and the sentence of a cell."""

import struct

import pytest
import torch

from regard import Causal, Chunked, Dense, Documents, Padding, Prefix, SlidingWindow, Span
from regard.see.mask_picture import png, sentence, span_of, svg, text


@pytest.mark.parametrize(
    ("mask", "given", "span"),
    [
        (Causal(), {}, (0, 8, 0, 8)),
        (~Causal(), {}, (0, 8, 0, 8)),
        (Causal(), {"queries": 3}, (0, 3, 0, 3)),
        (Causal(), {"keys": 3}, (0, 3, 0, 3)),
        (Causal(), {"queries": 2, "keys": 5}, (0, 2, 0, 5)),
        (Causal(), {"queries": 2, "q_start": 4}, (4, 6, 0, 6)),
        (Causal(), {"queries": 2, "keys": 9, "q_start": 4}, (4, 6, 0, 9)),
        (Causal(), {"keys": 9, "q_start": 4}, (4, 9, 0, 9)),
        (Causal(), {"q_start": 4}, (4, 12, 0, 12)),
        (Causal(), {"queries": 1, "q_start": 90, "kv_start": 85}, (90, 91, 85, 91)),
        (Causal(), {"keys": 4, "kv_start": 85}, (0, 8, 85, 89)),
        (SlidingWindow(8), {}, (0, 16, 0, 16)),  # of 8 keys, a window of 8 hides none
        (Causal() & SlidingWindow(100), {}, (0, 128, 0, 128)),
        (Causal() & Chunked(64) | Prefix(3), {}, (0, 128, 0, 128)),
        (Causal() & SlidingWindow(10**9), {}, (0, 8, 0, 8)),  # no picture shows that window
        (Causal() & Padding(torch.ones(1, 5).bool()), {}, (0, 5, 0, 5)),
        (Dense(torch.ones(2, 4).bool()), {}, (0, 2, 0, 4)),
    ],
)
def test_the_slots_that_are_drawn(mask, given, span):
    assert span_of(mask, **given) == Span(*span)


def test_keys_that_end_before_they_start_are_refused():
    with pytest.raises(ValueError, match="keys end before they start"):
        span_of(Causal(), 2, kv_start=9)


def test_a_mask_that_fits_is_drawn_with_its_slots():
    mask = Causal() & SlidingWindow(2)
    assert text(mask, Span(3, 5, 0, 5)) == mask.draw(Span(3, 5, 0, 5))


@pytest.mark.parametrize("width", [30, 60, 80])
@pytest.mark.parametrize("size", [3, 13, 25, 26, 39, 60, 78, 80, 333, 1000])
def test_a_drawing_fits_and_its_blocks_are_right(size, width):
    mask, span = Causal() & SlidingWindow(20), Span(0, size, 0, size)
    code, *lines = text(mask, span, width=width).splitlines()
    assert code == repr(mask)
    assert max(map(len, lines[2:])) <= width
    cells = mask.dense(span, device="cpu").tolist()
    if lines[0].split()[0] == "0":
        assert [line.split()[1:] for line in lines[1:]] == [["·■"[c] for c in r] for r in cells]
        return
    high, wide = (int(n) for n in lines[1].replace(",", "").split() if n.isdecimal())
    for at, line in enumerate(lines[2:]):
        first, _, signs = line.strip().partition(" ")
        assert int(first) == at * high
        for column, sign in enumerate(signs):
            block = [c for row in cells[at * high :][:high] for c in row[column * wide :][:wide]]
            assert sign == ("■" if all(block) else "▒" if any(block) else "·")
    assert len(lines) - 2 == -(-size // high) <= max(32, width)


def test_one_batch_row_and_one_head():
    mask = Padding(torch.tensor([[1] * 50, [0] * 50]))
    assert "■" in text(mask, Span(0, 50, 0, 50), b=0).splitlines()[-1]
    assert "■" not in text(mask, Span(0, 50, 0, 50), b=1).splitlines()[-1]
    assert "2,500 of 2,500 cells" in svg(mask, b=0)
    assert "0 of 2,500 cells" in svg(mask, b=1)


def test_a_file_of_svg_has_the_mask_of_its_own_size():
    assert "3 of 4 cells" in svg(Causal(), Span(0, 2, 0, 2))
    assert "36 of 64 cells" in svg(Causal())
    assert ' color="#' in svg(Causal())


def test_a_dense_mask_is_drawn_at_the_slots_of_the_call():
    keep = Dense(torch.tensor([[True, False], [False, True]]))
    assert "2 of 4 cells" in svg(keep, Span(6, 8, 3, 5))
    assert "2 of 4 cells" in svg(keep)


@pytest.mark.parametrize(
    "mask",
    [
        Causal(),
        Documents(torch.arange(5)) & ~Causal(),  # every row is fully masked
        Causal() & SlidingWindow(900),
        Dense(torch.ones(1, 600).bool()),
        Dense(torch.ones(600, 1).bool()),
    ],
    ids=repr,
)
def test_a_png_is_a_picture(mask):
    data = png(mask)
    width, height = struct.unpack(">II", data[16:24])
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert 200 < width < 1200
    assert 200 < height < 1200


def test_a_png_has_the_colours_of_its_cells():
    matplotlib = pytest.importorskip("matplotlib.image")
    import io

    image = matplotlib.imread(io.BytesIO(png(Causal(), Span(0, 4, 0, 4))))[..., :3]
    blue = (abs(image - torch.tensor([0x3B, 0x82, 0xF6]).numpy() / 255) < 0.02).all(axis=-1)
    grey = (abs(image - torch.tensor([0xEE, 0xF0, 0xF3]).numpy() / 255) < 0.02).all(axis=-1)
    assert blue.sum() / grey.sum() == pytest.approx(10 / 6, rel=0.1)  # visible and hidden cells


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'regard\[bench\]'"):
        png(Causal())


def test_the_sentence_of_a_cell():
    mask = Causal() & SlidingWindow(3)
    assert sentence(mask, Span(0, 9, 0, 9), 7, 2) == mask.explain(0, 0, 7, 2)
    keep = Dense(torch.tensor([[True, False], [False, True]]))
    assert keep.explain(0, 0, 7, 4).startswith("query 7 may not")  # from slot 0, it has no query 7
    assert sentence(keep, Span(6, 8, 3, 5), 7, 4).startswith("query 7 may attend to key 4")
    assert sentence(keep, Span(6, 8, 3, 5), 7, 3).startswith("query 7 may not attend to key 3")
