"""The products of activations with weights that a module computes: found, and replaced.

A projection is a product of an activation with a parameter, or with what is made of parameters
alone: `nn.Linear`, `x @ self.w`, `torch.einsum`. While the module runs, the outputs of all
projections before attention are replaced by chosen values, and the run ends at the input of the
first projection after it. So attention is called by itself, in a module of any layout.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from regard_verify.subject.subject import SubjectError

PRODUCTS = {
    F.linear, F.conv1d, torch.conv1d, torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.einsum,
    torch.tensordot, torch.inner, Tensor.matmul, Tensor.mm, Tensor.bmm, Tensor.addmm,
    Tensor.__matmul__, Tensor.__rmatmul__, Tensor.inner,
}  # fmt: skip
NORMS = {F.layer_norm, torch.layer_norm, F.rms_norm, torch.rms_norm, F.group_norm, F.normalize}

Key = tuple[int, int]  # of a projection: the identity of its weight, and which use of it


class Product(NamedTuple):
    """One projection of a run: its key, its input and its output."""

    key: Key
    given: Tensor
    out: Tensor


class Products(TorchFunctionMode):
    """While it is active, every projection is recorded, or replaced by `instead`.

    Attributes:
        instead: what replaces the output of a projection, by its key.
        stop: the key of the projection at whose input the run ends.
        bare: whether normalisations return what they are given.
        rest: whether projections without a replacement are computed and recorded.
    """

    def __init__(
        self,
        instead: dict[Key, Tensor] | None = None,
        stop: Key | None = None,
        bare: bool = False,
        rest: bool = False,
    ) -> None:
        super().__init__()
        self.instead = instead
        self.rest = rest
        self.stop = stop
        self.bare = bare
        self.found: list[Product] = []
        self.used: dict[int, int] = {}
        self.weights: dict[int, tuple[Tensor, int]] = {}  # what is made of parameters alone

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in _flat((*args, *kwargs.values())) if isinstance(x, Tensor)]
        roots = [self._root(x) for x in tensors]
        if func in PRODUCTS and len(tensors) >= 2:
            at = next((i for i, root in enumerate(roots) if root and tensors[i].ndim >= 2), None)
            given = next((x for x, root in zip(tensors, roots, strict=True) if not root), None)
            if at is not None and given is not None:
                return self._product(roots[at], given, lambda: func(*args, **kwargs))
        if self.bare and func in NORMS and not roots[0]:
            return tensors[0]
        if func is F.multi_head_attention_forward:  # torch's own: its projections are inside
            with self, patch.object(F, "has_torch_function", lambda tensors: False):
                return func(*args, **kwargs)
        out = func(*args, **kwargs)
        if tensors and all(roots):
            made = [x for x in _flat([out]) if isinstance(x, Tensor)]
            self.weights.update({id(x): (x, roots[0]) for x in made})
        return out

    def _root(self, x: Tensor) -> int:
        """The identity of the parameter that a weight is or is made of; 0 if it is none."""
        return id(x) if isinstance(x, nn.Parameter) else self.weights.get(id(x), (x, 0))[1]

    def _product(self, root: int, given: Tensor, compute: Callable[[], Tensor]) -> Tensor:
        key = (root, self.used.get(root, 0))
        self.used[root] = key[1] + 1
        if self.stop is not None and key == self.stop:
            raise Reached(given)
        if self.instead is None or (self.rest and key not in self.instead):
            out = compute()
            self.found.append(Product(key, given.detach().clone(), out.detach().clone()))
            return out
        if key not in self.instead:
            raise SubjectError(
                "for these inputs it runs other projections"
            ) from NotImplementedError("another way through the module")
        return self.instead[key]


class Reached(BaseException):
    """Raised when a run comes to the output projection; carries the input of that projection."""

    def __init__(self, given: Tensor) -> None:
        super().__init__()
        self.given = given


def _flat(values: Any) -> list[Any]:
    found: list[Any] = []
    for each in values:
        found += _flat(each) if isinstance(each, (tuple, list)) else [each]
    return found


@dataclass(frozen=True)
class Place:
    """How one tensor of a run is laid out.

    Attributes:
        key: of the projection.
        axes: for each axis "B", "L" (tokens of x), "S" (tokens of the other sequence), "BL" or
            "BS" (rows and tokens in one), or a constant size.
        tokens_first: where rows and tokens are in one axis, whether tokens come first.
    """

    key: Key
    axes: tuple[str | int, ...]
    tokens_first: bool = False

    @property
    def channels(self) -> int:
        """The product of the constant sizes."""
        return math.prod(self._constants())

    @property
    def tokens(self) -> str:
        """Whose tokens: "L" or "S"."""
        return "S" if any(axis in ("S", "BS") for axis in self.axes) else "L"

    def _constants(self) -> list[int]:
        return [axis for axis in self.axes if isinstance(axis, int)]

    def laid_out(self, values: Tensor) -> Tensor:
        """Values [B, n, C] as the tensor of the run."""
        constants = self._constants() or [1]
        x = values.unflatten(-1, constants)
        if any(axis in ("BL", "BS") for axis in self.axes):
            x = (x.transpose(0, 1) if self.tokens_first else x).flatten(0, 1)
        order = self._order()
        if not self._constants():
            x = x.squeeze(-1)
        return x.permute([order.index(i) for i in range(len(order))]) if order else x

    def read(self, x: Tensor, batch: int, length: int) -> Tensor:
        """The tensor of the run as values [B, n, C].

        Raises:
            SubjectError: if it has another shape, as where a mask has too many axes.
        """
        sizes = {"B": batch, "L": length, "S": length, "BL": batch * length, "BS": batch * length}
        wanted = tuple(sizes.get(axis, 0) if isinstance(axis, str) else axis for axis in self.axes)
        if tuple(x.shape) != wanted:
            raise SubjectError(f"its merged heads have shape {list(x.shape)}, not {list(wanted)}")
        x = x.permute(self._order())
        if any(axis in ("BL", "BS") for axis in self.axes):
            x = x.flatten(1) if x.ndim > 1 else x[:, None]
            x = x.unflatten(0, (-1, batch) if self.tokens_first else (batch, -1))
            return x.transpose(0, 1) if self.tokens_first else x
        return x.flatten(2) if x.ndim > 2 else x[..., None]

    def _order(self) -> list[int]:
        """The axes, sorted into rows, tokens and constant sizes."""
        places = list(range(len(self.axes)))
        first = [i for i in places if self.axes[i] in ("B", "BL", "BS")]
        second = [i for i in places if self.axes[i] in ("L", "S")]
        return [*first, *second, *(i for i in places if isinstance(self.axes[i], int))]


def placed(key: Key, shapes: Sequence[tuple[torch.Size, dict[str, int]]]) -> Place | None:
    """The axes of a tensor: rows and tokens are axes that change with them, over two runs.

    Examples:
        >>> sizes = [{"B": 2, "L": 3, "S": 3}, {"B": 3, "L": 5, "S": 5}]
        >>> shapes = torch.Size([2, 4, 3, 8]), torch.Size([3, 4, 5, 8])
        >>> placed((0, 0), list(zip(shapes, sizes, strict=True)))
        Place(key=(0, 0), axes=('B', 4, 'L', 8), tokens_first=False)
    """
    (one, first), (two, second) = shapes
    if len(one) != len(two):
        return None
    axes: list[str | int] = []
    for a, b in zip(one, two, strict=True):
        options = {
            "B": (first["B"], second["B"]),
            "L": (first["L"], second["L"]),
            "S": (first["S"], second["S"]),
            "BL": (first["B"] * first["L"], second["B"] * second["L"]),
            "BS": (first["B"] * first["S"], second["B"] * second["S"]),
        }
        found = next((name for name, sizes in options.items() if sizes == (a, b)), None)
        if found is None and a != b:
            return None
        axes.append(found or a)
    words = [axis for axis in axes if isinstance(axis, str)]
    merged = sorted(words) in (["BL"], ["BS"])
    if not merged and sorted(words) not in (["B", "L"], ["B", "S"]):
        return None
    return Place(key, tuple(axes))


@dataclass
class Attention:
    """A module between its projections: values of the projections in, merged heads out.

    Attributes:
        call: runs the module on x [B, L, E] with options; for two sequences also on the other.
        sources: the projections before attention.
        sink: the input of the output projection; None if the output of the module is read.
        cross: whether the two sequences may differ in length.
    """

    call: Any
    sources: tuple[Place, ...]
    sink: Place | None
    cross: bool = False

    def __call__(
        self,
        values: Sequence[Tensor],
        *,
        bare: bool = True,
        given: dict[str, Any] | None = None,
        **options: Any,
    ) -> Tensor:
        """Merged heads [B, L, O], from values [B, n, C] for each source.

        Args:
            values: of each source.
            bare: whether normalisations return what they are given.
            given: inputs of the module, by default zeros; its projections do not depend on them.
            options: of the call.
        """
        batch = values[0].shape[0]
        lengths = {place.tokens: x.shape[1] for place, x in zip(self.sources, values, strict=True)}
        length = lengths.get("L", lengths.get("S", 1))
        make = partial(torch.zeros, dtype=values[0].dtype)
        sizes = {"B": batch, "L": length, "S": lengths.get("S", length)}
        inputs = dict(given or tokens_for(self.call, sizes, make))
        instead = {
            place.key: place.laid_out(x).contiguous()  # as a product gives it, for views of it
            for place, x in zip(self.sources, values, strict=True)
        }
        stop = None if self.sink is None else self.sink.key
        with bare_norms(self.call.module, bare), Products(instead, stop, bare):
            try:
                out = self.call(inputs.pop("x"), **inputs, **options)
            except Reached as reached:
                assert self.sink is not None
                return self.sink.read(reached.given, batch, length)
        if self.sink is not None:
            raise SubjectError("it did not come to its output projection")
        return out

    def channels(self) -> list[int]:
        """The number of channels of each source."""
        return [place.channels for place in self.sources]

    def channels_by_source(self) -> Iterator[tuple[Place, range]]:
        """Each source with its channels, which are numbered over all sources."""
        first = 0
        for place in self.sources:
            yield place, range(first, first + place.channels)
            first += place.channels


def tokens_for(
    call: Any, sizes: Mapping[str, int], make: Callable[[int, int, int], Tensor]
) -> dict[str, Any]:
    """Inputs that `make` makes: x [B, L, E], and the other sequence [B, S, E] if there is one."""
    width = call.own.width or 1
    given: dict[str, Any] = {"x": make(sizes["B"], sizes["L"], width)}
    if call.inputs == 3:
        given["others"] = tuple(make(sizes["B"], sizes["S"], width) for _ in "kv")
    elif call.context:
        given["context"] = make(sizes["B"], sizes["S"], width)
    return given


@contextmanager
def bare_norms(module: nn.Module, active: bool = True) -> Iterator[None]:
    """A context in which submodules called norms return what they are given."""
    handles = []
    for name, each in module.named_modules() if active else ():
        words = f"{name.rpartition('.')[2]} {type(each).__name__}".lower()
        if name and "norm" in words and not list(each.children()):  # no block with a norm in it
            handles.append(each.register_forward_hook(lambda norm, given, out: given[0]))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
