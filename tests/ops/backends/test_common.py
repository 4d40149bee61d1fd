"""What backends share: hidden keys zeroed, results checked, masks as addends, memory layouts."""

import pytest
import torch

from regard import Causal, Dense, Padding, prepare
from regard.ops.backends.common import (
    addend,
    columns_contiguous,
    folded_rows,
    four_dims,
    fully_masked,
    may_check,
    run_and_check,
    without_hidden,
)

VALID = torch.tensor([[True, True, False], [True, False, False]])


def call(x, mask=None, **options):
    return prepare(x, x, x, mask=mask or Padding(VALID), backend="eager", **options).call


def test_keys_and_values_that_no_query_may_attend_to_become_zero():
    k = torch.full((2, 1, 3, 4), torch.nan)
    k[VALID[:, None]] = 1.0
    cleaned, _ = without_hidden(call(k), k, k)
    assert cleaned[:, 0, :, 0].tolist() == [[1, 1, 0], [1, 0, 0]]


def test_a_key_visible_to_one_head_of_its_group_stays():
    q, k = torch.randn(1, 4, 2, 3), torch.ones(1, 2, 2, 3)
    keep = torch.zeros(1, 4, 2, 2, dtype=torch.bool)
    keep[:, 1, 0, 0] = True  # head 1 belongs to key head 0
    made = prepare(q, k, k, mask=Dense(keep), backend="eager").call
    cleaned, _ = without_hidden(made, k, k, keep)
    assert cleaned[0, :, :, 0].tolist() == [[1, 0], [0, 0]]


def test_a_finite_result_is_computed_once():
    x, runs = torch.randn(2, 1, 3, 4), []

    def compute(k, v):
        runs.append(k)
        return v.sum(2)

    run_and_check(call(x), compute, x, x)
    assert len(runs) == 1 and runs[0] is x


def test_a_result_that_is_not_finite_is_computed_again_without_hidden_keys():
    x, runs = torch.ones(2, 1, 3, 4), []
    x[0, 0, 2] = torch.nan

    def compute(k, v):
        runs.append(k)
        return v.sum(2)

    out = run_and_check(call(x), compute, x, x)
    assert len(runs) == 2
    assert out[:, 0, 0].tolist() == [2.0, 1.0]
    again = run_and_check(call(x), compute, x, x, rerun=lambda k, v: k.sum(2) + 10)
    assert again[:, 0, 0].tolist() == [12.0, 11.0]


def test_with_gradients_hidden_keys_are_zeroed_before():
    x = torch.ones(2, 1, 3, 4).requires_grad_()
    made, runs = call(x), []
    assert not may_check(made)
    run_and_check(made, lambda k, v: runs.append(k) or v, x, x)
    assert len(runs) == 1
    assert runs[0][:, 0, :, 0].tolist() == [[1, 1, 0], [1, 0, 0]]


def test_mask_and_bias_are_one_addend():
    keep = torch.tensor([[True, False], [True, True]])
    assert addend(keep, None, torch.float32).tolist() == [[0, -torch.inf], [0, 0]]
    bias = torch.tensor([[[1.0], [2.0]]])
    assert addend(keep, bias, torch.float64).tolist() == [[[1, -torch.inf], [2, 2]]]


def test_rows_without_a_visible_key_are_found():
    keep = torch.tensor([[True, False], [False, False]])
    assert fully_masked(keep).tolist() == [[False], [True]]


@pytest.mark.parametrize("shape", [(3, 5), (2, 1, 3, 5), (4, 3, 1), (1, 1, 1, 1)])
def test_what_broadcasts_is_folded_as_queries_are(shape):
    q, k = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 5, 8)
    made = prepare(q, k, k, backend="eager", mask=Padding(torch.ones(1, 5).bool())).call
    x = torch.randn(shape)
    folded = folded_rows(made, x, 5)
    assert folded.shape[1:] == (2, 6, 5)
    wide = x.expand(2, 4, 3, 5)
    assert torch.equal(folded.expand(2, 2, 6, 5)[:, 1, 3:], wide[:, 3])


def test_columns_are_copied_only_where_they_lie_apart():
    x = torch.randn(2, 3)
    assert columns_contiguous(x) is x
    assert columns_contiguous(x.T).stride(-1) == 1
    assert torch.equal(columns_contiguous(x.T), x.T)
    assert not columns_contiguous(
        torch.view_as_complex(x.reshape(3, 2)).conj().imag[:, None]
    ).is_neg()


def test_missing_axes_are_added_in_front():
    assert four_dims(torch.zeros(3, 5)).shape == (1, 1, 3, 5)
    assert four_dims(torch.zeros(2, 1, 3, 5)).shape == (2, 1, 3, 5)


def test_without_a_mask_nothing_is_checked_or_copied():
    x = torch.full((1, 1, 2, 3), torch.nan)
    made = prepare(x, x, x, backend="eager").call
    assert without_hidden(made, x, x) == (x, x)
    assert run_and_check(made, lambda k, v: v, x, x) is x
    assert may_check(prepare(x, x, x, mask=Causal(), backend="eager").call)
