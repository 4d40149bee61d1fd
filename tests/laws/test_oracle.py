"""The loops of `oracle` against closed forms: nothing here runs the library."""

import math
import random
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

from oracle import attention, softmax, wide_attention


def grid(*sizes, draw):
    """Nested lists of the given sizes."""
    if not sizes:
        return draw()
    return [grid(*sizes[1:], draw=draw) for _ in range(sizes[0])]


def numbers(*sizes, seed=0):
    source = random.Random(seed)
    return grid(*sizes, draw=lambda: source.gauss(0, 1))


def test_sums_are_rounded_once():
    """As exact as fractions: float64 is compared with something more exact."""
    q, k, v = [numbers(40)], [numbers(40, seed=1), [0.0] * 40], [[1.0], [0.0]]
    exact = sum(Fraction(x) * Fraction(y) for x, y in zip(q[0], k[0], strict=True))
    assert math.exp(exact) > 0
    judged = attention([[q]], [[k]], [[v]], scale=1.0)
    odds = Fraction(judged.weights[0][0][0][0]) / Fraction(judged.weights[0][0][0][1])
    assert math.log(odds) == pytest.approx(float(exact), abs=1e-15)
    thirds = attention([[[[1.0]]]], [[[[0.0]] * 3]], [[[[1.0], [1e-9], [-1.0]]]])
    assert thirds.out[0][0][0][0] == pytest.approx(float(Fraction(1e-9) / 3), rel=1e-15)


def test_one_key_is_read_whole():
    q, k, v = numbers(2, 3, 4, 5), numbers(2, 3, 1, 5, seed=1), numbers(2, 3, 1, 2, seed=2)
    out = attention(q, k, v).out
    assert all(out[b][h][i] == v[b][h][0] for b in range(2) for h in range(3) for i in range(4))


def test_equal_scores_are_the_mean():
    q, k, v = (
        grid(1, 1, 1, 2, draw=lambda: 0.0),
        numbers(1, 1, 4, 2),
        [[[[1.0], [2.0], [3.0], [6.0]]]],
    )
    judged = attention(q, k, v)
    assert judged.out == [[[[3.0]]]]
    assert judged.weights == [[[[0.25] * 4]]]
    assert judged.lse[0][0][0] == pytest.approx(math.log(4), rel=1e-15)


def test_two_keys_are_a_logistic_function_of_the_scaled_difference():
    q, k, v = [[[[2.0, 0.0, 0.0, 0.0]]]], [[[[3.0, 0, 0, 0], [1.0, 0, 0, 0]]]], [[[[1.0], [0.0]]]]
    sigmoid = lambda x: 1 / (1 + math.exp(-x))  # noqa: E731
    assert attention(q, k, v).out[0][0][0][0] == pytest.approx(sigmoid(2.0), rel=1e-15)
    assert attention(q, k, v, scale=0.25).out[0][0][0][0] == pytest.approx(sigmoid(1.0), rel=1e-15)


def test_softcap_caps_the_scaled_score_before_the_bias():
    q, k, v = [[[[1.0]]]], [[[[100.0], [0.0]]]], [[[[1.0], [0.0]]]]
    odds = lambda **same: attention(q, k, v, **same).lse[0][0][0]  # noqa: E731
    assert odds(softcap=2.0, scale=1.0) == pytest.approx(math.log(math.exp(2.0) + 1), rel=1e-15)
    lifted = odds(softcap=2.0, scale=1.0, bias=lambda b, h, i, j: 5.0)
    assert lifted == pytest.approx(5 + math.log(math.exp(2.0) + 1), rel=1e-15)


def test_query_heads_share_key_heads_in_consecutive_groups():
    q, k = numbers(1, 4, 1, 2), numbers(1, 2, 1, 2)
    v = [[[[7.0]], [[9.0]]]]
    assert [attention(q, k, v).out[0][h][0][0] for h in range(4)] == [7.0, 7.0, 9.0, 9.0]


