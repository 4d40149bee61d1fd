"""How a model's predictions depend on the keys and values of each of its attention layers.

To second order, the divergence of the predictions under an error e of the keys and values of one
token is half the mean of `(g^T e)^2`, over the gradients g of the log-likelihood of tokens drawn
from the predictions (the Fisher information). A layer's own outputs do not tell that: a model may
norm them, and read some of their channels far more than others, as Gemma 3 does.

Blocks are run forward, and then backward, each from its inputs alone: the activations of one block
are in memory at a time.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.convert.lossy.calibrate import attention_blocks
from regard.convert.lossy.sensitivity import keys_and_values
from regard.convert.recording import Recorded, first, recording
from regard.hf.families.layers import attention_of
from regard.hf.running.binding import all_bound, bound, calling


def gradients_of_predictions(
    model: Any,
    windows: Int[Tensor, "N L"],
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Float[Tensor, "T R"]]:
    """For each attention layer and each token of some text, the gradient of the log-likelihood of
    the predictions by its keys and values, before norm and rotation; in bfloat16.

    Args:
        model: a causal language model of transformers whose blocks follow one another; it is not
            changed.
        windows: of text.
        progress: called with the windows done and their number.

    Examples:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from regard.convert.lossy.predictions import gradients_of_predictions
        >>> config = LlamaConfig(hidden_size=16, num_attention_heads=2, vocab_size=20,
        ...     num_hidden_layers=1, intermediate_size=16)
        >>> model = LlamaForCausalLM(config).eval()
        >>> [each.shape for each in gradients_of_predictions(model, torch.randint(20, (2, 8)))]
        [torch.Size([16, 32])]
    """
    blocks, chance = attention_blocks(model), torch.Generator("cpu").manual_seed(0)
    found: list[list[Tensor]] = [[] for _ in blocks]
    for index, window in enumerate(windows.split(1)):
        progress(index, len(windows))
        with torch.inference_mode(False):
            calls, slope = _forward(model, [block for block, _ in blocks], window.clone(), chance)
            for (block, module), call, into in reversed([*zip(blocks, calls, found, strict=True)]):
                slope, own = _backward(block, module, call, slope)
                into.append(own.to(torch.bfloat16))
    progress(len(windows), len(windows))
    return [torch.cat(each) for each in found]


def _forward(
    model: Any, blocks: list[nn.Module], window: Tensor, chance: torch.Generator
) -> tuple[list[Recorded], Tensor]:
    """The calls of all blocks, and the gradient of the log-likelihood by the last one's output."""
    outs: list[Any] = []
    with ExitStack() as hooks, torch.no_grad(), recording(blocks) as calls:
        for block in blocks:
            handle = block.register_forward_hook(lambda module, args, out: outs.append(out))
            hooks.callback(handle.remove)
        model.base_model(input_ids=window, use_cache=False)
    last = first(outs[-1]).detach().requires_grad_()
    outs[-1] = (last, *outs[-1][1:]) if isinstance(outs[-1], tuple) else last
    known = [lambda *_, out=out, **__: out for out in outs]  # forwards that have been run
    with torch.enable_grad(), all_bound(zip(blocks, known, strict=True)):
        logits = model(input_ids=window, use_cache=False).logits[0].float()
        likelihood = logits.log_softmax(-1)
        drawn = torch.multinomial(likelihood.detach().exp().cpu(), 1, generator=chance)
        chosen = likelihood.gather(1, drawn.to(likelihood.device)).sum()
        (slope,) = torch.autograd.grad(chosen, last)
    return [call for (call,) in calls], slope


def _backward(
    block: nn.Module, module: nn.Module, call: Recorded, slope: Tensor
) -> tuple[Tensor, Float[Tensor, "L R"]]:
    """The gradients by the input of a block, and by the keys and values of its attention, from that
    by its output."""
    layer, x = attention_of(module), call.x.detach().requires_grad_()
    with torch.enable_grad(), keys_and_values(layer) as leaves, bound(module, calling(layer)):
        out = first(block(x, **call.given))
        before, k, v = torch.autograd.grad(out, [x, *leaves()], slope)
    return before, torch.cat([k, v], -1)[0]
