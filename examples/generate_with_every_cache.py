"""One model decoded with every cache: what each holds, and what its rounding changes.

A small model is trained for a moment, and writes a text with each cache. Its layers have a window,
as `SlidingCache` needs. Then a model of transformers does so: its `generate` takes these caches.

    python examples/generate_with_every_cache.py 60   # steps of training: seconds
"""

import sys
from collections.abc import Callable
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import MistralConfig, MistralForCausalLM

import regard.hf
from regard import NO_CACHE, Attention, Cache, Causal, Rotary, SlidingWindow

WIDTH, LAYERS, WINDOW, LENGTH = 128, 2, 32, 160
CACHES = {
    "KVCache()": regard.KVCache,
    f"StaticCache({LENGTH})": lambda: regard.StaticCache(LENGTH),
    f"SlidingCache({WINDOW})": lambda: regard.SlidingCache(WINDOW),
    "QuantizedCache(bits=8)": lambda: regard.QuantizedCache(bits=8),
    "QuantizedCache(bits=4)": lambda: regard.QuantizedCache(bits=4),
}
KINDS = {"growing": {}, "static": {"max_length": LENGTH}, "sliding": {}, "quantized": {"bits": 8}}


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(256, WIDTH), nn.Linear(WIDTH, 256)
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(LAYERS))
        mask = Causal() & SlidingWindow(WINDOW)
        self.layers = nn.ModuleList(
            Attention(WIDTH, 4, num_kv_heads=2, rope=Rotary(32), mask=mask) for _ in range(LAYERS)
        )

    def forward(self, tokens: Tensor, caches: list[Cache]) -> Tensor:
        x = self.embed(tokens)
        for norm, layer, cache in zip(self.norms, self.layers, caches, strict=True):
            x = x + layer(norm(x), cache=cache)
        return self.head(x)


def train(model: LanguageModel, steps: int) -> None:
    windows = torch.tensor(list("".join(topics.values()).encode())).unfold(0, 65, 65)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        batch = windows[torch.randint(len(windows), (16,))]
        logits = model(batch[:, :-1], [NO_CACHE] * LAYERS)
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def write(model: LanguageModel, prompt: Tensor, cache: Callable[[], Cache]) -> tuple:
    """The likeliest text, the bytes of its caches, and the largest error of a logit."""
    caches, tokens, new, logits = [cache() for _ in range(LAYERS)], prompt, prompt, []
    while tokens.shape[1] < LENGTH:
        logits.append(model(new, caches))
        new = logits[-1][:, -1:].argmax(dim=-1)
        tokens = torch.cat([tokens, new], dim=1)
    whole = model(tokens[:, :-1], [NO_CACHE] * LAYERS)
    error = (torch.cat(logits, dim=1) - whole).abs().max()
    return tokens, sum(each.nbytes for each in caches), error


def main(steps: int = 60) -> None:
    torch.manual_seed(0)
    model = LanguageModel()
    train(model, steps)
    prompt = torch.tensor([list(b"The import statement ")])
    exact, most, _ = write(model, prompt, regard.KVCache)
    print(f"{'cache':<24}bytes  of KVCache  error of logits  first equal tokens")
    for name, cache in CACHES.items():
        tokens, size, error = write(model, prompt, cache)
        same = (tokens == exact).cumprod(dim=1).sum()
        print(f"{name:<22}{size:>7,}{size / most:>12.2f}{error:>17.0e}{same:>13} of {LENGTH}")

    sizes = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 64, "sliding_window": 32}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    mistral = MistralForCausalLM(MistralConfig(**sizes, **heads)).eval()
    prompt, options = torch.randint(3, 64, (1, 20)), {"max_new_tokens": 60, "do_sample": False}
    plain = mistral.generate(prompt, **options)
    print("\nMistralForCausalLM      bytes  the same text as with transformers' cache")
    for kind, given in KINDS.items():
        cache = regard.hf.cache(mistral, kind, **given)
        same = torch.equal(plain, mistral.generate(prompt, past_key_values=cache, **options))
        print(f"{kind:<22}{cache.nbytes:>7,}  {same}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
