"""What is not declared is found out: layouts, masks, patterns and scales of functions."""

import itertools

import pytest
import torch

from mutants import good
from regard_verify import understand


def attention(layout="BHLD", polarity="keep", dtype="bool", shape="BHLS", causal=None, scale=None):
    """A function with these conventions, and no others."""

    def function(q, k, v, mask=None):
        if layout == "BLHD":
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        rows, columns = q.shape[2], k.shape[2]
        keep = torch.ones(rows, columns, dtype=torch.bool)
        if causal is not None:
            first = columns - rows if causal == "bottom-right" else 0
            keep = torch.arange(columns)[None] <= torch.arange(rows)[:, None] + first
        if mask is not None:
            wanted = {"bool": torch.bool, "int": torch.int64, "float": q.dtype}[dtype]
            if mask.dtype != wanted or mask.ndim != len(shape):
                raise ValueError("another mask")
            if shape in ("BS", "BLS"):
                mask = mask[:, None, None] if shape == "BS" else mask[:, None]
            given = mask > -1 if polarity == "additive" else mask.bool()
            keep = keep & (~given if polarity == "drop" else given)
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
    assert found.inferred["attends to"] == "earlier keys and its own"


def test_scales():
    assert understand(attention()).inferred["scale"].startswith("0.5 ")
    assert understand(attention(scale=0.125)).inferred["scale"].startswith("0.125 ")
