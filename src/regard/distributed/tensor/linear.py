"""The forward passes of split modules: products with this rank's weights, and all-reduces."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from regard.distributed.tensor.sums import all_reduce, all_reduce_gradient
from regard.distributed.tensor.weights import Split
from regard.matrices import MatrixProduct


class SplitLinear(Split, MatrixProduct):
    """A linear layer: the product with the rows of this rank, or with all of them."""

    def matrix(self) -> Tensor:
        """The rows of the weight that this rank has, as an ordinary tensor."""
        weight: Tensor = self.local("weight")
        return weight

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.matrix(), self.local("bias"))


class CopiedInput(SplitLinear):
    """A linear layer that reads a replicated input for this rank's heads: all-reduces the gradient
    of the input."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.split.shared(x))


class CopiedOutput(SplitLinear):
    """A replicated linear layer whose output each rank reads for its heads: all-reduces the
    gradient of the output."""

    def forward(self, x: Tensor) -> Tensor:
        return self.split.shared(super().forward(x))


class SummedOutput(Split):
    """The linear layer that reads the outputs of the heads: the outputs of this rank's heads times
    its columns, all-reduced, plus the bias once.

    Padding heads that share a key head with real ones have outputs: they are left out, so that
    their columns have no gradient and stay zero.
    """

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.local("weight"), self.local("bias")
        if (real := self._real(x.shape[-1])) < x.shape[-1]:
            x, weight = x[..., :real], weight[:, :real]
        product = functional.linear(x, weight)
        result = all_reduce(product, self.split.ranks, "tensor parallel: sum of the outputs")
        return result if bias is None else result + bias.to(result.dtype)

    def _real(self, channels: int) -> int:
        """Channels of this rank's heads without padding, which comes last."""
        split = self.split
        return len(split.heads(split.ranks.rank)) * channels // split.local_heads


class LocalForward(Split):
    """Any module whose parameters every rank has: its forward on them as ordinary tensors."""

    def forward(self, *args: Any, **options: Any) -> Any:
        own: Any = self
        parameters = own._parameters
        own._parameters = {name: self.local(name) for name in parameters}
        try:
            return super().forward(*args, **options)  # type: ignore[misc]
        finally:
            own._parameters = parameters


class SummedSquares(Split):
    """RMSNorm over the channels of all heads: the sum of squares is that of all ranks."""

    def forward(self, x: Tensor) -> Tensor:
        own: Any = self
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        total = self.total(wide.square().sum(-1, keepdim=True))
        eps = torch.finfo(x.dtype).eps if own.eps is None else own.eps
        normed = wide * torch.rsqrt(total / own.normalized_shape[0] + eps)
        weight = self.local("weight")
        return (normed if weight is None else normed * weight.to(normed.dtype)).to(x.dtype)

    def total(self, squares: Tensor) -> Tensor:
        """The sum over all heads, which every rank reads for its own."""
        step = "tensor parallel: sums of squares of qk_norm"
        return all_reduce_gradient(
            all_reduce(squares, self.split.ranks, step), self.split.ranks, step
        )


class SummedSquaresOfKeys(SummedSquares):
    """RMSNorm over the channels of all key heads, each of which may be on several ranks."""

    def total(self, squares: Tensor) -> Tensor:
        return super().total(squares / self.split.replicas)
