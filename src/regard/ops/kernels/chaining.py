"""Running products of few rows with weights: tensors as addresses, and memory to work in."""

import ctypes
import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from regard.matrices import MOST_ROWS
from regard.ops.kernels.launching import _PLAIN, workspace
from regard.ops.kernels.row_products import (
    MOST_PLACES,
    MOST_STAGES,
    PACKED,
    PACKED_STAGE,
    Strip,
    kernel,
)
from regard.ops.kernels.threads import launch, yield_address
from regard.ops.kernels.tiles import LINE
from regard.ops.kernels.vectors import machine_lanes, memory_streams

TASK = 1 << 16  # bytes of weights of a task, at most
LEAST = 1 << 13  # and at least: to take a task costs a hundredth of the time to read as many
TASKS = 12  # of a product, if they have `LEAST` bytes: so a slow core takes fewer, and threads end
# at about the same time
NOWHERE = (0,) * MOST_PLACES
NO_MORE = bytes((MOST_STAGES - 1) * PACKED_STAGE.size)


class Matrix(NamedTuple):
    """The parameters of a linear layer."""

    weight: Tensor  # [outputs, width]
    bias: Tensor | None = None  # [outputs]


class Norm(NamedTuple):
    """An RMSNorm: rows over the root of their mean square, times `weight + shift`."""

    weight: Tensor  # [width]
    eps: float  # added to the mean square
    shift: float = 0.0


class Gate(NamedTuple):
    """A product that multiplies another one by its activation."""

    matrix: Matrix
    activation: int  # SILU, GELU or GELU_TANH


class Product(NamedTuple):
    """`out = activation(gate x) * (matrix x) + added`, x normed before.

    Rows have numbers: from 1 on the inputs of the chain, then its outputs, then rows in float32
    between its products.
    """

    x: int
    matrix: Matrix
    out: int
    norm: Norm | None = None
    gate: Gate | None = None
    added: int = 0
    waits: bool = False  # for the product before it in the chain


class Held(NamedTuple):
    """Tensors whose addresses are kept between calls. Each may be moved or changed in place."""

    tensors: tuple[Tensor, ...]
    addresses: list[int]
    shapes: list[torch.Size]
    dtypes: list[torch.dtype]

    @classmethod
    def of(cls, tensors: Iterable[Tensor]) -> "Held":
        """Tensors as they are now."""
        kept = tuple(tensors)
        return cls(kept, [x.data_ptr() for x in kept], [x.shape for x in kept],
                   [x.dtype for x in kept])  # fmt: skip

    @classmethod
    def joined(cls, several: "Iterable[Held]") -> "Held":
        """All of these tensors, each once."""
        rows = dict.fromkeys(row for held in several for row in zip(*held, strict=True))
        kept, *others = zip(*rows, strict=True)
        return cls(kept, *map(list, others))

    def is_unchanged(self) -> bool:
        """Whether all lie where they did, with their shapes and dtypes, as the kernels read them.
        The loops run in C: a step of a whole model asks this of hundreds of tensors."""
        tensors = self.tensors
        if [*map(Tensor.data_ptr, tensors)] != self.addresses:
            return False
        if [x.shape for x in tensors] != self.shapes or [x.dtype for x in tensors] != self.dtypes:
            return False
        return all(map(Tensor.is_contiguous, tensors)) and not any(map(Tensor.is_neg, tensors))


