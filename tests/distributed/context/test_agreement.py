"""What ranks agree on before they send keys, and the errors where they do not."""

import functools

import pytest
import torch

from ranks import on_ranks
from regard import Causal, Dense, Documents, Padding, Span, Where
from regard.distributed.context.agreement import NBYTES, agree, text_of
from regard.distributed.ranks import Ranks, counted
from regard.masks import Mask


def _agreed(mesh):
    ranks = Ranks(mesh)
    with counted() as sent:
        found = agree(ranks, {"batch": 2, "mask": "Causal()"}, [ranks.rank, 7])
    return found, sent.bytes


def test_one_message_of_a_few_integers():
    for found, sent in on_ranks(3, _agreed):
        assert found == [[0, 1, 2], [7, 7, 7]]
        assert sent == 2 * NBYTES == 64


def _raised(mesh, facts, refusals):
    """This rank's error, and that the next agreement works."""
    ranks = Ranks(mesh)
    with pytest.raises((TypeError, ValueError)) as caught:
        agree(ranks, facts[ranks.rank], refusal=refusals[ranks.rank])
    agree(ranks, {"next": "call"})
    return type(caught.value), str(caught.value)


CASES = [  # (facts by rank, refusals by rank, the error)
    (
        [{"a": 1, "b": "x"}, {"a": 1, "b": "y"}, {"a": 1, "b": "x"}],
        [None] * 3,
        (
            ValueError,
            "the ranks differ in b: ranks 0 and 2 x, rank 1 y; make the same call on every rank, "
            "each with its own tokens",
        ),
    ),
    ([{}] * 3, [None, TypeError("no"), None], (TypeError, "rank 1: no")),
    ([{"a": 1}, {}, {"a": 2}], [None, ValueError("ä"), ValueError("ä")], (ValueError, "ranks 1 and 2: ä")),  # noqa: E501
    ([{}] * 3, [ValueError("all")] * 3, (ValueError, "every rank: all")),
    ([{}] * 3, [RuntimeError("other")] + [None] * 2, (ValueError, "rank 0: other")),
    (
        [{"a": 1}, {"a": 1}, {"sum": 1}],
        [None] * 3,
        (
            ValueError,
            "the ranks make different calls, which have different arguments: ranks 0 and 1 ['a'], "
            "rank 2 ['sum']",
        ),
    ),
]  # fmt: skip


def test_the_same_error_on_every_rank():
    for facts, refusals, expected in CASES:
        assert on_ranks(3, _raised, facts, refusals) == [expected] * 3


def _same(one, other):
    return text_of(one) == text_of(other)


def test_a_mask_is_described_by_its_rule_and_its_data():
    valid = torch.tensor([[True, True, False]])
    assert _same(Causal() & Padding(valid), Causal() & Padding(valid.clone()))
    assert not _same(Padding(valid), Padding(~valid))
    assert not _same(Padding(valid), Padding(valid.expand(2, -1)))
    ids = torch.tensor([[0, 0, 1]])
    assert _same(Documents(ids), Documents(ids.clone()))
    assert not _same(Documents(ids), Documents(ids.int()))
    assert not _same(Documents(ids), Documents(torch.tensor([[0, 1, 1]])))
    keep = torch.ones(3, 3).bool()
    assert _same(Dense(keep), Dense(keep.clone()))
    assert not _same(Dense(keep), Dense(keep).within(Span(1, 4, 0, 3)))
    assert text_of(Padding(valid[:, :0])).startswith("Padding(valid=<[1, 0] bool>) (digest ")


class Named(Mask):
    """A rule of a user, with data that is not a tensor."""

    def __init__(self, **data):
        self.__dict__ |= data


def _rule(data):
    return Where(lambda b, h, q, k: data[k] > 0)


def test_a_users_rule_is_described_without_addresses():
    assert _same(_rule(torch.tensor([1, 0])), _rule(torch.tensor([1, 0])))
    assert not _same(_rule(torch.tensor([1, 0])), _rule(torch.tensor([1, 1])))
    one, other = (Where(functools.partial(lambda b, h, q, k, n: k < n, n=2)) for _ in range(2))
    assert _same(one, other)
    assert _same(Named(size=2, word="a"), Named(size=2, word="a"))
    assert not _same(Named(size=2), Named(size=3))
    assert " at 0x" not in text_of(Named(size=2))


def test_a_mask_written_in_place_is_refused():
    valid = torch.tensor([[True, True, False]])
    mask = Padding(valid)
    text_of(mask)
    valid[0, 0] = False
    with pytest.raises(ValueError, match="was written in place"):
        text_of(mask)
