"""How much of a cache budget each layer should get: where a number less costs the model most.

Energies of different layers do not compare: what one layer loses, the next may never read. So every
layer is converted alone, at several sizes, and the rest of the model says what that costs, in nats
a token from its own predictions. Small losses nearly add, so sizes are then dealt out to where they
save most.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from jaxtyping import Float64, Int
from torch import Tensor, nn

from regard.convert.healing.losses import divergence
from regard.convert.lossy.blockwise import attention_blocks
from regard.hf.generating.predicting import hidden_states
from regard.hf.running.binding import bound, calling

EVERY = 4  # tokens, of which one is asked: a vocabulary costs more than all layers
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
    """Nats a token that converting one layer alone to one size takes from the model's predictions.

    Args:
        model: a causal language model of transformers; it stays as it was.
        windows: a thousand or two tokens of calibration text.
        make: makes a layer of `(index, attention module, what it reads, size)`.
        sizes: what to try, in any order.
        progress: called with the layers done and the layers in all.
    """
    blocks = attention_blocks(model)
    entered, read, hidden = _watched(model, blocks, windows)
    found = torch.zeros(len(blocks), len(sizes), dtype=torch.float64)
    for index, (_, module) in enumerate(blocks):
        progress(index, len(blocks))
        for column, size in enumerate(sizes):
            layer = make(index, module, read[index], size)
            with _from(blocks[:index], entered[index]), bound(module, calling(layer)):
                changed = hidden_states(model, windows)
            found[index, column] = divergence(model, changed[:, ::EVERY], model, hidden[:, ::EVERY])
    progress(len(blocks), len(blocks))
    return found


def allot(
    costs: Float64[Tensor, "layers sizes"], sizes: Sequence[int], total: int, *, step: int = 8
) -> list[int]:
    """A size for each layer, `total` in all, so that the sum of costs is least.

    Costs between the sizes that were tried are interpolated, as powers; beyond them nobody goes.
    Sizes are multiples of `step`, but for what does not divide.

    Raises:
        ValueError: if the total is less than the smallest or more than the largest size everywhere.

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
    """Between the sizes tried, straight in logarithms."""
    x = torch.tensor(float(size)).double().log()
    right = int(torch.searchsorted(at, x).clamp(1, len(at) - 1))
    share = (x - at[right - 1]) / (at[right] - at[right - 1])
    return float((logs[right - 1] + share * (logs[right] - logs[right - 1])).exp())


def _watched(
    model: Any, blocks: Sequence[tuple[nn.Module, nn.Module]], windows: Tensor
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """What every block and every attention reads, and the last hidden states."""
    entered: list[Tensor] = []
    read: list[Tensor] = []

    def noting(into: list[Tensor]) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> None:
            into.append(args[0] if args else given["hidden_states"])

        return hook

    with ExitStack() as hooks:
        for block, module in blocks:
            for each, into in ((block, entered), (module, read)):
                hook = each.register_forward_pre_hook(noting(into), with_kwargs=True)
                hooks.callback(hook.remove)
        hidden = hidden_states(model, windows)
    return entered, read, hidden


@contextmanager
def _from(blocks: Sequence[tuple[nn.Module, nn.Module]], hidden: Tensor) -> Iterator[None]:
    """Whatever enters these blocks, `hidden` comes out: they need not run again."""
    with ExitStack() as stack:
        for block, _ in blocks:
            stack.enter_context(bound(block, lambda module, *args, **given: hidden))
        yield
