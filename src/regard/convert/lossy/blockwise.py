"""Through a model block by block, as it is and as it becomes, so that each sees what it will read.

A converted layer reads what the converted layers before it put out, not what the model's own do.
So both are carried along: every layer is calibrated on the inputs it will really have, and its
output projection is fitted, in closed form, to bring the residual stream back to the model's own.
Two blocks at a time are enough, which is why a model larger than memory can be converted.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.convert.lossy.calibrate import Moments, moments_of
from regard.hf.families.finding import attention_modules
from regard.hf.running.binding import bound, calling, is_bound

CHANGED = 1e-2  # of what a block adds: half precision's norms differ by less, doubling by more
AT_ONCE = 4  # windows: the widest tensor of a block is that of its MLP


@dataclass(frozen=True)
class Step:
    """One layer's turn: what its attention is to read, and what it is best to put out."""

    index: int
    module: nn.Module
    x: Float[Tensor, "N L E"]
    target: Float[Tensor, "N L E"]

    @property
    def moments(self) -> Moments:
        """Of what the layer reads."""
        return moments_of(self.x)


Make = Callable[[Step], nn.Module]  # the layer that takes a module's place


@torch.no_grad()
def walk(
    model: Any,
    windows: Int[Tensor, "N L"],
    makes: Sequence[Make],
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[list[nn.Module]]:
    """For each of `makes`, a layer for every attention module of the model, which stays as it was.

    Each is made from what it will read after those that the same `make` made before it; the model's
    own pass is shared.

    Args:
        model: a causal language model of transformers whose blocks follow one another.
        windows: tokens of calibration text, all windows of one length.
        makes: each makes the layer for one step; called block by block, in order.
        progress: called with the blocks done and the blocks in all.

    Raises:
        ValueError: if the model has attention that regard does not know, or is installed.
    """
    blocks = attention_blocks(model)
    hidden, arguments = _beginning(model, blocks, windows)
    students = [hidden for _ in makes]
    layers: list[list[nn.Module]] = [[] for _ in makes]
    for index, (block, module) in enumerate(blocks):
        progress(index, len(blocks))
        run = _Block(block, module, arguments[index])
        after, put_out = run.as_it_is(hidden)
        added = run.adds(hidden[:1], put_out[:1])
        for which, make in enumerate(makes):
            converted = students[which]
            target = put_out + (hidden - converted) if added else put_out
            layer = make(Step(index, module, run.reads(converted), target))
            students[which] = run.with_layer(layer, converted)
            layers[which].append(layer)
        hidden = after
    progress(len(blocks), len(blocks))
    return layers


class _Block:
    """One block of the model and its attention, run over all windows, a few at once."""

    def __init__(self, block: nn.Module, module: nn.Module, given: dict[str, Any]) -> None:
        self.block, self.module, self.given = block, module, given

    def as_it_is(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What the block makes of it, and what its attention puts out on the way."""
        seen: list[Tensor] = []
        hook = self.module.register_forward_hook(lambda module, args, out: seen.append(out[0]))
        try:
            return self._run(hidden), torch.cat(seen)
        finally:
            hook.remove()

    def adds(self, hidden: Tensor, put_out: Tensor) -> bool:
        """Whether the block adds what its attention puts out to the residual stream as it is.

        Gemma 2 and 3 and OLMo 2 norm it first: then twice the output gives the same, and errors of
        the stream before it cannot be mended in it.
        """
        once, twice = (self._returning(factor * put_out, hidden).double() for factor in (1.0, 2.0))
        change, whole = (twice - once).norm(), (once - hidden.double()).norm()
        return bool(change > CHANGED * whole)

    def _returning(self, put_out: Tensor, hidden: Tensor) -> Tensor:
        with bound(self.module, lambda module, *args, **given: (put_out, None)):
            return self._run(hidden)

    def reads(self, hidden: Tensor) -> Tensor:
        """What the attention reads, and nothing after it."""
        seen = []
        for part in hidden.split(AT_ONCE):
            with bound(self.module, _catch):
                try:
                    self.block(part, **self.given)
                except _Caught as caught:
                    seen.append(caught.x)
        return torch.cat(seen)

    def with_layer(self, layer: nn.Module, hidden: Tensor) -> Tensor:
        """What the block makes of it with another attention."""
        with bound(self.module, calling(layer)):
            return self._run(hidden)

    def _run(self, hidden: Tensor) -> Tensor:
        outs = (self.block(part, **self.given) for part in hidden.split(AT_ONCE))
        return torch.cat([out[0] if isinstance(out, tuple) else out for out in outs])


class _Caught(Exception):  # a message, not an error
    def __init__(self, x: Tensor) -> None:
        self.x = x


def _catch(module: nn.Module, hidden_states: Tensor, **given: Any) -> Any:
    raise _Caught(hidden_states)


def attention_blocks(model: nn.Module) -> list[tuple[nn.Module, nn.Module]]:
    """Every block and its attention, in order."""
    modules = attention_modules(model)
    if any(is_bound(module) for module in modules.values()):
        raise ValueError("regard is installed in this model; call regard.hf.uninstall first")
    return [
        (model.get_submodule(name.rpartition(".")[0]), module) for name, module in modules.items()
    ]


def _beginning(
    model: Any, blocks: Sequence[tuple[nn.Module, nn.Module]], windows: Tensor
) -> tuple[Tensor, list[dict[str, Any]]]:
    """What the first block reads, and what else each block is given for windows of this length."""
    arguments: list[dict[str, Any]] = []
    first: list[Tensor] = []

    def note(block: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        arguments.append({name: value for name, value in given.items() if name != "hidden_states"})

    def catch(block: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        raise _Caught(args[0] if args else given["hidden_states"])

    hooks = [block.register_forward_pre_hook(note, with_kwargs=True) for block, _ in blocks]
    try:
        model.base_model(input_ids=windows[:1], use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    hook = blocks[0][0].register_forward_pre_hook(catch, with_kwargs=True)
    try:
        for window in windows:
            try:
                model.base_model(input_ids=window[None], use_cache=False)
            except _Caught as caught:
                first.append(caught.x)
    finally:
        hook.remove()
    return torch.cat(first), arguments
