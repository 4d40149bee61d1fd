"""Conventions: unknown names and values are refused."""

import pytest
import torch

import subjects
from positioned import Projected, rotate_half
from regard_verify import check


def test_conventions_that_do_not_exist_are_refused():
    with pytest.raises(ValueError, match="no convention is called 'polarty'; there are after"):
        check(subjects.right, {"polarty": "keep"})
    with pytest.raises(ValueError, match="polarity is one of keep, drop, additive"):
        check(subjects.right, {"polarity": "keeping"})
    with pytest.raises(ValueError, match="give the object itself"):
        check("some.py:thing", {"options": {"mask": torch.ones(2)}})
    with pytest.raises(ValueError, match="no law is called 'oracle'"):
        check(subjects.right, only=["oracle"])


WRONG = {  # values that no convention has, and what is said of them
    "heads": (0, "heads is a whole number above 0; got 0"),
    "kv_heads": (-1, "above 0; got -1"),
    "head_dim": (True, "above 0; got True"),
    "width": (8.5, "above 0; got 8.5"),
    "window": (-3, "window is a whole number, 0 or more; got -3"),
    "blocks": ([1], r"blocks is two whole numbers, 0 or more; got \[1\]"),
    "scale": (float("nan"), "scale is a number above 0; got nan"),
    "theta": ("abc", "theta is a number above 0; got 'abc'"),
    "softcap": (float("inf"), "softcap is a number, 0 or more; got inf"),
    "causal": ("yes", "causal is true or false; got 'yes'"),
    "mask": (5, "mask is the name of an argument; got 5"),
    "new_cache": (5, "new_cache is a name or a function; got 5"),
    "arguments": (None, "arguments is a mapping from names to values; got None"),
}


@pytest.mark.parametrize("name", WRONG)
def test_values_that_no_convention_has_are_refused(name):
    value, said = WRONG[name]
    with pytest.raises(ValueError, match=said):
        check(subjects.right, {name: value})


class Rotated(Projected):
    """Causal, 4 query heads of 8 channels on 2 key heads, positions as RoPE has them."""

    theta = 10_000.0

    def __init__(self, dim=32):
        super().__init__(dim, 4, 2)

    def forward(self, x):
        angles = torch.arange(x.shape[1])[:, None] * self.theta ** (-torch.arange(4) / 4)
        cos, sin = angles.repeat(1, 2).cos(), angles.repeat(1, 2).sin()
        q, k, v = self.heads(x)
        q, k = (y * cos + rotate_half(y) * sin for y in (q, k))
        return self.joined(q, k, v, torch.full([x.shape[1]] * 2, -torch.inf).triu(1))


class Unrotated(Rotated):
    def forward(self, x):
        return self.joined(*self.heads(x), torch.full([x.shape[1]] * 2, -torch.inf).triu(1))


def test_keys_after_its_own_are_visible_or_refused():
    with pytest.raises(ValueError, match="causal hides the keys that after=2 shows"):
        check(subjects.right, {"causal": True, "after": 2})
    assert check(Rotated, only=["visible_set_probe"]).failed == []
    assert check(Rotated, {"after": 2}, only=["visible_set_probe"]).failed == ["visible_set_probe"]


RIGHT = {"heads": 4, "kv_heads": 2, "head_dim": 8, "theta": 10_000}
CONTRADICTED = [
    *({"heads": 8}, {"kv_heads": 4}, {"head_dim": 16}, {"theta": 5e5}),
    {"theta": 5e5, "pairing": "halves"},
]


@pytest.mark.parametrize("declared", [{}, RIGHT, *CONTRADICTED])
def test_a_layer_that_contradicts_a_declared_convention_is_broken(declared):
    report = check(Rotated, declared, only=["named_heads", "oracle_forward"])
    law = "oracle_forward" if "theta" in declared else "named_heads"
    assert report.failed == ([law] if declared in CONTRADICTED else [])


def test_a_declared_base_is_a_law_of_a_layer_that_does_not_rotate():
    assert check(Unrotated, only=["oracle_forward"]).failed == []
    report = check(Unrotated, {"theta": 10_000.0}, only=["oracle_forward"])
    assert report.failed == ["oracle_forward"]
