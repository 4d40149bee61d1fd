"""Tiny random models of transformers, whose heads or tokens are split over ranks."""

import torch
import torch.nn.functional as F
import transformers

import tiny

SMALL = {name: size for name, size in tiny.SIZES.items() if name != "head_dim"}
MLA = {"kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8}


def _gemma2():
    sizes = tiny.SIZES | {"query_pre_attn_scalar": 9, "attn_logit_softcapping": 5.0}
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**sizes, sliding_window=5))


def _gpt_oss():
    rope = {"rope_type": "default", "rope_theta": 500.0}
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "rope_parameters": rope}
    sizes = tiny.SIZES | experts | {"sliding_window": 5, "attention_bias": True}
    return transformers.GptOssForCausalLM(transformers.GptOssConfig(**sizes))


def _deepseek():
    sizes = SMALL | MLA | {"num_key_value_heads": 4, "q_lora_rank": 12, "first_k_dense_replace": 2}
    return transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**sizes))


def _gpt2():
    sizes = {"n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 61}
    undropped = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **undropped))


def _phi3():
    return transformers.Phi3ForCausalLM(transformers.Phi3Config(**SMALL, sliding_window=5))


BUILDERS = {
    **{name: tiny.BUILDERS[name] for name in ("llama", "mistral", "qwen3", "olmo2")},
    "gemma2": _gemma2,
    "gpt_oss": _gpt_oss,
    "deepseek": _deepseek,
    "gpt2": _gpt2,
    "phi3": _phi3,
}


def model_of(family):
    """A random model, in training mode, that drops nothing; the same in every process."""
    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    model = BUILDERS[family]()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith(("bias", "sinks")):
                parameter.add_(0.3 * torch.randn_like(parameter))
            else:
                parameter.mul_(4.0)  # as initialised, nothing would attend to anything
    return model.train()


def batch_of(length, padded=False):
    """Tokens, their shifted labels and, if some are padding, the mask of those that are not."""
    ids = tiny.tokens(2, length)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :3] = 0
        mask[1, -2:] = 0
    labels = F.pad(ids[:, 1:], (0, 1), value=-100)
    labels[mask == 0] = -100
    return {"input_ids": ids, "shift_labels": labels} | ({"attention_mask": mask} if padded else {})


def trained(model, batch):
    """Logits, loss and all gradients on one device."""
    out = model(**batch, labels=batch["shift_labels"], use_cache=False)
    out.loss.backward()
    gradients = {name: each.grad for name, each in model.named_parameters()}
    return out.logits.detach(), out.loss.detach(), gradients


def same_gradients(ours, theirs):
    """Equal to the rounding of float32."""
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        if gradient is None or ours[name] is None:
            assert not any(each is not None and each.any() for each in (gradient, ours[name])), name
        else:
            torch.testing.assert_close(
                ours[name], gradient, atol=5e-6, rtol=1e-4, msg=lambda text, name=name: name + text
            )
