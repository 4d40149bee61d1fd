"""Recording the inputs and outputs of modules while a model runs."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from regard.hf.running.binding import bound


class Recorded(NamedTuple):
    """One call of a module: its input, its other keyword arguments, its output."""

    x: Tensor
    given: dict[str, Any]
    out: Tensor


@contextmanager
def recording(modules: Sequence[nn.Module]) -> Iterator[list[list[Recorded]]]:
    """Record the calls of each of these modules.

    Examples:
        >>> import torch
        >>> layer = nn.Identity()
        >>> with recording([layer]) as (calls,):
        ...     out = layer(torch.ones(1))
        >>> calls[0].x, calls[0].out
        (tensor([1.]), tensor([1.]))
    """
    calls: list[list[Recorded]] = [[] for _ in modules]
    with observing(modules, [each.append for each in calls]):
        yield calls


@contextmanager
def observing(
    modules: Sequence[nn.Module], note: Sequence[Callable[[Recorded], object]]
) -> Iterator[None]:
    """A block in which each call of a module is given to the function of that module."""

    def hook(
        note: Callable[[Recorded], object], module: Any, args: Any, named: dict[str, Any], out: Any
    ) -> None:
        given = {name: value for name, value in named.items() if name != "hidden_states"}
        note(Recorded(args[0] if args else named["hidden_states"], given, first(out)))

    with ExitStack() as hooks:
        for module, each in zip(modules, note, strict=True):
            handle = module.register_forward_hook(partial(hook, each), with_kwargs=True)
            hooks.callback(handle.remove)
        yield


def first(out: Any) -> Tensor:
    """The output tensor: modules of transformers return weights too, layers of regard do not."""
    tensor: Tensor = out[0] if isinstance(out, tuple) else out
    return tensor


def input_of(module: nn.Module, run: Callable[[], object]) -> Tensor:
    """The hidden states that `module` is called with in `run()`, which is stopped there."""

    def stop(module: nn.Module, hidden_states: Tensor, **given: Any) -> Any:
        raise _Stopped(hidden_states)

    with bound(module, stop):
        try:
            run()
        except _Stopped as stopped:
            return stopped.x
    raise ValueError(f"{type(module).__name__} was not called")


class _Stopped(Exception):  # ends a forward pass early; not an error
    def __init__(self, x: Tensor) -> None:
        self.x = x
