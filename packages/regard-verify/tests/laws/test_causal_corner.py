"""The causal corner is a convention: undeclared it breaks no law, declared it is a law."""

import pytest
import torch
from torch import nn

from regard_verify import check


def hidden(queries, keys, corner):
    first = keys - queries if corner == "bottom-right" else 0
    return ~torch.ones(queries, keys, dtype=torch.bool).tril(first)


def attention(q, k, v, corner):
    scores = (q @ k.mT) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(hidden(q.shape[-2], k.shape[-2], corner), -torch.inf)
    return scores.softmax(-1).nan_to_num() @ v


def top_left(q, k, v):
    return attention(q, k, v, "top-left")


def bottom_right(q, k, v):
    return attention(q, k, v, "bottom-right")


class TopLeft(nn.Module):
    """Takes queries, keys and values."""

    corner = "top-left"

    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(d_model, d_model) for _ in range(4)
        )

    def forward(self, query, key, value):
        q, k, v = (
            to(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
            for to, x in ((self.q_proj, query), (self.k_proj, key), (self.v_proj, value))
        )
        return self.o_proj(attention(q, k, v, self.corner).transpose(1, 2).flatten(2))


class BottomRight(TopLeft):
    corner = "bottom-right"


CORNERS = {
    top_left: "top-left", TopLeft: "top-left",
    bottom_right: "bottom-right", BottomRight: "bottom-right",
}  # fmt: skip


@pytest.mark.parametrize("subject", CORNERS)
def test_an_undeclared_corner_is_found_out_and_breaks_no_law(subject):
    report = check(subject, quick=True)
    assert report.inferred["causal alignment"] == f"{CORNERS[subject]} corner"
    assert report.failed == []
    assert "alignment_probe" in {each.law for each in report.having("passed")}


@pytest.mark.parametrize("subject", CORNERS)
@pytest.mark.parametrize("corner", ["top-left", "bottom-right"])
def test_a_declared_corner_is_a_law(subject, corner):
    report = check(subject, {"alignment": corner}, only=["alignment_probe"])
    assert (report.failed == []) == (corner == CORNERS[subject])
    for each in report.having("failed"):
        assert f"is counted from the {CORNERS[subject]} corner" in each.example.cause
