"""What `attend_shards` refuses, before anything is sent."""

import pytest
import torch

from ranks import on_ranks
from regard import Alibi, Causal, Dense, Padding, RelativeBias
from regard.distributed.context.attending import attend_shards
from regard.distributed.context.checking import learned_of
from regard.distributed.ranks import Ranks, counted
from regard.distributed.shards import Shards


class Hidden:
    """A rule for score biases that reads a tensor which it does not name."""

    weight = torch.ones((), requires_grad=True)

    def bias(self, span, *, device=None, dtype):
        return self.weight.expand(1, 1, span.num_queries, span.num_keys).to(dtype)


def hidden_keys(streams, parameters):
    return streams[0] * Hidden.weight, streams[0]


def _refusals(mesh):
    ranks, shards = Ranks(mesh), Shards(10, 2)
    q, k = torch.zeros(1, 4, 5, 8), torch.zeros(1, 2, 5, 8)
    long = torch.zeros(1, 2, 10, 8)
    three = torch.ones(3, 10, dtype=torch.bool)
    half = {"q": q.bfloat16(), "streams": (k.bfloat16(),) * 2, "score_bias": torch.zeros(10, 10)}
    wrong = [
        ({"q": torch.zeros(1, 4, 10, 8)}, r"q is \[B, heads, L, W\] with the 5 tokens of rank"),
        ({"streams": (k, long)}, r"streams\[1\] is .* got \(1, 2, 10, 8\); shards.take"),
        ({"streams": (k, torch.zeros(2, 2, 5, 8))}, r"batch size of q, 1, got \(2, 2, 5, 8\)"),
        ({"streams": ()}, "streams are one tensor"),
        ({"streams": (k, k, k)}, "got 3 with v_head_dim=None"),
        ({"streams": (k,)}, "got 1 with v_head_dim=None"),
        ({"v_head_dim": 4}, "got 2 with v_head_dim=4"),
        ({"streams": (k.double(), k.double())}, "q, k and v have one dtype"),
        ({"streams": (k[..., :4], k)}, "q and k have one head dim"),
        ({"streams": (k.to("meta"), k)}, r"streams\[0\] is on meta"),
        ({"shards": Shards(10, 3)}, r"shards are of 3 ranks, the mesh has 2; give Shards\(10, 2\)"),
        ({"exchange": "all"}, "exchange is 'ring' or 'gather', got 'all'"),
        ({"softcap": -1.0}, "softcap is above 0"),
        ({"mask": Padding(three)}, "is for a batch of 3"),
        ({"mask": Dense(torch.ones(5, 10, dtype=torch.bool))}, r"here \[10, 10\]"),
        ({"sinks": torch.zeros(3)}, "sinks hold one score for each of the 4 query heads"),
        ({"score_bias": torch.zeros(5, 10)}, r"broadcasts to \[B, H, L, S\] = \[1, 4, 10, 10\]"),
        ({"score_bias": Hidden()}, "reads tensors that need gradients"),
        ({"keys_of": hidden_keys}, "keys_of reads a tensor that needs gradients"),
        ({"softcap": 2.0, "backend": "sdpa"}, "has no softcap"),
        ({**half, "backend": "sdpa"}, "sdpa gives no log-sum-exp"),
        ({"backend": "quick"}, "backend='quick' is not one of"),
    ]
    with counted() as sent:
        for changed, message in wrong:
            given = {"q": q, "streams": (k, k), "shards": shards, "mask": Causal(), **changed}
            with pytest.raises(ValueError, match=message):
                attend_shards(given.pop("q"), given.pop("streams"), ranks=ranks, **given)
        with pytest.raises(TypeError, match="mask is a rule, got a tensor"):
            attend_shards(q, (k, k), ranks=ranks, shards=shards, mask=torch.ones(10, 10))
        with pytest.raises(ValueError, match=r"neither torch.compile nor torch.func"):
            torch.func.grad(lambda q: attend_shards(q, (k, k), ranks=ranks, shards=shards).sum())(q)
    assert sent.bytes == 0


def test_what_is_refused_on_every_rank(unchecked):
    on_ranks(2, _refusals)


def test_the_parameters_of_a_rule():
    rule = RelativeBias(2)
    assert learned_of(rule) == (rule.relative_attention_bias.weight,)
    assert learned_of(Alibi([0.5])) == learned_of(None) == ()
    with torch.no_grad():
        assert learned_of(Hidden()) == ()
