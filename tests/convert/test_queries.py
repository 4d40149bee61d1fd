"""Moments of queries: from the moments of inputs, what the queries themselves have."""

import pytest
import torch

import regard.hf
from regard import Rotary
from regard.convert import query_moments
from regard.hf import attention_modules, attention_of
from regard.sparse import EvictingCache, ExpectedAttention, QueryMoments
from regard.sparse.scores import Rows
from zoo import ZOO, tokens


@pytest.mark.parametrize("name", ["llama", "qwen2"])  # without and with biases
@torch.no_grad()
def test_they_are_those_of_the_queries(name):
    model, ids = ZOO[name].build(), tokens(3, 19)
    found = query_moments(model, ids)
    modules = list(attention_modules(model).values())
    seen = [[] for _ in modules]

    def hook(into, layer):
        def record(module, args, given):
            into.append(layer.project(given["hidden_states"], None)[0])

        return record

    handles = [
        module.register_forward_pre_hook(hook(into, attention_of(module)), with_kwargs=True)
        for module, into in zip(modules, seen, strict=True)
    ]
    model(ids)
    for handle in handles:
        handle.remove()
    for moments, queries in zip(found, seen, strict=True):
        rows = torch.cat(queries).transpose(0, 1).flatten(1, 2).double()
        centred = rows - rows.mean(1, keepdim=True)
        assert torch.allclose(moments.mean.double(), rows.mean(1), atol=1e-4)
        covariance = centred.mT @ centred / rows.shape[1]
        assert torch.allclose(moments.covariance.double(), covariance, atol=1e-4)


def test_normed_and_latent_queries_are_refused():
    for name, message in (("qwen3", "normed or latent ones"), ("deepseek-v3", "no single layer")):
        with pytest.raises(ValueError, match=message):
            query_moments(ZOO[name].build(), tokens(1, 9))


def test_tokens_that_the_model_has_not_are_refused():
    model = ZOO["llama"].build()
    last = len(model.get_input_embeddings().weight) - 1
    with pytest.raises(ValueError, match=f"tokens are in 0..{last}, .* got 0 to {last + 1}"):
        query_moments(model, torch.tensor([[0, last + 1]]))


def test_the_rotation_ahead_is_the_mean_of_the_rotations():
    torch.manual_seed(0)
    rope = Rotary(8)
    mean, root = torch.randn(2, 12), torch.randn(2, 12, 12)
    moments = QueryMoments(mean, root @ root.mT, rope)
    got_mean, got_covariance = moments.ahead(30, 7)
    samples = mean[:, None] + torch.randn(2, 20_000, 12) @ root.mT
    rotated = [rope.rotate(samples[None], torch.full((20_000,), at))[0] for at in range(30, 37)]
    average = torch.stack(rotated).mean(0)  # of one query at all positions
    assert torch.allclose(average.mean(1), got_mean, atol=0.15)
    centred = average - average.mean(1, keepdim=True)
    assert torch.allclose(centred.mT @ centred / 20_000, got_covariance, atol=0.8)
    with pytest.raises(ValueError, match=r"mean is \[H, D\]"):
        QueryMoments(mean, root[:1])


def test_scores_of_moments_are_their_definition():
    torch.manual_seed(1)
    mean, root = torch.randn(4, 6), torch.randn(4, 6, 6) / 3
    moments = QueryMoments(mean, root @ root.mT)
    k, v = torch.randn(2, 2, 5, 6), torch.randn(2, 2, 5, 3)
    slots = torch.arange(5).expand(2, 2, -1)
    visible = torch.ones(2, 2, 5, dtype=torch.bool)
    visible[1, :, 0] = False
    got = ExpectedAttention(moments)(Rows(k, v, slots, visible, k[:, :, :0], None, 5, 0.3))
    for b in range(2):
        for g in range(2):
            total = 0
            for h in (2 * g, 2 * g + 1):
                keys = k[b, g]
                spread = ((keys @ moments.covariance[h]) * keys).sum(-1)
                logits = keys @ mean[h] * 0.3 + spread * 0.045
                total = total + logits.masked_fill(~visible[b, g], -torch.inf).softmax(0) / 2
            assert torch.allclose(got[b, g], total * v[b, g].norm(dim=-1), atol=1e-5)


def test_a_score_for_each_layer_of_a_model():
    model, ids = ZOO["llama"].build(), tokens(2, 40)
    scores = [ExpectedAttention(each) for each in query_moments(model, ids)]
    regard.hf.install(model)
    cache = regard.hf.cache(model, "evicting", budget=24, sinks=2, recent=3, score=scores)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    assert all(type(each) is EvictingCache and each.rows == 24 for each in cache.caches)
    assert "QueryMoments" in repr(cache.caches[0])
