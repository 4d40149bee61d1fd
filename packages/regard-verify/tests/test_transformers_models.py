"""Whole models of transformers under each attention implementation: right, and with a mistake."""

import pytest
import torch

from regard_verify import check
from session import LONG

transformers = pytest.importorskip("transformers")
MISTRAL = "transformers.models.mistral.modeling_mistral:MistralModel"
LLAMA = "transformers.models.llama.modeling_llama:LlamaModel"
LAWS = (
    "padding_content", "padding_side", "window_edges", "visible_set_probe", "causality_exact",
    "documents_apart", "decode_equals_full", "drafts_dropped", "batch_invariance",
)  # fmt: skip


def judged(name, implementation, only=LAWS, **arguments):
    """The report on a model in this process."""
    given = {"attn_implementation": implementation, **arguments}
    window = {"window": 3} if "sliding_window" in arguments else {}
    module, _, made = name.partition(":")
    made = getattr(__import__(module, fromlist=[made]), made)
    return check(made, {"arguments": given, **window}, only=list(only), quick=True)


IMPLEMENTATIONS = ["eager", "sdpa", "flex_attention", "regard"] if LONG else ["sdpa"]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", [MISTRAL, LLAMA] if LONG else [MISTRAL])
def test_a_model_keeps_the_laws(name, implementation):
    if implementation == "regard":
        pytest.importorskip("regard.hf").register()
    window = {"sliding_window": 3} if name == MISTRAL else {}
    report = judged(name, implementation, **window)
    assert not report.problem and not report.failed, str(report)
    for law in {*LAWS} - ({"window_edges"} if not window else set()) - {"documents_apart"}:
        assert report.named(law).status == "passed", (law, report.named(law).reason)


def forgets_the_mask(module, query, key, value, attention_mask, scaling=None, **rest):
    """An implementation that is registered for its speed, and takes every mask for causal."""
    times = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=query.shape[2] > 1, scale=scaling
    )
    return out.transpose(1, 2).contiguous(), None


def test_a_window_that_is_dropped_is_named():
    from transformers import AttentionInterface

    AttentionInterface.register("forgets_the_mask", forgets_the_mask)
    report = judged(MISTRAL, "forgets_the_mask", only=["window_edges"], sliding_window=3)
    assert report.failed == ["window_edges"], str(report)
    assert "ignored" in report.causes[0].example.cause
