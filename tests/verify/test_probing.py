"""What nobody declares is found out, whatever it is."""

import itertools

import pytest
import torch
from torch import nn

from mutants import good
from regard.verify import check, understand
from regard.verify.visibility import explain, read_sight, read_weights


def attention(layout="BHLD", polarity="keep", dtype="bool", shape="BHLS", causal=None, scale=None):
    """A function with these conventions, and no others."""

    def function(q, k, v, mask=None):
        if layout == "BLHD":
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        rows, columns = q.shape[2], k.shape[2]
        keep = torch.ones(rows, columns, dtype=torch.bool)
        if causal is not None:
            past = columns - rows if causal == "bottom-right" else 0
            keep = torch.arange(columns)[None] <= torch.arange(rows)[:, None] + past
        if mask is not None:
            wanted = {"bool": torch.bool, "int": torch.int64, "float": q.dtype}[dtype]
            if mask.dtype != wanted or mask.ndim != len(shape):
                raise ValueError("another mask")
            if shape in ("BS", "BLS"):
                mask = mask[:, None, None] if shape == "BS" else mask[:, None]
            seen = mask > -1 if polarity == "additive" else mask.bool()
            keep = keep & (~seen if polarity == "drop" else seen)
        s = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
        out = good.softmax(s, keep) @ v
        return out.transpose(1, 2) if layout == "BLHD" else out

    return function


FORMS = [
    (polarity, dtype, shape)
    for polarity, dtype in (
        *itertools.product(("keep", "drop"), ("bool", "int", "float")),
        ("additive", "float"),
    )
    for shape in ("BHLS", "BLS", "LS", "BS")
]


@pytest.mark.parametrize("layout", ["BHLD", "BLHD"])
@pytest.mark.parametrize(("polarity", "dtype", "shape"), FORMS)
def test_layouts_and_masks(layout, polarity, dtype, shape):
    found = understand(attention(layout, polarity, dtype, shape)).conventions
    assert (found.layout, found.returns) == (layout, layout)
    assert (found.mask, found.polarity) == ("mask", polarity)
    assert (found.mask_shape, found.mask_dtype) == (shape, dtype)


@pytest.mark.parametrize("corner", ["top-left", "bottom-right"])
def test_patterns_and_corners(corner):
    found = understand(attention(causal=corner))
    assert found.conventions.causal is True
    assert found.conventions.alignment == corner
    assert found.inferred["sees"] == "the past and its own key"


def test_scales():
    assert understand(attention()).inferred["scale"].startswith("0.5 ")
    assert understand(attention(scale=0.125)).inferred["scale"].startswith("0.125 ")


@pytest.mark.parametrize(
    ("pairing", "rotate"),
    [("halves", good.rotate), ("none", lambda q, k, v, past: (q, k, v))],
)
def test_rotation_of_a_layer(pairing, rotate):
    found = understand(good.Layer(good.LayerSteps(rotate=rotate)))
    assert found.conventions.pairing == pairing
    assert found.fixed == {"H": 4, "G": 2, "D": 8, "V": 8}
    assert found.conventions.cache_style == "tuple"


def test_windows_of_a_layer():
    found = understand(good.Layer(good.LayerSteps(window=3)))
    assert found.conventions.window == 3
    assert found.inferred["sees"] == "a window of 3 keys"


def test_projections_of_all_kinds():
    """Three, one for all, one for all by head: the heads are the same."""

    class By(nn.Module):
        def __init__(self, by_head):
            super().__init__()
            self.num_heads, self.by_head = 4, by_head
            self.to_qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

        def forward(self, x):
            if self.by_head:
                parts = self.to_qkv(x).unflatten(-1, (4, 24)).transpose(1, 2).split(8, -1)
            else:
                parts = (good.split(y, 4) for y in self.to_qkv(x).split(32, -1))
            return self.out(good.merge(good.Steps().function()(*parts)))

    for by_head, said in ((True, "by head"), (False, "blocked")):
        report = check(By(by_head), quick=True)
        assert report.inferred["fused projection"] == said
        assert report.failed == []


def test_weights_and_sight_are_read_from_outside():
    q, k = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 5, 4)
    expected = (q @ k.mT).softmax(-1)
    weights = read_weights(lambda q, k, v: (q @ k.mT).softmax(-1) @ v, q, k)
    torch.testing.assert_close(weights, expected)
    narrow = read_weights(lambda q, k, v: (q @ k.mT).softmax(-1) @ v, q, k, width=2)
    torch.testing.assert_close(narrow, expected)
    lower = torch.ones(4, 4).tril()
    assert read_sight(lambda x: lower @ x, torch.randn(1, 4, 3)).equal(lower.bool())


def grid(text):
    return torch.tensor([[cell == "1" for cell in row] for row in text.split()])


@pytest.mark.parametrize(
    ("expected", "actual", "said"),
    [
        ("110 111 111", "001 000 000", "the mask is read the wrong way round"),
        ("110 011 111", "111 111 111", "key 2 is visible to query 0: the mask is ignored"),
        ("110 011 111", "101 111 011", "queries and keys change places in the mask"),
        (
            "100 110 111",
            "111 111 111",
            "keys 1..2 are visible to query 0: the causal rule is ignored",
        ),
        ("100 110 111", "000 100 110", "the causal rule hides each query's own key"),
        ("100 110 111", "110 111 111", "the causal rule shows one key of the future"),
        ("100 110 111", "111 011 001", "looks forward, its triangle is the wrong one"),
        ("1110 1111", "1000 1100", "the causal rule is counted from the top-left corner"),
        ("1000 1100 0110 0011", "1000 1100 1110 0111", "the window keeps one key too many"),
        ("1000 1100 1110 0111", "1000 1100 0110 0011", "the window keeps one key too few"),
        ("1000 1100 0110 0011", "1000 1100 1110 1111", "only the causal rule is kept, the window"),
        ("101 111 111", "111 111 101", "key 1 is visible to query 0."),
    ],
)
def test_what_is_wrong_is_said_in_words(expected, actual, said):
    words = explain(grid(expected), grid(actual))
    assert said in words
    assert words.endswith(".")
