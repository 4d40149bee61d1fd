"""Linear layers as matrices: which are merely a product with one, and with which."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

# Tokens that compiled code multiplies by a weight that it reads once: torch's kernels multiply more
# of them as quickly.
MOST_ROWS = 8
# Whether oneDNN multiplies matrices of bfloat16: on x86, where vectors have 512 bits.
_BFLOAT16 = torch.backends.cpu.get_cpu_capability() not in ("DEFAULT", "NO AVX", "AVX2")
_Forward = TypeVar("_Forward", bound=Callable[..., Any])


def same_product(forward: _Forward) -> _Forward:
    """Mark a function that takes the place of a linear layer's forward and computes the same."""
    forward.is_same_product = True  # type: ignore[attr-defined]
    return forward


def has_own_forward(module: nn.Module) -> bool:
    """Whether a function that is not marked as the `same_product` takes the place of the forward of
    the module's class."""
    if "forward" not in vars(module):
        return False
    own = vars(module)["forward"]
    return not getattr(getattr(own, "func", own), "is_same_product", False)


class MatrixProduct(nn.Module):
    """Base class of linear layers that multiply by another matrix than their whole `weight`."""

    def matrix(self) -> Tensor:
        """The matrix `[out, in]` that the input is multiplied by."""
        raise NotImplementedError


def matrix_of(module: nn.Module) -> Tensor:
    """The matrix that a linear layer without `product_objection` multiplies by."""
    matrix = module.matrix() if isinstance(module, MatrixProduct) else module.weight
    assert isinstance(matrix, Tensor)
    return matrix


def matrix_objection(module: nn.Module) -> str | None:
    """Why a module is not merely a product with its `weight` plus its bias; None if it is."""
    if isinstance(module, MatrixProduct):
        return "multiplies by a share of its weight"
    return product_objection(module)


def product_objection(module: nn.Module) -> str | None:
    """Why a module is not merely a product with `matrix_of(module)` plus its bias; None if it is.
    Hooks, accelerate's offloading, adapters and quantisation make it more."""
    if type(module) is not nn.Linear and not isinstance(module, MatrixProduct):
        return f"is a {type(module).__name__}, not a plain nn.Linear"
    if has_own_forward(module):
        return "has a forward of its own, as accelerate's hooks give it"
    own = vars(module)
    if own["_forward_hooks"] or own["_forward_pre_hooks"]:
        return "has forward hooks"
    return None


def multiply(a: Float[Tensor, "*H M K"], b: Float[Tensor, "*I K N"]) -> Float[Tensor, "*H M N"]:
    """`a @ b`, summed in float32 where the processor has no products of their dtype: torch's own
    loop over elements takes many times as long (`benchmarks/absorbing.py`)."""
    return a @ b if has_products(a) else (a.float() @ b.float()).to(a.dtype)


def has_products(x: Tensor) -> bool:
    """Whether the device of a matrix multiplies in its dtype, and not in a loop over elements. In
    float16 few processors do, and float32 loses nothing there."""
    return not x.is_cpu or x.dtype.itemsize >= 4 or (_BFLOAT16 and x.dtype == torch.bfloat16)
