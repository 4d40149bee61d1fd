"""A function of pages is called as one of queries, keys and values."""

import pytest
import torch
import torch.nn.functional as F

from mutants import good
from regard_verify import check
from regard_verify.subject.functions import BLOCK, OnPages

LIKE = {"kind": "paged"}


def tensors(queries, keys):
    generator = torch.Generator().manual_seed(3)
    shapes = ((2, 4, queries, 8), (2, 2, keys, 8), (2, 2, keys, 6))
    return [torch.randn(shape, generator=generator) for shape in shapes]


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (3, 3), (2, 9), (1, 8), (5, 3)])
def test_each_query_sees_the_keys_before_it(queries, keys):
    q, k, v = tensors(queries, keys)
    seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    right = F.scaled_dot_product_attention(q, k, v, seen).nan_to_num()
    torch.testing.assert_close(OnPages(good.paged)(*tensors(queries, keys)), right)


def test_nothing_but_the_tokens_of_a_row_can_be_read():
    def function(q, k_pool, v_pool, block_table, lengths):
        assert k_pool.shape[1] == v_pool.shape[1] == BLOCK
        held = lengths.sum() * 2 * 8
        assert int(k_pool.isfinite().sum()) == held
        used = block_table < len(k_pool)
        assert used.sum(1).tolist() == (-(-lengths // BLOCK)).tolist()
        assert len(set(block_table[used].tolist())) == int(used.sum())
        return good.paged(q, k_pool, v_pool, block_table, lengths)

    OnPages(function)(*tensors(3, 9))


def test_without_queries_or_keys_it_is_not_called():
    assert OnPages(None)(*tensors(0, 0)).shape == (2, 4, 0, 6)
    assert not OnPages(None)(*tensors(2, 0)).any()


def test_the_laws_of_functions_are_asked():
    report = check(good.paged, LIKE, only=["oracle_forward", "batch_invariance", "window_edges"])
    assert report.kind == "function" and report.failed == []
    assert report.named("oracle_forward").status == "passed"
