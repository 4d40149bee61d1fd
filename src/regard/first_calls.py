"""A workaround for a race in MKL, needed while torch ships oneMKL older than 2025.

On a CPU with MKL, torch computes cos, exp, tanh and others with MKL's vector functions, from
several OpenMP threads at once. MKL chooses the code for each function when it is first called. If
two threads make that first call together, one of them may run code with only 11 correct bits
(https://github.com/pytorch/pytorch/issues/188792). A first call from one thread makes the choice
for the whole process.
"""

import functools
import re
import threading

import torch

FIXED = 2025  # the first version of oneMKL without the race
VECTOR_FUNCTIONS = (  # those of MKL that ATen calls (aten/src/ATen/cpu/vml.h)
    "acos", "asin", "atan", "cos", "erf", "erfc", "erfinv", "exp",
    "log", "log10", "log2", "sin", "sqrt", "tan", "tanh", "trunc",
)  # fmt: skip


def is_needed(config: str, has_mkl: bool) -> bool:
    """Whether torch's MKL has the race; `config` is the text of `torch.__config__.show()`.

    Examples:
        >>> is_needed("Intel(R) oneAPI Math Kernel Library Version 2024.2-Product", has_mkl=True)
        True
    """
    found = re.search(r"Math Kernel Library Version (\d+)", config)
    return has_mkl and (found is None or int(found[1]) < FIXED)


@functools.cache
def call_vector_functions() -> None:
    """Call each vector function of MKL on one number, in float32 and in float64: once a process.

    The calls are made in a short-lived thread, because regard may be loaded where calls do
    not reach MKL: under fake tensors, `torch.device("meta")`, a functorch transform or while Dynamo
    traces. Such modes belong to a thread, and a new one has none of them.
    """
    if not is_needed(torch.__config__.show(), torch.backends.mkl.is_available()):
        return
    thread = threading.Thread(target=_call_each, name="regard's first calls of MKL")
    try:
        thread.start()
    except RuntimeError:  # no thread can be started, so none of OpenMP's can race either
        return
    thread.join()


def _call_each() -> None:
    for dtype in (torch.float32, torch.float64):
        number = torch.full((1,), 0.5, dtype=dtype, device="cpu")
        for name in VECTOR_FUNCTIONS:
            getattr(torch, name)(number)
