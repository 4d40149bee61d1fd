"""With the same weights, the outputs are those of transformers' own modules, and of torch's.

Whole, in chunks, and token by token, from small random configurations; norms, sinks and biases are
random too. The peers run their eager attention with masks made here by Python loops, in float64 to
the last digits and in float32 to their own error: see `peers`.
"""

import pytest
import torch
from torch import nn

from peers import (
    BATCH,
    LENGTH,
    agree,
    answers,
    causal,
    close,
    decoder,
    load,
    randomised,
    run,
    transformers,
)
from regard import (
    Attention,
    Causal,
    MultiHeadAttention,
    MultiHeadLatentAttention,
    Padding,
    RelativeBias,
    Rotary,
    SlidingWindow,
    Yarn,
)


def sizes(heads=6, kv_heads=2, head_dim=10, hidden=36):
    return {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "num_hidden_layers": 2,
        "max_position_embeddings": 64,
    }


def rope(theta, kind="default", **more):
    return {"rope_type": kind, "rope_theta": theta, **more}


@pytest.mark.parametrize("kv_heads", [6, 2, 1])
@pytest.mark.parametrize("bias", [False, True])
def test_llama(kv_heads, bias):
    size = sizes(kv_heads=kv_heads)
    peer, rotary, x = decoder(
        "llama", "LlamaConfig", size, attention_bias=bias, rope_parameters=rope(5000.0)
    )
    layer = Attention(
        36,
        6,
        num_kv_heads=kv_heads,
        head_dim=10,
        bias=bias,
        rope=Rotary(10, theta=5000.0),
        mask=Causal(),
    )
    agree(load(layer, peer), run(peer, rotary, x, causal()), x)


def test_mistral_has_a_window():
    peer, rotary, x = decoder(
        "mistral", "MistralConfig", sizes(), sliding_window=4, rope_parameters=rope(1e4)
    )
    layer = Attention(
        36, 6, num_kv_heads=2, head_dim=10, rope=Rotary(10), mask=Causal() & SlidingWindow(4)
    )
    agree(load(layer, peer), run(peer, rotary, x, causal(4)), x)


def test_qwen3_norms_queries_and_keys():
    peer, rotary, x = decoder(
        "qwen3", "Qwen3Config", sizes(), rms_norm_eps=1e-5, rope_parameters=rope(1e6)
    )
    layer = Attention(
        36,
        6,
        num_kv_heads=2,
        head_dim=10,
        qk_norm="head",
        norm_eps=1e-5,
        rope=Rotary(10, theta=1e6),
        mask=Causal(),
    )
    agree(load(layer, peer), run(peer, rotary, x, causal()), x)


@pytest.mark.parametrize("window", [None, 4])
def test_gemma2_caps_its_scores_and_scales_by_its_own_size(window):
    kind = "full_attention" if window is None else "sliding_attention"
    peer, rotary, x = decoder(
        "gemma2",
        "Gemma2Config",
        sizes(),
        query_pre_attn_scalar=17,
        attn_logit_softcapping=1.5,
        sliding_window=4,
        layer_types=[kind] * 2,
        rope_parameters=rope(1e4),
    )
    mask = Causal() if window is None else Causal() & SlidingWindow(window)
    layer = Attention(
        36,
        6,
        num_kv_heads=2,
        head_dim=10,
        rope=Rotary(10),
        mask=mask,
        scale=17**-0.5,
        softcap=1.5,
    )
    agree(load(layer, peer), run(peer, rotary, x, causal(window)), x)


@pytest.mark.parametrize("yarn", [False, True])
@pytest.mark.parametrize("window", [None, 4])
def test_gpt_oss_has_sinks(yarn, window):
    kind = "full_attention" if window is None else "sliding_attention"
    parameters, scaling = rope(1.5e5), None
    if yarn:
        more = {"factor": 4.0, "original_max_position_embeddings": 16, "truncate": False}
        parameters = rope(1.5e5, "yarn", beta_fast=32.0, beta_slow=1.0, **more)
        scaling = Yarn(4.0, original_max_position=16, truncate=False)
    peer, rotary, x = decoder(
        "gpt_oss",
        "GptOssConfig",
        sizes(),
        attention_bias=True,
        sliding_window=4,
        layer_types=[kind] * 2,
        rope_parameters=parameters,
    )
    layer = Attention(
        36,
        6,
        num_kv_heads=2,
        head_dim=10,
        bias=True,
        sinks=True,
        rope=Rotary(10, theta=1.5e5, scaling=scaling),
        mask=Causal() if window is None else Causal() & SlidingWindow(window),
    )
    agree(load(layer, peer), run(peer, rotary, x, causal(window)), x)


