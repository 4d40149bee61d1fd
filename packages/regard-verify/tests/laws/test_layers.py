"""Laws of whole layers: which sequences they read."""

import pytest
from torch import nn

from projecting import by_head, right
from regard_verify import check


class Three(nn.Module):
    """It takes queries, keys and values, and reads them in this order."""

    def __init__(self, width=16, heads=4, read="qkv"):
        super().__init__()
        self.heads, self.read = heads, read
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def chosen(self, query, key, value):
        given = {"q": query, "k": key, "v": value}
        return [given[letter] for letter in self.read]

    def forward(self, query, key, value):
        projected = zip((self.q, self.k, self.v), self.chosen(query, key, value), strict=True)
        q, k, v = (by_head(project(x), self.heads) for project, x in projected)
        return self.out(right(q, k, v).transpose(1, 2).flatten(2))


class SelfIfAsLong(Three):
    """The queries are taken for keys where there are as many."""

    def chosen(self, query, key, value):
        return [query, query if key.shape == query.shape else key, value]


def judged(module):
    (found,) = check(module, only=["cross_attention"]).outcomes
    return found.status, found.example.cause if found.example else found.reason


def test_a_layer_of_queries_keys_and_values_reads_other_sequences():
    assert judged(Three(16)) == ("passed", "")
    assert judged(nn.MultiheadAttention(16, 4, batch_first=True)) == ("passed", "")
    assert judged(nn.MultiheadAttention(16, 4)) == ("passed", "")


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (Three(16, read="qkk"), "the values it is given are not read"),
        (Three(16, read="qqv"), "the keys it is given are not read"),
        (Three(16, read="qvv"), "the keys it is given are not read"),
        (Three(16, read="qvk"), "the values are read from the keys"),
        (SelfIfAsLong(16), "the keys it is given are not read"),
    ],
)
def test_a_layer_that_reads_another_sequence_is_broken(module, words):
    status, cause = judged(module)
    assert status == "failed"
    assert words in cause
