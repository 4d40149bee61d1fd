"""Recording the inputs and outputs of modules while a model runs."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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

    def hook_of(into: list[Recorded]) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any], out: Any) -> None:
            given = {name: value for name, value in named.items() if name != "hidden_states"}
            into.append(Recorded(args[0] if args else named["hidden_states"], given, first(out)))

        return hook

    handles = [
        module.register_forward_hook(hook_of(into), with_kwargs=True)
        for module, into in zip(modules, calls, strict=True)
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


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