class PreparedChain(NamedTuple):
    """A chain of products for given parameters, which any number of calls run."""

    held: Held  # the parameters
    dtype: torch.dtype  # of the parameters
    address: int  # of the machine code
    length: int  # products
    stages: bytes  # of each, as the kernel reads it
    inputs: tuple[int, ...]  # elements of a row
    outputs: tuple[int, ...]
    between: tuple[int, ...]
    widest: int  # elements of the widest row that is multiplied
    gates: int  # of a task, at most
    tasks: int  # of a product, at most

    def run(self, *inputs: Tensor) -> tuple[Tensor, ...] | None:
        """The outputs of the chain for inputs `[..., width]`, of as many rows, at most `MOST_ROWS`.
        None if the kernel cannot read an input, or a parameter as it is now."""
        rows = inputs[0].numel() // self.inputs[0]
        if not 0 < rows <= MOST_ROWS:
            return None
        for x, width in zip(inputs, self.inputs, strict=True):
            if x.shape[-1] != width or x.numel() != rows * width or not is_plain(x, self.dtype):
                return None
        if not self.held.is_unchanged():
            return None
        axes = inputs[0].shape[:-1]
        outputs = tuple(inputs[0].new_empty((*axes, width)) for width in self.outputs)
        threads = min(self.tasks, torch.get_num_threads())
        counters, scratch = self.counter_bytes(threads), threads * self.scratch_bytes(rows)
        space = workspace(counters + scratch + 4 * rows * sum(self.between))
        ctypes.memset(space, 0, counters)
        places, at = [x.data_ptr() for x in inputs + outputs], space + counters + scratch
        for width in self.between:
            places.append(at)
            at += 4 * rows * width
        data = self.record(rows, threads, space, space + counters, places)
        launch(self.address, data, threads)
        return outputs

    def record(
        self, rows: int, threads: int, counters: int, scratch: int, places: Sequence[int]
    ) -> bytes:
        """A call as the kernel reads it: addresses of zeroed counters, of the threads' scratch, and
        of the rows by their numbers."""
        return PACKED.pack(
            self.length, rows, threads, counters, scratch, self.scratch_bytes(rows),
            self._rows_at(rows), yield_address(), 0, *places, *NOWHERE[1 + len(places) :],
        ) + self.stages  # fmt: skip

    def counter_bytes(self, threads: int) -> int:
        """Of the counters of a call."""
        return counter_bytes(self.length, threads)

    def scratch_bytes(self, rows: int) -> int:
        """Of the scratch of a thread."""
        return self._rows_at(rows) + 4 * rows * self.widest

    def _rows_at(self, rows: int) -> int:
        """Bytes of a thread's scratch before the rows: sums, and the gates of a task."""
        return LINE + -(-4 * self.gates * rows // LINE) * LINE


def prepare(inputs: int, outputs: int, *products: Product) -> PreparedChain | None:
    """The chain of these products, which the kernel runs one after the other; None if a parameter
    has another dtype, size or place than the kernel reads.

    Parameters have one dtype, float32 or bfloat16; they are contiguous, and on the CPU.
    """
    dtype, given = products[0].matrix.weight.dtype, inputs + outputs
    widths: dict[int, int] = {}  # of the rows
    parameters: list[Tensor] = []
    stages, awaited, gates, tasks = b"", 0, 0, 0
    for each in products:
        if not _fits(each, dtype, widths):
            return None
        parameters += _parameters(each)
        outs, width = each.matrix.weight.shape
        block = block_of(outs, width * dtype.itemsize * (2 if each.gate else 1))
        stages += PACKED_STAGE.pack(
            outs, width, each.x, each.x > given, *_of_norm(each.norm), *_addresses(each.matrix),
            *_of_gate(each.gate), each.added, each.added > given, each.out, each.out > given,
            block, awaited if each.waits else 0,
        )  # fmt: skip
        awaited = -(-outs // block)
        tasks, gates = max(tasks, awaited), max(gates, block if each.gate else 0)
    multiplied = frozenset(widths[each.x] for each in products)
    strip = strip_for(multiplied, dtype)
    if strip is None:
        return None
    sizes = tuple(widths[number] for number in sorted(widths))
    return PreparedChain(
        held=Held.of(parameters),
        dtype=dtype,
        address=address_of(strip),
        length=len(products),
        stages=stages + bytes((MOST_STAGES - len(products)) * PACKED_STAGE.size),
        inputs=sizes[:inputs],
        outputs=sizes[inputs:given],
        between=sizes[given:],
        widest=max(multiplied),
        gates=gates,
        tasks=tasks,
    )


def _fits(product: Product, dtype: torch.dtype, widths: dict[int, int]) -> bool:
    """Whether the kernel may read the parameters of a product, and their sizes are those of its
    rows; `widths` gets the widths of rows that had none."""
    matrix, norm, gate = product.matrix, product.norm, product.gate
    if not _is_readable(matrix, dtype):
        return False
    outputs, width = matrix.weight.shape
    of_gate = matrix if gate is None else gate.matrix
    if not _is_readable(of_gate, dtype) or of_gate.weight.shape != (outputs, width):
        return False
    if norm is not None and (norm.weight.shape != (width,) or not is_plain(norm.weight, dtype)):
        return False
    rows = (product.x, width), (product.out, outputs), (product.added or product.out, outputs)
    return all(widths.setdefault(number, size) == size for number, size in rows)


def _parameters(product: Product) -> list[Tensor]:
    matrices = [product.matrix] if product.gate is None else [product.matrix, product.gate.matrix]
    found: list[Tensor | None] = [x for matrix in matrices for x in matrix]
    found.append(None if product.norm is None else product.norm.weight)
    return [x for x in found if x is not None]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """`x @ weight.T + bias` in x's dtype, summed in float32, for `x [..., width]` of `MOST_ROWS`
    rows at most; None if a tensor has another dtype, size or place than the kernel reads.

    All are float32, or all bfloat16; contiguous, and on the CPU.
    """
    (outputs, width), dtype, sizes = weight.shape, weight.dtype, x.shape
    strip = strip_for(frozenset((width,)), dtype)
    if strip is None or sizes[-1] != width or not 0 < (rows := x.numel() // width) <= MOST_ROWS:
        return None
    if not outputs or not is_plain(x, dtype) or not _is_readable(Matrix(weight, bias), dtype):
        return None
    block = block_of(outputs, width * strip.item)
    threads = min(-(-outputs // block), torch.get_num_threads())
    out, scratch = x.new_empty((*sizes[:-1], outputs)), LINE + 4 * rows * width
    counters = counter_bytes(1, threads)
    space = workspace(counters + threads * scratch)
    ctypes.memset(space, 0, counters)
    data = PACKED.pack(1, rows, threads, space, space + counters, scratch, LINE, 0, 0, x.data_ptr(),
                       out.data_ptr(), *NOWHERE[3:])  # fmt: skip
    bias_at = 0 if bias is None else bias.data_ptr()
    stage = PACKED_STAGE.pack(outputs, width, 1, False, 0, 0.0, 0.0, weight.data_ptr(), bias_at,
                              0, 0, 0, 0, False, 2, False, block, 0)  # fmt: skip
    launch(address_of(strip), data + stage + NO_MORE, threads)
    return out


@functools.cache
def strip_for(widths: frozenset[int], dtype: torch.dtype) -> Strip | None:
    """The longest vectors of this machine of which each width is an even number; None if there are
    none, or the kernel does not read weights of that dtype."""
    fitting = (n for n in (16, 8, 4) if n <= machine_lanes())
    lanes = next((n for n in fitting if all(x and x % (2 * n) == 0 for x in widths)), 0)
    readable = dtype in (torch.float32, torch.bfloat16)
    streams = memory_streams() if lanes == 16 else 1
    return Strip(lanes, dtype is torch.bfloat16, streams) if lanes and readable else None


@functools.cache
def address_of(strip: Strip) -> int:
    """The address of the kernel's machine code."""
    return int(kernel(strip).address)


def counter_bytes(stages: int, threads: int) -> int:
    """Of the counters of a call, a cache line for each."""
    return LINE * (1 + stages * (1 + threads))


@functools.cache
def block_of(outputs: int, row_bytes: int) -> int:
    """The outputs of a task, for rows of so many bytes of weights."""
    most = max(TASK, 4 * row_bytes)  # the streams of a strip
    return max(1, min(most, max(LEAST, outputs * row_bytes // TASKS)) // row_bytes)


def is_plain(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether the kernel may read a tensor by its address; asked at every call, as
    `place_if_readable` says."""
    if type(x) not in _PLAIN or x.dtype is not dtype or not x.is_cpu:
        return False
    dense = x.layout is torch.strided and x.is_contiguous() and not x.is_neg()
    return dense and x.data_ptr() != 0


def _is_readable(matrix: Matrix, dtype: torch.dtype) -> bool:
    weight, bias = matrix
    if weight.dim() != 2 or not weight.shape[0] or not is_plain(weight, dtype):
        return False
    return bias is None or (bias.shape == weight.shape[:1] and is_plain(bias, dtype))


def _of_norm(norm: Norm | None) -> tuple[int, float, float]:
    return (0, 0.0, 0.0) if norm is None else (norm.weight.data_ptr(), norm.shift, norm.eps)


def _of_gate(gate: Gate | None) -> tuple[int, int, int]:
    """Of its weight and bias, and its activation."""
    return (0, 0, 0) if gate is None else (*_addresses(gate.matrix), gate.activation)


def _addresses(matrix: Matrix) -> tuple[int, int]:
    """Of a weight and its bias; 0 for a bias that is not there."""
    return matrix.weight.data_ptr(), 0 if matrix.bias is None else matrix.bias.data_ptr()
