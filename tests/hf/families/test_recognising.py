"""Classes that nobody named are known by their source."""

import pytest
import torch
import transformers

import regard.hf
from regard.hf.families.recognising import nearest, recognised
from regard.hf.families.table import FAMILIES

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "eos_token_id": 1,
}


def built(name):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES)
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


@pytest.mark.parametrize("name", ["Granite", "Arcee", "Cwm"])
def test_the_same_source_is_recognised_and_runs(name):
    model = built(name)
    kind = type(model.model.layers[0].self_attn)
    assert kind.__name__ not in FAMILIES
    assert recognised(kind) is not None
    ids = torch.tensor([[3, 4, 5, 6], [7, 8, 9, 3]])
    valid = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    before = model(ids, attention_mask=valid).logits
    report = regard.hf.install(model)
    assert len(report.layers) == 2
    after = model(ids, attention_mask=valid).logits
    torch.testing.assert_close(after[valid.bool()], before[valid.bool()], atol=1e-5, rtol=1e-5)


def test_another_source_is_not_and_the_difference_is_named():
    kind = type(built("Cohere").model.layers[0].self_attn)
    assert recognised(kind) is None
    assert nearest(kind).startswith("most like LlamaAttention, but for `")


def test_a_layer_does_not_count_positions_for_a_model_that_is_known_by_source_alone():
    with pytest.raises(ValueError, match="GraniteAttention is known by its source"):
        regard.hf.attention_of(built("Granite").model.layers[0].self_attn)
