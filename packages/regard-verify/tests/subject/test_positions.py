"""Modules that take rotary tables or positions beside x are called with the right ones."""

import pytest
import torch

import positioned
from regard_verify import SubjectError, check, understand
from regard_verify.subject.positions import Positioned

SUBJECTS = [
    positioned.CopiedAttention,
    positioned.Tables,
    positioned.Complex,
    positioned.Optional,
    positioned.Positions,
]


def angles(positions, dim=8):
    return positions[:, None].float() * 10_000.0 ** -(torch.arange(0, dim, 2).float() / dim)


def given(made_by, positions):
    """The arguments for positions, as the documentation of each says."""
    table = angles(positions)
    whole = torch.cat([table, table], -1)
    return {
        positioned.CopiedAttention: {
            "position_embeddings": (whole.cos()[None], whole.sin()[None]),
            "attention_mask": None,
        },
        positioned.Tables: {"cos": table.cos(), "sin": table.sin()},
        positioned.Complex: {
            "start_pos": int(positions[0]),
            "freqs_cis": torch.polar(torch.ones_like(table), table),
            "mask": None,
        },
        positioned.Optional: {"rope": (whole.cos(), whole.sin())},
        positioned.Positions: {"position_ids": positions[None]},
    }[made_by]


@pytest.mark.parametrize("made_by", SUBJECTS)
@pytest.mark.parametrize("past", [0, 3])
def test_positions_follow_from_the_tokens_before(made_by, past):
    module = understand(made_by).module
    assert isinstance(module, Positioned)
    x = torch.randn(2, 5, 32)
    expected = module.inner(x, **given(made_by, torch.arange(past, past + 5)))
    expected = expected[0] if isinstance(expected, tuple) else expected
    masks = {
        name: None for name in ("attention_mask", "mask") if made_by is not positioned.Optional
    }
    masks = {name: None for name in masks if name in module.signature_of_forward}
    out = module(x, past=past, **masks)
    torch.testing.assert_close(out[0] if isinstance(out, tuple) else out, expected)
    right = given(made_by, torch.arange(past, past + 5))
    for name, supplied in module.positions(x, past).items():  # the output is the same if all shift
        one = supplied[0] if isinstance(supplied, tuple) else torch.as_tensor(supplied)
        other = right[name][0] if isinstance(right[name], tuple) else torch.as_tensor(right[name])
        torch.testing.assert_close(*torch.broadcast_tensors(one, other))


@pytest.mark.parametrize("made_by", [*SUBJECTS, positioned.Unrotated])
def test_the_definition_holds_for_its_heads(made_by):
    report = check(made_by, only=["oracle_forward", "visible_set_probe", "convexity"])
    assert not report.problem
    assert report.failed == []
    assert len(report.having("passed")) >= 2


def test_another_of_its_kind_takes_positions_too():
    subject = understand(positioned.Tables)
    other = subject.another()
    assert isinstance(other, Positioned)
    assert other(torch.randn(1, 3, 32)).shape == (1, 3, 32)


def test_tables_that_do_not_fit_are_told():
    class Odd(positioned.Tables):
        def forward(self, x, cos, sin):
            raise ValueError("tables of 5 axes")

    with pytest.raises(SubjectError, match=r"needs cos and sin, and none .* fit: .*5 axes; name a"):
        understand(Odd)