def test_phi_rotates_some_channels():
    size = sizes(hidden=60)
    peer, rotary, x = decoder(
        "phi", "PhiConfig", size, rope_parameters=rope(1e4, partial_rotary_factor=0.4)
    )
    layer = Attention(60, 6, num_kv_heads=2, head_dim=10, bias=True, rope=Rotary(4), mask=Causal())
    agree(load(layer, peer, [("dense", "o_proj")]), run(peer, rotary, x, causal()), x)


def test_bert_attends_both_ways_but_not_to_padding():
    from transformers.models.bert.modeling_bert import BertSelfAttention

    config = transformers.BertConfig(hidden_size=36, num_attention_heads=6, num_hidden_layers=1)
    config._attn_implementation = "eager"
    peer = randomised(BertSelfAttention(config))
    layer = MultiHeadAttention(36, 6, bias=True)
    layer.o_proj = nn.Identity()
    load(layer, peer, [("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj")])
    x = torch.randn(BATCH, LENGTH, 36)
    valid = torch.ones(BATCH, LENGTH, dtype=torch.int64)
    valid[0, 7:] = 0
    valid[1, :3] = 0
    hidden = torch.where(valid.bool(), 0.0, -1e30)[:, None, None]
    theirs = answers(peer, x, hidden, of=lambda peer, x, mask: peer(x, attention_mask=mask)[0])
    close(layer, theirs, x, of=lambda layer, x: layer(x, mask=Padding(valid)))
    theirs = answers(peer, x, of=lambda peer, x: peer(x)[0])
    close(layer, theirs, x, of=lambda layer, x: layer(x))


def t5(is_decoder, relative=True):
    from transformers.models.t5.modeling_t5 import T5Attention

    config = transformers.T5Config(
        d_model=36,
        d_kv=10,
        num_heads=6,
        is_decoder=is_decoder,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=9,
    )
    config._attn_implementation = "eager"
    peer = T5Attention(config, has_relative_attention_bias=relative, layer_idx=0)
    return randomised(peer)


T5_NAMES = [
    ("q.weight", "q_proj.weight"),
    ("k.weight", "k_proj.weight"),
    ("v.weight", "v_proj.weight"),
    ("o.weight", "o_proj.weight"),
    ("relative_attention_bias", "score_bias.relative_attention_bias"),
]


@pytest.mark.parametrize("is_decoder", [False, True])
def test_t5_has_a_relative_bias_and_no_scale(is_decoder):
    peer = t5(is_decoder)
    bias = RelativeBias(6, num_buckets=8, max_distance=9, bidirectional=not is_decoder)
    layer = Attention(36, 6, head_dim=10, scale=1.0, score_bias=bias)
    load(layer, peer, T5_NAMES)
    x = torch.randn(BATCH, LENGTH, 36)
    mask = causal() if is_decoder else torch.zeros(1, 1, 1, LENGTH)
    theirs = answers(peer, x, mask, of=lambda peer, x, mask: peer(x, mask=mask)[0])
    if is_decoder:
        layer.mask = Causal()
        agree(layer, theirs, x)
    else:
        close(layer, theirs, x, of=lambda layer, x: layer(x))


def test_t5_reads_another_sequence():
    peer = t5(True, relative=False)
    layer = load(Attention(36, 6, head_dim=10, scale=1.0), peer, T5_NAMES)
    x, context = torch.randn(BATCH, LENGTH, 36), torch.randn(BATCH, 7, 36)
    valid = torch.ones(BATCH, 7, dtype=torch.bool)
    valid[0, 4:] = False
    hidden = torch.where(valid, 0.0, -1e30)[:, None, None]
    theirs = answers(
        peer, x, context, hidden, of=lambda peer, x, c, m: peer(x, mask=m, key_value_states=c)[0]
    )
    reads_context(layer, theirs, x, context, Padding(valid))


def reads_context(layer, theirs, x, context, mask):
    """From the sequence itself; from a memory, whole and token by token."""

    def stepwise(layer, x, context):
        memory = layer.remember(context)
        return torch.cat([layer(t, context=memory, mask=mask) for t in x.split(1, dim=1)], dim=1)

    close(layer, theirs, x, context, of=lambda layer, x, c: layer(x, context=c, mask=mask))
    close(layer, theirs, x, context, of=stepwise)


YARN = {
    "factor": 8.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.3,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 16,
}


