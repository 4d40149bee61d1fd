"""An encoder-decoder learns to reverse strings of digits, and decodes with caches and beams.

The decoder reads the encoder's output by cross-attention: `remember` projects its keys and values
once, and every step reads them. Strings differ in length, and a mask hides their padding.

    python examples/encoder_decoder.py 300   # steps: seconds; with 1000 hardly an error is left
"""

import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard import NO_CACHE, Cache, Causal, KVCache, Memory, MultiHeadAttention, Padding

WIDTH, HEADS, LONGEST = 64, 4, 10
PAD, START, END, WORDS = 10, 11, 12, 13  # after the digits 0 to 9


class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.slots = nn.Embedding(WORDS, WIDTH), nn.Embedding(LONGEST + 2, WIDTH)
        self.encoder = MultiHeadAttention(WIDTH, HEADS)
        self.decoder = MultiHeadAttention(WIDTH, HEADS, mask=Causal())
        self.cross = MultiHeadAttention(WIDTH, HEADS)
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS)

    def encode(self, source: Tensor) -> tuple[Memory, Padding]:
        mask = Padding(source != PAD)
        x = self.embed(source) + self.slots(torch.arange(source.shape[1]))
        x = x + self.encoder(self.norms[0](x), mask=mask)
        return self.cross.remember(self.norms[1](x)), mask

    def forward(self, target: Tensor, memory: Memory, mask: Padding, cache: Cache) -> Tensor:
        x = self.embed(target) + self.slots(cache.length + torch.arange(target.shape[1]))
        x = x + self.decoder(self.norms[2](x), cache=cache)
        x = x + self.cross(self.norms[3](x), context=memory, mask=mask)
        return self.head(x)


def batch(count: int) -> tuple[Tensor, Tensor]:
    """Strings and their reversals, padded on the right."""
    rows = [torch.randint(10, (int(n),)).tolist() for n in torch.randint(4, LONGEST + 1, (count,))]
    source = [row + [PAD] * (LONGEST - len(row)) for row in rows]
    target = [[START, *row[::-1], END] + [PAD] * (LONGEST - len(row)) for row in rows]
    return torch.tensor(source), torch.tensor(target)


def beam_search(model: EncoderDecoder, source: Tensor, beams: int) -> tuple[Tensor, Tensor]:
    """The likeliest digits for one string, and their log probabilities."""
    memory, mask = model.encode(source)
    memory = memory.reorder(torch.zeros(beams, dtype=torch.long))  # one row for each beam
    cache, tokens = KVCache(), torch.full((beams, 1), START)
    scores = torch.tensor([0.0] + [-torch.inf] * (beams - 1))
    for _ in range(int(mask.valid.sum())):
        digits = model(tokens[:, -1:], memory, mask, cache)[:, -1, :10].log_softmax(dim=-1)
        scores, best = (scores[:, None] + digits).flatten().topk(beams)
        cache.reorder(best // 10)  # the beams that these digits continue
        tokens = torch.cat([tokens[best // 10], best[:, None] % 10], dim=1)
    return tokens[:, 1:], scores


def main(steps: int = 300) -> None:
    torch.manual_seed(0)
    model = EncoderDecoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(1, steps + 1):
        source, target = batch(64)
        logits = model(target[:, :-1], *model.encode(source), NO_CACHE)
        loss = F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), ignore_index=PAD)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step in (1, steps) or step % 100 == 0:
            print(f"step {step:>4}  loss {loss:.3f}")

    with torch.no_grad():
        source, target = batch(500)
        memory, mask = model.encode(source)
        cache, tokens, logits = KVCache(), target[:, :1], []
        for _ in range(LONGEST + 1):
            logits.append(model(tokens[:, -1:], memory, mask, cache))
            tokens = torch.cat([tokens, logits[-1].argmax(dim=-1)], dim=1)
        gap = (torch.cat(logits, dim=1) - model(tokens[:, :-1], memory, mask, NO_CACHE)).abs().max()
        right = ((tokens == target) | (target == PAD)).all(dim=1).float().mean()
        found, scores = beam_search(model, source[:1], beams=3)
    print(f"{right:.1%} of 500 new strings are reversed without an error")
    print(f"decoding with a cache differs from the full forward by {gap:.0e} at most")
    print("beams for", *source[0, mask.valid[0]].tolist())
    for row, score in zip(found.tolist(), scores, strict=True):
        print(f"  {score.exp():.4f} ", *row)
    assert gap < 1e-4


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
