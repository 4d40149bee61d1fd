"""What healing changes of the two models while it lasts; afterwards all is as it was."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from regard.hf.families.finding import find
from regard.hf.running.binding import is_bound
from regard.hf.running.installing import install, is_readable, uninstall


@contextmanager
def only_these_learn(
    student: nn.Module, teacher: nn.Module, learning: Mapping[str, nn.Parameter]
) -> Iterator[None]:
    """Gradients for these parameters alone, and no dropout; afterwards all is as it was."""
    models = (student, teacher)
    flags = [(each, each.requires_grad) for model in models for each in model.parameters()]
    modes = [(module, module.training) for model in models for module in model.modules()]
    chosen = {id(each) for each in learning.values()}
    places = [next(model.parameters()).device for model in models]
    try:
        for parameter, _ in flags:
            parameter.requires_grad_(id(parameter) in chosen)
        for model in models:
            model.eval()
        yield
    finally:
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
            parameter.grad = None
        for module, mode in modes:
            module.training = mode
        for model, place in zip(models, places, strict=True):
            model.to(place)


@contextmanager
def rest_in(
    dtype: torch.dtype | None, student: nn.Module, learning: Mapping[str, nn.Parameter]
) -> Iterator[None]:
    """What does not learn, in the dtype of the arithmetic: autocast would convert it in each step,
    and hidden states would be as wide as the embeddings are."""
    chosen = {id(each) for each in learning.values()}
    rest = [each for each in student.parameters() if id(each) not in chosen]
    held = [(each, each.data) for each in rest if dtype is not None and each.is_floating_point()]
    try:
        for parameter, data in held:
            parameter.data = data.to(dtype)
        yield
    finally:
        for parameter, data in held:
            parameter.data = data


@contextmanager
def attention_in(
    dtype: torch.dtype | None, device: torch.device, *models: nn.Module
) -> Iterator[None]:
    """Attention whose products are in bfloat16 as all others are then: on a CPU torch's own is
    twice as slow, and slower still where keys and values differ in width."""
    with ExitStack() as stack:
        for model in models:
            if device.type == "cpu" and dtype == torch.bfloat16 and _may_install(model):
                install(model, precision="fast")
                stack.callback(uninstall, model)
        yield


def _may_install(model: nn.Module) -> bool:
    """Whether regard knows the attention, nothing runs in its place, and its masks are tensors."""
    known = find(model).known.values()
    return bool(known) and all(is_readable(each) and not is_bound(each) for each in known)