def deepseek(version, q_lora_rank, yarn, **options):
    size = {
        "hidden_size": 36,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "q_lora_rank": q_lora_rank,
        "kv_lora_rank": 14,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 8,
        "v_head_dim": 5,
        "num_hidden_layers": 1,
        "max_position_embeddings": 128,
        "attention_bias": True,
        "rope_parameters": rope(1e4, "yarn", **YARN) if yarn else rope(1e4),
    }
    peer, rotary, x = decoder(f"deepseek_v{version}", f"DeepseekV{version}Config", size, **options)
    scaling = None
    if yarn:
        scaling = Yarn(8.0, original_max_position=16, mscale=0.7, mscale_all_dim=1.3)
    return peer, rotary, x, scaling


@pytest.mark.parametrize("form", ["auto", "expanded", "absorbed"])
@pytest.mark.parametrize("yarn", [False, True])
@pytest.mark.parametrize("q_lora_rank", [None, 12])
@pytest.mark.parametrize(("version", "pairing"), [(2, "pairs"), (3, "pairs"), (3, "halves")])
def test_deepseek(version, pairing, q_lora_rank, yarn, form):
    interleaved = {"rope_interleave": pairing == "pairs"} if version == 3 else {}
    peer, rotary, x, scaling = deepseek(version, q_lora_rank, yarn, **interleaved)
    layer = MultiHeadLatentAttention(
        36,
        3,
        kv_lora_rank=14,
        q_lora_rank=q_lora_rank,
        qk_nope_head_dim=6,
        qk_rope_head_dim=8,
        v_head_dim=5,
        bias=True,
        rope=Rotary(8, pairing=pairing, scaling=scaling),
        mask=Causal(),
        form=form,
    )
    agree(load(layer, peer), run(peer, rotary, x, causal()), x)


@pytest.mark.parametrize("bias", [False, True])
def test_torch_multihead_attention(bias):
    peer = randomised(nn.MultiheadAttention(36, 6, bias=bias, batch_first=True))
    layer = MultiHeadAttention(36, 6, bias=bias).eval()
    load_fused(layer, peer)
    x = torch.randn(BATCH, LENGTH, 36)
    hidden = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    hidden[0, 6:] = True
    theirs = answers(peer, x, of=lambda peer, x: peer(x, x, x)[0])
    close(layer, theirs, x, of=lambda layer, x: layer(x))

    def padded(which):
        options = {"key_padding_mask": hidden, "average_attn_weights": False}
        return answers(peer, x, of=lambda peer, x: peer(x, x, x, **options)[which])

    close(layer, padded(0), x, of=lambda layer, x: layer(x, mask=Padding(~hidden)))
    close(layer, padded(1), x, of=lambda layer, x: layer.weights(x, mask=Padding(~hidden)))
    layer.mask = Causal()
    mask = causal()[0, 0]
    agree(layer, answers(peer, x, mask, of=lambda peer, x, m: peer(x, x, x, attn_mask=m)[0]), x)


@pytest.mark.parametrize("padded", [False, True])
def test_torch_multihead_attention_across(padded):
    peer = randomised(nn.MultiheadAttention(36, 6, kdim=20, vdim=20, batch_first=True))
    layer = MultiHeadAttention(36, 6, bias=True, context_size=20).eval()
    state = peer.state_dict()
    biases = state["in_proj_bias"].chunk(3)
    for name, each in zip("qkv", biases, strict=True):
        layer.get_submodule(f"{name}_proj").load_state_dict(
            {"weight": state[f"{name}_proj_weight"], "bias": each}
        )
    layer.o_proj.load_state_dict(peer.out_proj.state_dict())
    x, context = torch.randn(BATCH, LENGTH, 36), torch.randn(BATCH, 5, 20)
    hidden = torch.zeros(BATCH, 5, dtype=torch.bool)
    hidden[1, 2:] = padded
    theirs = answers(
        peer, x, context, of=lambda peer, x, c: peer(x, c, c, key_padding_mask=hidden)[0]
    )
    reads_context(layer, theirs, x, context, Padding(~hidden))


def load_fused(layer, peer):
    weights = peer.in_proj_weight.chunk(3)
    biases = peer.in_proj_bias.chunk(3) if peer.in_proj_bias is not None else [None] * 3
    with torch.no_grad():
        for name, weight, bias in zip("qkv", weights, biases, strict=True):
            projection = layer.get_submodule(f"{name}_proj")
            projection.weight.copy_(weight)
            if bias is not None:
                projection.bias.copy_(bias)
    layer.o_proj.load_state_dict(peer.out_proj.state_dict())
