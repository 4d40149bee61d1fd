"""A transformers checkpoint converted to MLA with a quarter of the cache, then fine-tuned by LoRA.

A tiny Llama is trained on the spot, so that the conversion has something to lose. `convert`
calibrates on text and trains nothing; peft fine-tunes the result as it does any other model. The
original gets the same fine-tuning, for comparison.

    python examples/finetune_converted.py 120   # steps of training: seconds
"""

import copy
import sys
import tempfile
from pathlib import Path
from pydoc_data.topics import topics

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import regard.hf
from regard.convert import convert, save, target_of

SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}


def train(model: nn.Module, windows: Tensor, steps: int) -> nn.Module:
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-3)
    for _ in range(steps):
        batch = windows[torch.randint(len(windows), (16,))]
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def with_lora(model: nn.Module, windows: Tensor, steps: int) -> nn.Module:
    torch.manual_seed(0)
    adapted = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear"))
    return train(adapted, windows, steps).merge_and_unload()


@torch.no_grad()
def show(name: str, model: nn.Module, windows: Tensor) -> None:
    """The loss on held-out text, and the bytes that all layers cache for a token."""
    loss = model(input_ids=windows, labels=windows).loss.item()
    cache = regard.hf.cache(model)
    model(input_ids=windows[:1], past_key_values=cache)
    print(f"{name:<36}{loss:>8.3f}{cache.nbytes / cache.get_seq_length():>21,.0f}")


def main(steps: int = 120) -> None:
    torch.manual_seed(0)
    windows = torch.tensor(list("".join(topics.values()).encode())).unfold(0, 64, 64)
    held_out, text = windows[::40], windows[torch.arange(len(windows)) % 40 > 0]
    model = train(LlamaForCausalLM(LlamaConfig(**SIZES)), text, steps)
    print(f"{'':<32}held-out loss  cache bytes a token")
    show("original", model, held_out)

    modules = regard.hf.attention_modules(model).values()
    layers = [regard.hf.attention_of(each) for each in modules]
    target = target_of("mla", layers, budget=0.25, form="deepseek")
    (converted,) = convert(model, [target], text[:160])  # about 10,000 tokens to calibrate on
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "converted"
        placed = regard.hf.place(copy.deepcopy(model), converted.layers)
        save(placed, None, out)
        loaded, _ = regard.hf.load(out)
    show(f"{target}", loaded, held_out)
    show(f"{target}, then LoRA", with_lora(loaded, text, steps // 4), held_out)
    show("original, then LoRA", with_lora(model, text, steps // 4), held_out)
    print("the output error of each layer, before training:", end=" ")
    print(*(f"{layer.still_missed:.1%}" for layer in converted.report))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
