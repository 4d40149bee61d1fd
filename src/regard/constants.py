"""Small constant tensors, memoised where that is safe, and the dtype of sums."""

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import ParamSpec

import torch
from jaxtyping import Shaped
from torch import Tensor

from regard.first_calls import call_vector_functions
from regard.tracing import is_immediate

P = ParamSpec("P")

Device = torch.device | str | None

call_vector_functions()  # before rope and ops compute cosines and exponentials


def constant(make: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """Memoise the tensors that `make` returns by its arguments, where that is safe.

    Nothing is memoised in traced programs, where a memoised tensor would become an input, and under
    `torch.func` transforms and fake tensors, whose tensors are invalid after them.
    """
    memoised = lru_cache(maxsize=128)(make)

    @wraps(make)
    def look_up(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        if not is_immediate() or _is_capturing():
            return make(*args, **kwargs)
        with torch.inference_mode(False):  # autograd refuses tensors made in inference mode
            return memoised(*args, **kwargs)  # type: ignore[arg-type]  # hashable, by contract

    return look_up


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


@constant
def device_vector(
    values: tuple[float | int, ...], dtype: torch.dtype, device: torch.device
) -> Shaped[Tensor, " n"]:
    """`values` as a tensor on `device`, memoised."""
    return torch.tensor(values, dtype=dtype, device=device)


def accumulating_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """The dtype of scores, sums and angles: float64 if any dtype is float64, else float32."""
    return torch.float64 if torch.float64 in dtypes else torch.float32
