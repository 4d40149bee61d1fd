"""Documents packed into one row: the loss and the gradients of separate documents, no padding.

`Documents` hides the other documents of the row, and positions start again in each of them. The
backend `blocked` leaves out the keys of other documents; `sdpa`, torch's kernel, takes the mask as
a tensor and computes every score of the row.

    python examples/packed_documents.py 6   # documents: seconds
"""

import sys
import time
from collections.abc import Callable
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from regard import EVERYTHING, Attention, Causal, Documents, Mask, Rotary

WIDTH, LAYERS = 64, 2


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(256, WIDTH), nn.Linear(WIDTH, 256)
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(LAYERS))
        options = {"num_kv_heads": 2, "rope": Rotary(16), "mask": Causal()}
        self.layers = nn.ModuleList(Attention(WIDTH, 4, **options) for _ in range(LAYERS))

    def forward(
        self, tokens: Tensor, mask: Mask = EVERYTHING, positions: Tensor | None = None
    ) -> Tensor:
        x = self.embed(tokens)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x), mask=mask, positions=positions)
        return self.head(x)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def measure(model: nn.Module, way: Callable[[], Tensor]) -> tuple[float, Tensor, float]:
    """The loss, its gradient as one vector, and the seconds of forward and backward."""
    for _ in range(2):  # the first time imports and allocates
        model.zero_grad()
        start = time.perf_counter()
        loss = way()
        loss.backward()
    seconds = time.perf_counter() - start
    return loss.item(), torch.cat([each.grad.flatten() for each in model.parameters()]), seconds


def main(count: int = 6) -> None:
    torch.manual_seed(0)
    model = LanguageModel()
    texts = [text for text in topics.values() if len(text) < 2_500][:count]
    documents = [torch.tensor(list(text.encode())) for text in texts]
    inputs, targets = [each[:-1] for each in documents], [each[1:] for each in documents]

    lengths = torch.tensor([len(each) for each in inputs])
    mask = Documents.from_cu_seqlens(F.pad(lengths.cumsum(0), (1, 0)))  # [0, n1, n1 + n2, ...]
    positions = torch.cat([torch.arange(length) for length in lengths])
    row, row_targets = torch.cat(inputs)[None], torch.cat(targets)[None]
    padded = pad_sequence(inputs, batch_first=True)  # on the right, where no token attends to it
    padded_targets = pad_sequence(targets, batch_first=True, padding_value=-100)

    def separate() -> Tensor:
        return sum(loss_of(model(x[None]), y) for x, y in zip(inputs, targets, strict=True))

    def packed() -> Tensor:
        return loss_of(model(row, mask, positions), row_targets)

    def batch() -> Tensor:
        return loss_of(model(padded), padded_targets)

    explained = model.layers[0].explain(model.embed(row), mask=mask, positions=positions)
    backend = next(line.split()[0] for line in explained.splitlines() if " runs, " in line)
    ways = {"separate": separate, "padded batch": batch, f"packed, {backend}": packed}
    results = {name: measure(model, way) for name, way in ways.items()}
    for layer in model.layers:
        layer.backend = "sdpa"
    results["packed, sdpa"] = measure(model, packed)

    exact = results["separate"][1]
    print(f"{'':<17}tokens        loss   gradient differs by   seconds")
    for name, (loss, gradient, seconds) in results.items():
        tokens = padded.numel() if name == "padded batch" else row.numel()
        apart = (gradient - exact).norm() / exact.norm()
        print(f"{name:<16}{tokens:>7,}{loss:>12.2f}{apart:>22.0e}{seconds:>10.2f}")
    visible = (lengths * (lengths + 1) // 2).sum().item()
    print(f"{visible:,} of the row's {row.numel() ** 2:,} scores are visible")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
