"""Right attentions break no law; of others, only known defects are reported."""

import itertools

import pytest
import torch
from torch import nn

import subjects
from covering import few
from regard import (
    Attention,
    Causal,
    GroupedQueryAttention,
    LatentKVAttention,
    MultiHeadAttention,
    MultiHeadLatentAttention,
    MultiQueryAttention,
    Rotary,
    SelfAttention,
    SlidingWindow,
)
from regard_verify import LAWS, check
from session import LONG

MLA = {"kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
ROTARY = Rotary(4, pairing="pairs")
LAYERS = {
    "MHA": lambda **o: MultiHeadAttention(32, 4, bias=True, **o),
    "causal MHA": lambda **o: MultiHeadAttention(32, 4, mask=Causal(), **o),
    "GQA, halves": lambda **o: GroupedQueryAttention(32, 4, 2, rope=Rotary(8), mask=Causal(), **o),
    "GQA, pairs": lambda **o: Attention(
        32, 4, num_kv_heads=2, rope=Rotary(8, pairing="pairs"), mask=Causal(), **o
    ),
    "MQA, window": lambda **o: MultiQueryAttention(32, 4, mask=Causal() & SlidingWindow(3), **o),
    "sinks, norms": lambda **o: Attention(
        32, 4, num_kv_heads=2, qk_norm="head", sinks=True, mask=Causal(), **o
    ),
    "softcap, gate": lambda **o: Attention(32, 4, softcap=20.0, gate="head", **o),
    "own scale": lambda **o: Attention(32, 4, scale=0.3, mask=Causal(), **o),
    "one head": lambda **o: SelfAttention(32, mask=Causal(), **o),
    "MLA": lambda **o: MultiHeadLatentAttention(32, 4, **MLA, rope=ROTARY, mask=Causal(), **o),
    "MLA, low-rank queries": lambda **o: MultiHeadLatentAttention(
        32, 4, **MLA, q_lora_rank=10, rope=ROTARY, mask=Causal(), **o
    ),
    "latent GQA": lambda **o: LatentKVAttention(
        32, 4, num_kv_heads=2, head_dim=8, kv_lora_rank=20, rope=Rotary(8), mask=Causal(), **o
    ),
}
BACKENDS = ("auto", "eager", "sdpa", "grouped", "blocked")
REFUSED = {  # by the backend: many rows of one key head, sinks, softcap
    ("MQA, window", "grouped"), ("sinks, norms", "sdpa"), ("softcap, gate", "sdpa"),
}  # fmt: skip
HF = {
    "Llama": "llama.modeling_llama:LlamaAttention",
    "Mistral": "mistral.modeling_mistral:MistralAttention",
    "Qwen3": "qwen3.modeling_qwen3:Qwen3Attention",
    "Gemma2": "gemma2.modeling_gemma2:Gemma2Attention",
    "gpt-oss": "gpt_oss.modeling_gpt_oss:GptOssAttention",
    "BERT": "bert.modeling_bert:BertSelfAttention",
    "DeepSeek-V3": "deepseek_v3.modeling_deepseek_v3:DeepseekV3Attention",
    "a whole Llama": "llama.modeling_llama:LlamaModel",
}


def keeps(report, *, least, except_for=()):
    """It keeps all laws but those, and at least so many apply."""
    broken = "\n".join(f"{each.law}: {each.example}" for each in report.having("failed"))
    assert not report.problem, report.problem
    assert set(report.failed) == set(except_for), broken
    assert len(report.having("passed")) >= least, [
        (each.law, each.reason) for each in report.having("not applicable")
    ]


def covering():
    """Every layer with every backend, or in a normal run some of each."""
    if LONG:
        return [each for each in itertools.product(LAYERS, BACKENDS) if each not in REFUSED]
    first = [(layer, "auto") for layer in LAYERS]
    return first[::2] + [("causal MHA", backend) for backend in BACKENDS[1::2]]


@pytest.mark.parametrize(("layer", "backend"), covering())
def test_regards_layers(layer, backend):
    torch.manual_seed(1)
    report = check(LAYERS[layer](backend=backend), quick=not LONG)
    keeps(report, least=14 if "MLA" in layer or "latent" in layer else 19)
    assert report.advice == []


def test_regards_function():
    report = check(subjects.regards, quick=not LONG)
    keeps(report, least=24)
    assert report.advice == []


@pytest.mark.parametrize("layer", LAYERS if LONG else ["GQA, pairs", "MLA", "MQA, window"])
@pytest.mark.parametrize("cache", ["growing", "static", "sliding"])
def test_regards_layers_with_our_caches(layer, cache):
    if cache == "sliding" and "window" not in layer:
        pytest.skip("a sliding cache needs a window")
    laws = ["chunked_prefill", "decode_equals_full", "refused_step"]
    report = check(LAYERS[layer](), {"new_cache": f"subjects:{cache}"}, only=laws)
    keeps(report, least=len(laws))


def test_torchs_function():
    report = check(nn.functional.scaled_dot_product_attention, quick=not LONG)
    keeps(report, least=24)
    assert set(report.advice) == {"masked_poison"}
    assert report.inferred["causal alignment"] == "top-left corner"


@pytest.mark.parametrize("batch_first", [True, False])
def test_torchs_module_breaks_laws_where_its_defects_are_known(batch_first):
    report = check(nn.MultiheadAttention(32, 4, batch_first=batch_first), quick=not LONG)
    masked = {"fully_masked_forward", "fully_masked_backward"}
    ignored = {"causal_option"} if batch_first else set()  # is_causal alone, else it is refused
    defects = {*masked, "mask_and_causal", *ignored}
    keeps(report, least=20, except_for=defects)


@pytest.mark.long
def test_flex_attention():
    names = [
        "oracle_forward",
        "visible_set_probe",
        "mask_broadcast",
        "causality_exact",
        "gqa_order",
    ]
    if LONG:
        names = list(LAWS)
    keeps(check(subjects.flex, only=names, quick=True), least=5)


@pytest.mark.parametrize("name", few(HF, 3))
def test_transformers(name):
    pytest.importorskip("transformers")
    from regard_verify.subject.lookup import find

    report = check(find(f"transformers.models.{HF[name]}")[0], quick=not LONG)
    keeps(report, least=14 if name in ("DeepSeek-V3", "a whole Llama") else 21)


def test_transformers_rotates_and_caps():
    pytest.importorskip("transformers")
    from regard_verify.subject.lookup import find

    sinks = check(find(f"transformers.models.{HF['gpt-oss']}")[0], only=["oracle_forward"])
    assert sinks.inferred["a fully masked query"] == "gives zeros"
    capped = check(find(f"transformers.models.{HF['Gemma2']}")[0], only=["oracle_forward"])
    assert capped.declared["softcap"] == 50.0
    assert capped.declared["scale"] == 0.0625


def test_half_precision_is_tested():
    """The bound is not so wide that everything is within it."""

    def coarse(q, k, v):
        scores = (q.bfloat16() @ k.bfloat16().transpose(-1, -2)).to(q.dtype) * q.shape[-1] ** -0.5
        return scores.softmax(-1) @ v

    assert check(coarse, only=["dtype_bound"]).failed == ["dtype_bound"]
    assert check(subjects.right, only=["dtype_bound"]).failed == []
