"""How torch runs the present call: immediately, traced, transformed, or in forward mode.

Compiled kernels, and decisions that read elements of tensors, need immediate calls. Other calls use
operators that torch can trace and transform.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

_peek_transform = torch._C._functorch.peek_interpreter_stack
_is_key_included = torch._C._dispatch_tls_is_dispatch_key_included
_BEFORE_AUTOGRAD = torch._C.DispatchKey.PreDispatch  # included while modes before autograd are on
_UNCHANGED = nullcontext()


def is_immediate(*tensors: Tensor) -> bool:
    """Whether operators on these tensors run now, and nothing records or transforms them: no
    compiled graph, no `torch.jit.trace`, no `torch.func` transform, no dispatch mode (`make_fx`,
    fake tensors, FLOP counters), no tensor subclass, no forward-mode derivative."""
    if torch.compiler.is_compiling():
        return False
    if torch._C._len_torch_dispatch_stack() or _is_key_included(_BEFORE_AUTOGRAD):
        return False
    if torch._C._get_tracing_state() is not None or _peek_transform() is not None:
        return False
    return forward_ad._current_level < 0 and _PLAIN.issuperset(map(type, tensors))


def is_concrete(value: Tensor) -> bool:
    """Whether the elements of a tensor can be read now: neither it nor the program is traced, fake
    or transformed."""
    if torch.compiler.is_compiling() or is_transformed() or type(value) not in _PLAIN:
        return False
    return not any(torch._C._get_dispatch_mode(mode) for mode in _TRACERS)


def is_transformed() -> bool:
    """Whether a `torch.func` transform (`grad`, `vmap`, `jvp`...) is active."""
    return not torch.compiler.is_compiling() and _peek_transform() is not None


def is_vmapped() -> bool:
    """Whether a `torch.func.vmap` is active."""
    if not is_transformed():
        return False
    levels = torch._C._functorch.get_interpreter_stack() or ()
    return any(level.key() == torch._C._functorch.TransformType.Vmap for level in levels)


def is_forward_mode() -> bool:
    """Whether tensors may have forward-mode derivatives."""
    return not torch.compiler.is_compiling() and forward_ad._current_level >= 0


def may_differentiate() -> bool:
    """Whether forward-mode derivatives or a `torch.func` transform are active."""
    if torch.compiler.is_compiling():
        return False
    return forward_ad._current_level >= 0 or _peek_transform() is not None


def has_modes() -> bool:
    """Whether a `TorchDispatchMode` is active, before or after autograd."""
    return bool(torch._C._len_torch_dispatch_stack() or _is_key_included(_BEFORE_AUTOGRAD))


def in_backward() -> bool:
    """Whether this runs, uncompiled, inside a backward pass, as recomputed activations do."""
    return torch._C._current_graph_task_id() != -1


def is_autocast(kind: str) -> bool:
    """Whether autocast is on for that type of device: it casts inputs and weights to one dtype."""
    if torch.compiler.is_compiling():  # torch 2.11 cannot trace the question below
        return kind != "meta" and torch.is_autocast_enabled(kind)
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """A context without autocast, which would round float32 products to half precision."""
    is_off = not (torch.compiler.is_compiling() or torch._C._is_any_autocast_enabled())
    if is_off or not is_autocast(device.type):
        return _UNCHANGED
    return torch.autocast(device.type, enabled=False)


def same_autocast(device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    """A function that makes contexts with the present autocast settings, for a recomputation
    later."""
    kind = device.type
    if not torch.amp.is_autocast_available(kind):
        return nullcontext
    dtype, enabled = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
    return lambda: torch.autocast(kind, dtype, enabled)


_PLAIN = frozenset({Tensor, nn.Parameter})
_TRACERS = (torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.PROXY)
