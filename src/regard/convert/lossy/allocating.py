"""The rank of each layer's latent within a total, by how much the model's predictions suffer.

Lost energies of different layers cannot be compared, since later layers may not depend on what is
lost. So every layer is converted alone, at several sizes, and the cost is the divergence of the
whole model's predictions, in nats a token. Small costs nearly add, so the total is then allotted
greedily where it reduces the cost most.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from jaxtyping import Float64, Int
from torch import Tensor, nn

from regard.convert.lossy.calibrate import attention_blocks
from regard.convert.measuring import divergence
from regard.convert.recording import recording
from regard.hf.generating.predicting import hidden_states
from regard.hf.running.binding import bound, calling

EVERY = 4  # predictions of every fourth token are compared: the head costs more than all layers
Make = Callable[[int, nn.Module, Tensor, int], nn.Module]


@torch.no_grad()
def costs(
    model: Any,
    windows: Int[Tensor, "N L"],
    make: Make,
    sizes: Sequence[int],
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Float64[Tensor, "layers sizes"]:
    """The divergence, in nats a token, that converting each layer alone to each size causes.

    Args:
        model: a causal language model of transformers; it is not changed.
        windows: one or two thousand tokens of calibration text.
        make: returns a layer for `(index, attention module, its inputs, size)`.
        sizes: sizes to try, in any order.
        progress: called with the layers done and their number.
    """
    blocks = attention_blocks(model)
    both = [recording(modules) for modules in zip(*blocks, strict=True)]
    with both[0] as entered, both[1] as read:
        hidden = hidden_states(model, windows)
    found = torch.zeros(len(blocks), len(sizes), dtype=torch.float64)
    for index, (_, module) in enumerate(blocks):
        progress(index, len(blocks))
        for column, size in enumerate(sizes):
            layer = make(index, module, read[index][0].x, size)
            with _skipping(blocks[:index], entered[index][0].x), bound(module, calling(layer)):
                changed = hidden_states(model, windows)
            found[index, column] = divergence(model, changed[:, ::EVERY], model, hidden[:, ::EVERY])
    progress(len(blocks), len(blocks))
    return found


def allot(
    costs: Float64[Tensor, "layers sizes"], sizes: Sequence[int], total: int, *, step: int = 8
) -> list[int]:
    """A size for each layer, with sum `total` and the least sum of costs.

    Costs between the sizes that were tried are interpolated as powers; no size is beyond them.
    Sizes grow by `step`, the last time by the remainder.

    Raises:
        ValueError: if the total is less than the smallest or more than the largest size everywhere.

    Examples:
        >>> import torch
        >>> allot(torch.tensor([[4.0, 1.0], [0.4, 0.1]], dtype=torch.float64), [8, 32], 40)
        [32, 8]
    """
    smallest, largest = min(sizes), max(sizes)
    layers = len(costs)
    if not layers * smallest <= total <= layers * largest:
        raise ValueError(
            f"a total of {total} for {layers} layers is not between {smallest} and {largest} each"
        )
    order = sorted(range(len(sizes)), key=lambda i: sizes[i])
    at = torch.tensor([float(sizes[i]) for i in order]).double().log()
    logs = costs[:, order].clamp_min(1e-9).log()
    given = [smallest] * layers
    left = total - layers * smallest
    while left > 0:
        add = min(step, left)
        savings = [
            _cost(at, logs[i], given[i]) - _cost(at, logs[i], given[i] + add)
            if given[i] + add <= largest
            else float("-inf")
            for i in range(layers)
        ]
        best = max(range(layers), key=savings.__getitem__)
        given[best] += add
        left -= add
    return given


def _cost(at: Tensor, logs: Tensor, size: int) -> float:
    """The cost of a size between those tried, interpolated linearly in logarithms."""
    x = torch.tensor(float(size)).double().log()
    right = int(torch.searchsorted(at, x).clamp(1, len(at) - 1))
    share = (x - at[right - 1]) / (at[right] - at[right - 1])
    return float((logs[right - 1] + share * (logs[right] - logs[right - 1])).exp())


@contextmanager
def _skipping(blocks: Sequence[tuple[nn.Module, nn.Module]], hidden: Tensor) -> Iterator[None]:
    """These blocks return `hidden` instead of running: it was computed before."""
    with ExitStack() as stack:
        for block, _ in blocks:
            stack.enter_context(bound(block, lambda module, *args, **given: hidden))
        yield
