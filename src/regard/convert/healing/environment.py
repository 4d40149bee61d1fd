"""Settings of the models and the process while healing runs; the models are restored."""

import ctypes
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from regard.hf.families.finding import find
from regard.hf.running.binding import is_bound
from regard.hf.running.installing import install, is_readable, uninstall

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # options of glibc's mallopt, from its malloc.h


@contextmanager
def only_training(
    student: nn.Module, teacher: nn.Module, trained: Mapping[str, nn.Parameter]
) -> Iterator[None]:
    """Gradients for these parameters alone, and no dropout."""
    models = (student, teacher)
    flags = [(each, each.requires_grad) for model in models for each in model.parameters()]
    modes = [(module, module.training) for model in models for module in model.modules()]
    chosen = {id(each) for each in trained.values()}
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
def others_in(
    dtype: torch.dtype | None, student: nn.Module, trained: Mapping[str, nn.Parameter]
) -> Iterator[None]:
    """Parameters that are not trained, in the dtype of the arithmetic: autocast would convert them
    in each step, and hidden states would have the dtype of the embeddings."""
    chosen = {id(each) for each in trained.values()}
    others = [each for each in student.parameters() if id(each) not in chosen]
    original = [
        (each, each.data) for each in others if dtype is not None and each.is_floating_point()
    ]
    try:
        for parameter, data in original:
            parameter.data = data.to(dtype)
        yield
    finally:
        for parameter, data in original:
            parameter.data = data


@contextmanager
def fast_attention(
    dtype: torch.dtype | None, device: torch.device, *models: nn.Module
) -> Iterator[None]:
    """regard's attention with bfloat16 products, on a CPU with bfloat16 autocast: torch's own takes
    twice as long, and longer if keys and values differ in width."""
    with ExitStack() as stack:
        for model in models if device.type == "cpu" and dtype == torch.bfloat16 else ():
            known = find(model).known.values()  # with a forward of its own, and tensor masks
            if known and all(is_readable(each) and not is_bound(each) for each in known):
                install(model, precision="fast")
                stack.callback(uninstall, model)
        yield


def keep_freed_memory() -> None:
    """Let glibc reuse large freed blocks of memory; other C libraries are left as they are.

    By default glibc returns them to the system and requests new ones, which the system fills with
    zeros in every training step on a CPU. The setting holds for the whole process, so programs call
    this, and no other function of the library does.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return  # another C library
    mallopt(_MMAP_MAX, 0)
    mallopt(_TRIM_THRESHOLD, -1)
