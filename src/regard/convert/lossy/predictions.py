"""How a model's predictions depend on the keys, the values and the outputs of its attention layers.

To second order, the divergence of the predictions under an error e of the keys and values of one
token is half the mean of `(g^T e)^2`, over the gradients g of the log-likelihood of tokens drawn
from the predictions (the Fisher information). A layer's own outputs do not tell that: a model may
norm them, and read some of their channels far more than others, as Gemma 3 does.

Blocks are run forward, and then backward, each from its inputs alone: the activations of one block
are in memory at a time.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor, nn

from regard.convert.drawing import drawn
from regard.convert.lossy.calibrate import attention_blocks
from regard.convert.lossy.sensitivity import projected
from regard.convert.recording import Recorded, first, recording
from regard.hf.families.layers import attention_of
from regard.hf.running.binding import all_bound, bound, calling


class Gradients(NamedTuple):
    """Of the log-likelihood of a model's predictions, by one attention layer over some text."""

    keys_and_values: Float[Tensor, "T R"]  # of each token, before norm and rotation; in bfloat16
    metric: Float64[Tensor, "E E"]  # of errors of the outputs: the mean of g g^T over the gradients


def gradients_of_predictions(
    model: Any,
    windows: Int[Tensor, "N L"],
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Gradients]:
    """For each attention layer, the gradients of the log-likelihood of the predictions over text.

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
        >>> (found,) = gradients_of_predictions(model, torch.randint(20, (2, 8)))
        >>> found.keys_and_values.shape, found.metric.shape
        (torch.Size([16, 32]), torch.Size([16, 16]))
    """
    blocks, chance = attention_blocks(model), torch.Generator("cpu").manual_seed(0)
    found: list[list[Tensor]] = [[] for _ in blocks]
    squares: list[Any] = [0 for _ in blocks]
    for index, window in enumerate(windows.split(1)):
        progress(index, len(windows))
        with torch.inference_mode(False):
            calls, slope = _forward(model, [block for block, _ in blocks], window.clone(), chance)
            for at, (block, module) in reversed([*enumerate(blocks)]):
                slope, by_stored, by_output = _backward(block, module, calls[at], slope)
                found[at].append(by_stored.to(torch.bfloat16))
                squares[at] += (by_output.mT @ by_output).double()
    progress(len(windows), len(windows))
    metrics = (each / windows.numel() for each in squares)
    return [Gradients(torch.cat(each), m) for each, m in zip(found, metrics, strict=True)]


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
    with torch.enable_grad(), all_bound(zip(blocks, map(_returning, outs), strict=True)):
        logits = model(input_ids=window, use_cache=False).logits[0]
    shares = logits.detach().float().softmax(-1)
    by_logits = -shares  # the gradient of the log-likelihood: 1 of the token less the shares of all
    by_logits.scatter_add_(1, drawn(shares, chance), torch.ones_like(shares[:, :1]))
    (slope,) = torch.autograd.grad(logits, last, by_logits.to(logits.dtype))
    return [call for (call,) in calls], slope


def _returning(out: Any) -> Callable[..., Any]:
    """A forward that has been run."""
    return lambda module, *args, **given: out


def _backward(
    block: nn.Module, module: nn.Module, call: Recorded, slope: Tensor
) -> tuple[Tensor, Float[Tensor, "L R"], Float[Tensor, "L E"]]:
    """The gradients by the input of a block, by the keys and values of its attention, and by the
    attention's outputs, from that by the block's output."""
    layer, x = attention_of(module), call.x.detach().requires_grad_()
    with torch.enable_grad(), projected(layer) as leaves, bound(module, calling(layer)):
        out = first(block(x, **call.given))
        before, k, v, own = torch.autograd.grad(out, [x, *leaves()], slope)
    return before, torch.cat([k, v], -1)[0], own[0]
