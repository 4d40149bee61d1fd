"""What the attention modules of one call share, and how it reaches them."""

import pytest
import torch
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from ranks import on_ranks
from regard import Causal, Padding, SlidingWindow
from regard.distributed.context.plan import ContextParallel
from regard.distributed.context.sending import Call
from regard.distributed.models_attention import ShardedCall
from regard.distributed.ranks import Ranks
from regard.distributed.shards import Shards
from regard.masks import EVERYTHING
from split_models import batch_of, model_of


def _call(mesh, mask=EVERYTHING):
    plan = ContextParallel(Ranks(mesh), "zigzag", "ring", ())
    return ShardedCall(plan, Call(mask, Shards(7, 2), torch.arange(4)[None], 6))


def _through_transformers(mesh):
    config = model_of("mistral").config
    given = _call(mesh).as_mask()
    made = [
        make(
            config=config,
            inputs_embeds=torch.zeros(2, 4, 8),
            attention_mask=given,
            past_key_values=None,
            position_ids=torch.tensor([[0, 1, 5, 6]]),
        )
        for make in (create_causal_mask, create_sliding_window_causal_mask)
    ]
    return [each is given for each in made]


def test_transformers_passes_the_call_on_as_it_is():
    assert on_ranks(2, _through_transformers) == [[True, True]] * 2


def _masks(mesh):
    padding = Padding(torch.tensor([[1, 1, 1, 1, 1, 1, 0]]))
    call = _call(mesh, padding)
    windowed = Causal() & SlidingWindow(3)
    assert call.with_pattern(Causal()) is call.with_pattern(Causal())
    assert call.with_pattern(Causal()) == Causal() & padding
    assert call.with_pattern(windowed) != call.with_pattern(Causal())
    return call.call.span.num_queries, call.call.span.num_keys


def test_layers_of_one_pattern_share_a_mask():
    assert on_ranks(2, _masks) == [(4, 7)] * 2


def _without_the_model(mesh):
    from regard.distributed import context_parallel

    model = model_of("llama")
    plan = context_parallel(model, mesh)
    with pytest.raises(ValueError, match="was not called by its model; call the model that"):
        model.model(plan.shard(batch_of(8)["input_ids"]))


def test_a_module_without_its_model_raises():
    on_ranks(2, _without_the_model)
