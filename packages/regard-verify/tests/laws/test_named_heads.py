"""The law of names: as many heads as it says, and projections that make what they are called."""

import pytest
import torch
from torch import nn

from projecting import by_head, right
from regard_verify import check
from regard_verify.laws.heads import _letter


class Named(nn.Module):
    """`num_heads` is what it says; `heads` is what it computes, `made` what its weights make."""

    def __init__(self, dim=12, num_heads=4, heads=4, made="qkv"):
        super().__init__()
        self.num_heads, self.cut, self.made = num_heads, heads, made
        self.W_query, self.W_key, self.W_value = (nn.Linear(dim, dim) for _ in range(3))
        self.out = nn.Linear(dim, dim)

    def forward(self, x):
        by_letter = dict(
            zip(self.made, (self.W_query(x), self.W_key(x), self.W_value(x)), strict=True)
        )
        q, k, v = (by_head(by_letter[letter], self.cut) for letter in "qkv")
        return self.out(right(q, k, v).transpose(1, 2).flatten(2))


def judged(module, **like):
    """Status, and the cause or the reason."""
    (outcome,) = check(module, {"width": 12, **like}, only=["named_heads"]).outcomes
    return outcome.status, outcome.example.cause if outcome.example else outcome.reason


def test_right_names_keep_the_law():
    assert judged(Named())[0] == "passed"


@pytest.mark.parametrize("heads", [1, 2, 6])
def test_another_number_of_heads_breaks_the_law(heads):
    status, cause = judged(Named(heads=heads))
    assert status == "failed"
    assert "it names 4 heads" in cause
    assert f"those of {heads} would" in cause


@pytest.mark.parametrize(
    ("made", "words"),
    [("kqv", "'W_query.weight' makes keys"), ("qvk", "'W_key.weight' makes values")],
)
def test_projections_that_make_something_else_break_the_law(made, words):
    status, cause = judged(Named(made=made))
    assert status == "failed"
    assert words in cause


class Letters(Named):
    """Names that say nothing of queries, keys and values."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = self.W_query, self.W_key, self.W_value
        del self.W_query, self.W_key, self.W_value

    def forward(self, x):
        q, k, v = (by_head(w(x), 4) for w in (self.two, self.three, self.one))
        return self.out(right(q, k, v).transpose(1, 2).flatten(2))


def test_names_that_say_nothing_keep_the_law():
    assert judged(Letters())[0] == "passed"


class NoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_heads, self.up, self.down = 4, nn.Linear(12, 24), nn.Linear(24, 12)

    def forward(self, x):
        return self.down(self.up(x).relu())


def test_it_does_not_apply_where_no_heads_are_reached():
    status, reason = judged(NoHeads())
    assert status == "not applicable"
    assert "not reached" in reason


class Fused(nn.Module):
    """One projection, its axes in this order."""

    def __init__(self, axes):
        super().__init__()
        self.num_heads, self.axes = 4, axes
        self.qkv, self.out = nn.Linear(12, 36), nn.Linear(12, 12)

    def forward(self, x):
        sizes = {"part": 3, "head": 4, "channel": 3}
        cut = self.qkv(x).unflatten(-1, [sizes[axis] for axis in self.axes])
        place = [2 + self.axes.index(axis) for axis in ("part", "head", "channel")]
        q, k, v = cut.permute(place[0], 0, place[1], 1, place[2])
        return self.out(right(q, k, v).transpose(1, 2).flatten(2))


CUTS = {
    "blocked": ("part", "head", "channel"),
    "by head": ("head", "part", "channel"),
    "interleaved": ("channel", "head", "part"),
}


@pytest.mark.parametrize("declared", ["blocked", "by head", None])
@pytest.mark.parametrize("cut", CUTS)
def test_projections_are_cut_as_declared(cut, declared):
    status, cause = judged(Fused(CUTS[cut]), **({"fused": declared} if declared else {}))
    assert status == ("passed" if declared in (cut, None) else "failed"), cause
    assert "another order" in cause or status == "passed"


@pytest.mark.parametrize(
    ("name", "letter"),
    [
        ("attn.W_query.weight", "q"),
        ("to_k.weight", "k"),
        ("v_proj.weight", "v"),
        ("values.weight", "v"),
        ("wq", "q"),
        ("qkv.weight", None),
        ("to_kv.weight", None),
        ("c_attn.weight", None),
        ("q_and_k.weight", None),
        ("heads.0.keys.weight", "k"),
    ],
)
def test_the_letter_of_a_name(name, letter):
    assert _letter(name) == letter


def test_heads_that_are_stored_in_a_configuration_count():
    class OfConfig(Named):
        def __init__(self):
            super().__init__(heads=1)
            self.config = torch.nn.Module()
            self.config.num_attention_heads = self.num_heads
            del self.num_heads

    status, cause = judged(OfConfig())
    assert status == "failed"
    assert "it names 4 heads" in cause
