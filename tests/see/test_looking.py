"""Which maps are kept, and which tokens count."""

import pytest
import torch

from regard import Causal, Padding
from regard.see.looking import MapChoice, indices, padding_of


def test_indices_count_from_the_end_too():
    assert indices("layers", [0, -1], 0, 4) == (0, 3)
    assert indices("queries", [-1, 7], 6, 9) == (8, 7)
    for wrong in (4, -5):
        with pytest.raises(IndexError, match=f"layers={wrong} is not among 0 to 3"):
            indices("layers", [wrong], 0, 4)
    with pytest.raises(IndexError, match="queries=5 is not among 6 to 8"):
        indices("queries", [5], 6, 9)


@pytest.mark.parametrize(
    ("asked", "layers", "queries", "keys"),
    [
        ({}, (), (), (0, 5)),
        ({"layers": [1]}, (1,), (2, 3, 4), (0, 5)),
        ({"heads": [0]}, (0, 1, 2), (2, 3, 4), (0, 5)),
        ({"queries": [-1]}, (0, 1, 2), (4,), (0, 5)),
        ({"layers": [0], "keys": (3, 9)}, (0,), (2, 3, 4), (3, 5)),
        ({"layers": [0], "keys": (4, 1)}, (0,), (2, 3, 4), (4, 4)),
    ],
)
def test_what_is_left_out_means_all(asked, layers, queries, keys):
    choice = MapChoice(**asked).among(3, past=2, tokens=5)
    assert (choice.layers, choice.queries, choice.keys) == (layers, queries, keys)


def test_padding_is_read_from_the_arguments():
    valid = torch.tensor([[True, True], [False, True]])
    assert padding_of({}, 0) is None
    assert padding_of({"attention_mask": valid.long()}, 1).tolist() == [False, True]
    assert padding_of({"attention_mask": torch.zeros(1, 1, 2, 2)}, 0) is None
    assert padding_of({"mask": Padding(valid)}, 1).tolist() == [False, True]
    assert padding_of({"mask": Causal() & Padding(valid)}, 0).tolist() == [True, True]
    assert padding_of({"mask": Causal()}, 0) is None
