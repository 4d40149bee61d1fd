"""litgpt's model with regard's attention and caches in place of its own.

The layer is a subclass with litgpt's projections, norms and rotation: checkpoints load as before.
No key head is repeated, no mask is a tensor, and the cache may be any of regard's.

    python examples/litgpt_attention.py 20   # tokens to generate
"""

import sys
from collections.abc import Callable

import torch
from litgpt.model import GPT, CausalSelfAttention, Config, apply_rope, apply_rope_interleave
from torch import Tensor

from regard import EVERYTHING, NO_CACHE, Cache, Causal, KVCache, SlidingWindow, attend


class RegardAttention(CausalSelfAttention):
    """litgpt's causal self-attention by `attend`; rows of a batch have the same positions."""

    cache: Cache = NO_CACHE

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask=None, input_pos=None, input_pos_maxp1=None
    ) -> Tensor:
        """As litgpt's; `mask` is causal, as the rule below."""
        config, cache = self.config, NO_CACHE if input_pos is None else self.cache
        if input_pos is not None:
            cache.truncate(int(input_pos[0]))  # the tokens before these
        q, k, v = self.project(x)
        q, k = self.rotate(q, cos, sin), self.rotate(k, cos, sin)
        span = cache.span(x.shape[1])
        (part,) = cache.update(k, v)
        slides = self.apply_sliding_window_attention
        window = SlidingWindow(config.sliding_window_size) if slides else EVERYTHING
        out = attend(
            q, *part.streams, mask=Causal() & window, span=span,
            scale=(config.attention_scores_scalar or config.head_size) ** -0.5 * self.mscale**2,
            softcap=config.attention_logit_softcapping,
        )  # fmt: skip
        return self.proj(out.transpose(1, 2).flatten(2))

    def project(self, x: Tensor) -> list[Tensor]:
        """Queries `[B, H, L, D]`, keys and values `[B, G, L, D]`, with their norms."""
        size, heads = self.config.head_size, (self.config.n_head, *[self.config.n_query_groups] * 2)
        norms = self.norm_q or torch.nn.Identity(), self.norm_k or torch.nn.Identity()
        projected = list(self.qkv(x).split([count * size for count in heads], dim=-1))
        if self.config.norm_qk_type == "olmo2":  # over all heads, before they are split
            projected[:2] = [norm(each) for norm, each in zip(norms, projected[:2], strict=True)]
        split = [each.unflatten(-1, (-1, size)).transpose(1, 2) for each in projected]
        if self.config.norm_qk_type == "default":
            split[:2] = [norm(each) for norm, each in zip(norms, split[:2], strict=True)]
        return split

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first = self.config.rope_n_elem
        rotation = apply_rope_interleave if self.config.rope_interleave else apply_rope
        return torch.cat([rotation(x[..., :first], cos, sin), x[..., first:]], dim=-1)


def use_regard(model: GPT, new_cache: Callable[[], Cache] = KVCache) -> None:
    for index, block in enumerate(model.transformer.h):
        own = block.attn
        block.attn = RegardAttention(model.config, index).to(next(own.parameters()))
        block.attn.load_state_dict(own.state_dict())
        block.attn.cache = new_cache()


def generate(model: GPT, tokens: Tensor, count: int, cached: bool = True) -> Tensor:
    """The likeliest tokens after a prompt, decoded with the cache or by full forwards."""
    start = 0
    for _ in range(count):
        positions = torch.arange(start, tokens.shape[1]) if cached else None
        logits = model(tokens[:, start:], input_pos=positions)
        start = tokens.shape[1] if cached else 0
        tokens = torch.cat([tokens, logits[:, -1:].argmax(dim=-1)], dim=1)
    return tokens


@torch.no_grad()
def main(count: int) -> None:
    sizes = {"n_layer": 2, "n_embd": 64, "n_head": 8, "head_size": 16, "n_query_groups": 2}
    sizes |= {"intermediate_size": 64, "padded_vocab_size": 100, "block_size": 128}
    print("                logits differ by  decoded as by full forwards: litgpt, regard")
    for name in ("Llama-3.2-1B", "Gemma-2-2b", "Qwen3-0.6B-Base", "OLMo-2-1124-7B"):
        torch.manual_seed(0)
        model = GPT(Config.from_name(name, **sizes))
        model.eval().set_kv_cache(batch_size=2)
        prompt = torch.randint(100, (2, 12))
        logits, text = model(prompt), generate(model, prompt, count, cached=False)
        before = generate(model, prompt, count).equal(text)
        use_regard(model)
        after = generate(model, prompt, count).equal(text)
        print(f"{name:16}{(model(prompt) - logits).abs().max():16.0e}{before!s:>37}{after!s:>8}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
