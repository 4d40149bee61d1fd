"""Linear layers as matrices: which are merely a product with one, and with which."""

from torch import Tensor, nn


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
    own = vars(module)
    if "forward" in own:
        return "has a forward of its own, as accelerate's hooks give it"
    if own["_forward_hooks"] or own["_forward_pre_hooks"]:
        return "has forward hooks"
    return None
