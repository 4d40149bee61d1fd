"""Which linear layers are merely a product with a matrix."""

import torch
from torch import nn

from regard.matrices import MatrixProduct, matrix_objection, matrix_of, product_objection


def test_only_a_plain_linear_layer_is_a_matrix():
    assert matrix_objection(nn.Linear(2, 3)) is None
    assert "is a Identity, not a plain nn.Linear" in matrix_objection(nn.Identity())
    hooked = nn.Linear(2, 3)
    hooked.register_forward_hook(lambda *given: None)
    assert matrix_objection(hooked) == "has forward hooks"
    replaced = nn.Linear(2, 3)
    replaced.forward = lambda x: x
    assert "has a forward of its own" in matrix_objection(replaced)


def test_a_linear_layer_may_multiply_by_another_matrix():
    class Half(MatrixProduct, nn.Linear):
        def matrix(self):
            return self.weight[:1]

    half, whole = Half(2, 4), nn.Linear(2, 4)
    assert matrix_of(whole) is whole.weight
    assert torch.equal(matrix_of(half), half.weight[:1])
    assert product_objection(half) is None
    assert matrix_objection(half) == "multiplies by a share of its weight"
    half.register_forward_pre_hook(lambda *given: None)
    assert product_objection(half) == "has forward hooks"