def test_hidden_keys_are_as_if_absent():
    q, k, v = numbers(1, 2, 3, 4), numbers(1, 2, 5, 4, seed=1), numbers(1, 2, 5, 3, seed=2)
    hidden = attention(q, k, v, visible=lambda b, h, i, j: j in (0, 3))
    k, v = ([[[head[0], head[3]] for head in side[0]]] for side in (k, v))
    absent = attention(q, k, v)
    assert hidden.out == absent.out
    assert hidden.lse == absent.lse
    assert hidden.largest == absent.largest


def test_rows_and_columns_reach_the_rule_in_order():
    q, k, v = numbers(2, 3, 4, 2), numbers(2, 3, 5, 2), numbers(2, 3, 5, 2)
    weights = attention(q, k, v, visible=lambda b, h, i, j: (b + h + i) % 5 == j).weights
    for b, heads in enumerate(weights):
        for h, rows in enumerate(heads):
            for i, row in enumerate(rows):
                assert row == [float((b + h + i) % 5 == j) for j in range(5)]


def test_a_fully_masked_row_is_zero():
    q, k, v = numbers(1, 1, 2, 2), numbers(1, 1, 3, 2), numbers(1, 1, 3, 2)
    judged = attention(q, k, v, visible=lambda b, h, i, j: i == 1)
    assert judged.out[0][0][0] == [0.0, 0.0]
    assert judged.weights[0][0][0] == [0.0, 0.0, 0.0]
    assert judged.lse[0][0][0] == -math.inf
    assert sum(judged.weights[0][0][1]) == pytest.approx(1.0, rel=1e-15)


def test_a_sink_takes_its_share_and_gives_no_value():
    q, k, v = [[[[0.0]]]], [[[[1.0]]]], [[[[8.0]]]]
    assert attention(q, k, v, sinks=[0.0]).out == [[[[4.0]]]]
    assert attention(q, k, v, sinks=[math.log(3)]).out[0][0][0][0] == pytest.approx(2.0, rel=1e-15)
    assert attention(q, [[[]]], [[[]]], sinks=[0.5]).lse == [[[0.5]]]


def test_huge_scores_neither_overflow_nor_drown():
    shares, log_sum = softmax([Decimal(500_000), Decimal(-500_000), Decimal(500_000)], None)
    assert [float(share) for share in shares] == [0.5, 0.0, 0.5]
    assert log_sum == pytest.approx(5e5 + math.log(2), rel=1e-15)


def test_the_largest_score_is_a_sum_of_sizes_not_the_size_of_a_sum():
    judged = attention([[[[3.0, -3.0]]]], [[[[1.0, 1.0]]]], [[[[1.0]]]], scale=0.5)
    assert judged.largest == 3.0
    biased = attention(
        [[[[3.0, -3.0]]]], [[[[1.0, 1.0]]]], [[[[1.0]]]], scale=0.5, bias=lambda b, h, i, j: -2.0
    )
    assert biased.largest == 5.0


def test_sizes_of_zero_are_computed_too():
    assert attention([], [], []).out == []
    assert attention([[[]]], [[[]]], [[[]]]).out == [[[]]]


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("sinks", [None, [0.5, -1.0, 2.0, 0.0]])
def test_the_numpy_form_agrees_with_the_loops(softcap, sinks):
    """Masks, biases, groups and fully masked rows: it is only faster."""
    q, k, v = numbers(2, 4, 5, 3), numbers(2, 2, 6, 3, seed=1), numbers(2, 2, 6, 2, seed=2)
    bias = np.array(numbers(2, 4, 5, 6, seed=3))
    keep = np.array(numbers(2, 4, 5, 6, seed=4)) > 0
    keep[:, :, 2] = False
    loops = attention(
        q,
        k,
        v,
        visible=lambda b, h, i, j: keep[b, h, i, j],
        bias=lambda b, h, i, j: bias[b, h, i, j],
        softcap=softcap,
        sinks=sinks,
    )
    out, largest = wide_attention(
        *(np.array(x) for x in (q, k, v)),
        keep=keep,
        bias=bias,
        softcap=softcap,
        sinks=None if sinks is None else np.array(sinks),
    )
    np.testing.assert_allclose(out, loops.out, rtol=1e-13, atol=1e-14)
    assert largest == pytest.approx(loops.largest, rel=1e-13)
