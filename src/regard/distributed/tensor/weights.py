"""The parameters of a split layer: their placement on ranks, reading, saving and loading.

The parameters are DTensors, for optimizers, FSDP and checkpoints. What is computed reads the share
of this rank, `module.local("weight")`, an ordinary tensor: no DTensor takes part in it.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from regard.distributed.ranks import Ranks
from regard.distributed.tensor.heads import HeadSplit
from regard.distributed.tensor.sums import all_reduce_gradient


@dataclass(frozen=True, eq=False)
class Share:
    """The placement of one parameter on the ranks."""

    mesh: DeviceMesh  # of the DTensor
    placements: tuple[Placement, ...]  # of the DTensor
    dim: int = 0  # the dimension that is split
    # of each stored row (or column, of `dim`), the one on one device; -1 for a row of zeros. None
    # if they are the same.
    order: Tensor | None = None
    # the ranks whose gradients are added up, since each has that of its heads alone
    summed: Ranks | None = None

    def stored(self, whole: Tensor) -> Tensor:
        """The parameter of one device as it is stored: rows in order of ranks, padding between."""
        if self.order is None:
            return whole
        padding = (self.order < 0).nonzero().flatten().to(whole.device)
        rows = whole.index_select(self.dim, self.order.clamp(min=0).to(whole.device))
        return rows.index_fill(self.dim, padding, 0)

    def of_one_device(self, stored: Tensor) -> Tensor:
        """The inverse of `stored`."""
        if self.order is None:
            return stored
        real = (self.order >= 0).nonzero().flatten()
        return stored.index_select(self.dim, real[self.order[real].argsort()].to(stored.device))

    def shape(self, stored: Tensor) -> torch.Size:
        """The shape on one device."""
        sizes = list(stored.shape)
        if self.order is not None:
            sizes[self.dim] = int((self.order >= 0).sum())
        return torch.Size(sizes)

    def distributed(self, whole: Tensor, source: int | None) -> DTensor:
        """The parameter of one device, distributed from one rank, or from every rank's own."""
        stored = self.stored(whole).contiguous()
        return distribute_tensor(stored, self.mesh, self.placements, src_data_rank=source)

    def read(self, parameter: Tensor) -> Tensor:
        """This rank's share as an ordinary tensor."""
        if not isinstance(parameter, DTensor):
            return parameter  # given by functional_call: read already
        local = parameter.to_local()
        if self.summed is None:
            return local
        return all_reduce_gradient(
            local, self.summed, "tensor parallel: gradients of what ranks share"
        )

    def saved(self, parameter: Tensor) -> Tensor:
        """The parameter as on one device, to be saved: a DTensor of that shape."""
        if self.order is None or not isinstance(parameter, DTensor):
            return parameter
        return _like(self.of_one_device(parameter.full_tensor().detach()), parameter)

    def loaded(self, value: Tensor, parameter: Tensor) -> Tensor:
        """Convert a state dict's tensor of one device to the parameter's padding and placement."""
        if not isinstance(parameter, DTensor) or value.shape != self.shape(parameter):
            return value  # which torch refuses
        if isinstance(value, DTensor):
            if self.order is None:
                return value
            value = value.full_tensor()
        return _like(self.stored(value), parameter)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Share":
        return self  # process groups are not copied


def _like(whole: Tensor, parameter: DTensor) -> DTensor:
    """A tensor that every rank has, placed as a parameter is: on more ranks after fully_shard."""
    whole = whole.to(parameter.device).contiguous()
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)


class Split:
    """A mixin for the class of a module whose parameters are split over ranks."""

    one_device_class: ClassVar[type[nn.Module]]
    shares: dict[str, Share]
    split: HeadSplit

    def local(self, name: str) -> Any:
        """This rank's share of a parameter, as an ordinary tensor; None if there is none."""
        parameter = self._parameters[name]  # type: ignore[attr-defined]
        return None if parameter is None else self.shares[name].read(parameter)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[misc]
        for name, share in self.shares.items():
            destination[prefix + name] = share.saved(destination[prefix + name])

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        for name, share in self.shares.items():
            if isinstance(value := state_dict.get(prefix + name), Tensor):
                parameter = self._parameters[name]  # type: ignore[attr-defined]
                state_dict[prefix + name] = share.loaded(value, parameter)
        super()._load_from_state_dict(state_dict, prefix, *rest)  # type: ignore[misc]

    def reset_parameters(self) -> None:
        """Raise a RuntimeError: padding would not stay zero."""
        raise RuntimeError(
            "parameters that are split over ranks are not initialised again, since the weights of "
            "padding heads must stay zero; initialise the layer before tensor_parallel, or load a "
            "state dict"
        )


_CLASSES: dict[tuple[type[Any], type[Any]], type[Any]] = {}


def split_class(kind: type[Any], mixin: type[Split]) -> type[Any]:
    """`kind` with a mixin, under its own name."""
    if (kind, mixin) not in _CLASSES:
        about = {"one_device_class": kind, "__module__": kind.__module__}
        _CLASSES[kind, mixin] = type(kind.__name__, (mixin, kind), about)
    return _CLASSES[kind, mixin]


class SplitStyle(ParallelStyle):
    """Distributes the parameters of a module and changes its class, for `parallelize_module`.

    `mixin` is added to the bases of the module's class. `shares` say how each parameter lies on the
    ranks, by name; or how all lie of the module and of those inside it. This is done once where
    layers share the module.
    """

    def __init__(
        self, split: HeadSplit, mixin: type[Split], shares: dict[str, Share] | Share
    ) -> None:
        super().__init__()
        self.split, self.mixin, self.shares = split, mixin, shares

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if isinstance(self.shares, dict):
            self._split(module, self.shares)
            return module
        for each in module.modules():
            if each._parameters and not isinstance(each, Split):
                self._split(each, dict.fromkeys(each._parameters, self.shares))
        return module

    def _split(self, module: nn.Module, shares: dict[str, Share]) -> None:
        own = module._parameters
        shares = {name: each for name, each in shares.items() if own.get(name) is not None}
        for name, share in shares.items():
            old = own[name]
            assert old is not None
            new = share.distributed(old.detach(), self.src_data_rank)
            own[name] = nn.Parameter(new, requires_grad=old.requires_grad)
        module.shares, module.split = shares, self.split  # type: ignore[assignment]
        module.__class__ = split_class(type(module), self.mixin)


def is_split(module: nn.Module) -> bool:
    """Whether the parameters of a module, or of one inside it, are split over ranks."""
    return any(isinstance(each, Split) for each in module.modules()) or any(
        isinstance(each, DTensor) for each in module.parameters()
    )
