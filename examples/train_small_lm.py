"""Train a small language model with GQA and with MLA, side by side, on the same text.

The two models get the same batches in the same order, and differ in their attention alone. The
text is the language reference that Python carries, read as bytes.

    python examples/train_small_lm.py 100   # steps: seconds; with 3000 they write words
"""

import sys
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard import NO_CACHE, Attention, Cache, Causal, KVCache, MultiHeadLatentAttention, Rotary

LAYERS, WIDTH, HEADS, BATCH, LENGTH = 2, 64, 4, 16, 64
TEXT = torch.tensor(list("".join(topics.values()).encode()))


def gqa() -> nn.Module:
    return Attention(WIDTH, HEADS, num_kv_heads=2, rope=Rotary(16), mask=Causal())


def mla() -> nn.Module:
    sizes = {"kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 16}
    return MultiHeadLatentAttention(WIDTH, HEADS, **sizes, rope=Rotary(8), mask=Causal())


class Block(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        up, down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.attention, self.mlp = attention, nn.Sequential(up, nn.GELU(), down)

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        x = x + self.attention(self.norm1(x), cache=cache)
        return x + self.mlp(self.norm2(x))


class LanguageModel(nn.Module):
    def __init__(self, attentions: list[nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.blocks = nn.ModuleList(Block(each) for each in attentions)
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)

    def forward(self, tokens: Tensor, caches: list[Cache] | None = None) -> Tensor:
        x = self.embed(tokens)
        for block, cache in zip(self.blocks, caches or [NO_CACHE] * LAYERS, strict=True):
            x = block(x, cache)
        return self.head(self.norm(x))


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def generate(model: nn.Module, prompt: Tensor, count: int) -> tuple[bytes, float]:
    """A sampled continuation, and the bytes that the caches of all layers hold for a token."""
    caches, token, text = [KVCache() for _ in range(LAYERS)], prompt, b""
    for _ in range(count):
        token = torch.multinomial(model(token, caches)[:, -1].softmax(dim=-1), 1)
        text += bytes(token[0].tolist())
    return text, sum(cache.nbytes for cache in caches) / caches[0].length


def main(steps: int = 100) -> None:
    windows = TEXT.unfold(0, LENGTH + 1, LENGTH + 1)
    held_out, train = windows[::40], windows[torch.arange(len(windows)) % 40 > 0]
    models = nn.ModuleDict()
    for name, attention in {"GQA": gqa, "MLA": mla}.items():
        torch.manual_seed(0)
        models[name] = LanguageModel([attention() for _ in range(LAYERS)])
    optimizer = torch.optim.AdamW(models.parameters(), lr=3e-3)  # no parameter is shared
    for step in range(1, steps + 1):
        batch = train[torch.randint(len(train), (BATCH,))]
        losses = {name: loss_of(model, batch) for name, model in models.items()}
        optimizer.zero_grad()
        sum(losses.values()).backward()
        optimizer.step()
        if step == 1 or step % 50 == 0:
            print(f"step {step:>4}  " + "  ".join(f"{n} {x:.3f}" for n, x in losses.items()))

    print("\n     parameters  training loss  held-out loss  cache bytes a token")
    for name, model in models.items():
        with torch.no_grad():
            seen, unseen = loss_of(model, train[::39]), loss_of(model, held_out)
            text, cached = generate(model, TEXT[None, :20], count=40)
        count = sum(each.numel() for each in model.parameters())
        print(f"{name}  {count:>10,}  {seen:>13.3f}  {unseen:>13.3f}  {cached:>19,.0f}")
        print(f"     writes {text}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
