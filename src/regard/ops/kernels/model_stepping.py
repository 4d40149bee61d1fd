"""A decoding step of all layers of a model in one call of compiled code.

A layer is a chain of products (norm, queries, keys, values), the append of the new tokens, their
attention, and another chain (outputs of the heads, norm, gated MLP). The records of these kernels
are packed once, and lie in memory of the step's own. From one step to the next only the number of
tokens and the angles change in them.
"""

import ctypes
import threading
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from regard.matrices import MOST_ROWS
from regard.ops.kernels import appending, head_norms, row_products, sequencing, tiles
from regard.ops.kernels.chaining import Held, Norm, PreparedChain, is_plain
from regard.ops.kernels.encoding import MIXED, mix_kernel
from regard.ops.kernels.launching import NOWHERE, Place, bytes_of, counters_of, table_of
from regard.ops.kernels.paged_stepping import slots_of
from regard.ops.kernels.sequencing import KernelCall
from regard.ops.kernels.stepping import (
    Angles,
    Plan,
    Rotation,
    append_address,
    places_of_buffer,
    rotation_of,
)
from regard.ops.kernels.threads import launch, yield_address
from regard.ops.kernels.tiles import LINE, TASKS_A_THREAD, KeyPages

RECORDS = np.dtype([  # of the kernels of a layer
    ("before", row_products.RECORD),
    ("norm", head_norms.RECORD),
    ("append", appending.RECORD),
    ("attend", tiles.RECORD),
    ("mix", [("fields", np.int64, (4,))]),
    ("after", row_products.RECORD),
])  # fmt: skip
OFFSETS = {name: place[1] for name, place in (RECORDS.fields or {}).items()}
OF_ONE = ("norm", "append", "mix")  # kernels that take a microsecond or two: one thread runs them
SLOTS = ("keys", "values", "k_scales", "v_scales")  # of `Append`: the new token is written there
UNROTATED: Rotation = (0, 1, 0, 0, 0)
NOTHING_HELD = Held.of(())


class LayerStep(NamedTuple):
    """A decoder layer, as the kernels take it."""

    before: PreparedChain  # from hidden states to queries, keys and values
    after: PreparedChain  # from hidden states and, in float32, outputs of heads to hidden states
    plan: Plan  # of rotating, appending and attending
    buffers: tuple[Any, Any]  # streams of keys and values
    scale: float  # of the scores
    rotates: bool  # whether queries and keys are rotated
    norms: tuple[Norm, ...]  # of the heads of queries and of keys, before rotation; or none
    pages: KeyPages | None = None  # with room for the new token; None of other buffers


class ModelStep:
    """A decoding step of a model's layers, which any number of calls repeat, one at a time.

    Args:
        layers: the layers, with chains and plans of the same sizes.
        last: the norm of the hidden states after all layers.
        most: tokens that the caches hold before a step, at most.
    """

    def __init__(self, layers: Sequence[LayerStep], last: Norm, most: int) -> None:
        first, self.threads, self.most = layers[0], torch.get_num_threads(), most
        self.shape = first.plan.batch, 1, *first.before.inputs
        held = (held for layer in layers for held in _held(layer))
        self.held = Held.joined((*held, Held.of([last.weight])))
        self.plan, self._lock = first.plan, threading.Lock()
        of_layer, shared = _counters(first, self.threads), _shared(first, self.threads)
        apart = _places(0, of_layer)["end"]
        shared = {"counters": len(layers) * apart + 2 * LINE, **shared}
        self._memory = np.empty(_places(0, shared)["end"] + LINE, np.uint8)
        self._at = _places(-(-self._memory.ctypes.data // LINE) * LINE, shared)
        self._cleared, self._row_bytes = shared["counters"], shared["x"]
        self._records, calls = np.zeros(len(layers), RECORDS), []
        self._slots = _Slots(layers)
        self._pages = [layer.pages for layer in layers]  # tables, alive while records point to them
        for i, layer in enumerate(layers):
            counters = _places(self._at["counters"] + i * apart, of_layer)
            records = _records(layer, self.threads, counters, self._at, self._slots.address(i))
            for name, packed in records.items():
                self._records[name][i] = np.frombuffer(packed, RECORDS[name])[0]
            at = self._records.ctypes.data + i * RECORDS.itemsize
            calls += _calls(layer, at, counters)
        rows, _, width = self.shape
        record = head_norms.record([((self._at["x"], rows, width), last)])
        self._last = np.frombuffer(record, np.uint8)
        code, waits = _norm_address(first.plan), self._at["counters"] + len(layers) * apart
        calls.append(KernelCall(code, self._last.ctypes.data, waits, waits + LINE))
        self._calls = np.array(calls, np.int64)
        self._data = sequencing.PACKED.pack(len(calls), self._calls.ctypes.data, yield_address())
        self._rotates = np.array([layer.rotates for layer in layers], np.int64)
        # a new token's slots in buffers are some bytes after the first one's
        append = self._records["append"]
        self._firsts = [(name, append[name].copy()) for name in SLOTS]
        self._apart = np.array([_bytes_of_tokens(layer) for layer in layers], np.int64).T

    def run(
        self,
        x: Float[Tensor, "B 1 E"],
        angles: Angles | None,
        length: int,
        bias: Float[Tensor, "B S"] | None = None,
    ) -> Float[Tensor, "B 1 E"] | None:
        """The normed hidden states after all layers, whose caches hold `length` tokens. The new
        ones are written to their buffers, and not counted. `bias` is as in `Plan.run`, of all
        layers.

        None, and nothing is written, if a tensor does not lie where it did, or as the kernels read
        it, or another thread runs the step.
        """
        rotation = rotation_of(angles, x.shape[0], self.plan.width, signed=False)
        if rotation is None or length >= self.most or not self.held.is_unchanged():
            return None
        if not self._slots.hold(length) or x.shape != self.shape:
            return None
        if not is_plain(x, self.plan.dtype):
            return None
        assert (bias is not None) == self.plan.tile.biased
        if bias is not None and (
            bias.shape != (x.shape[0], length + 1) or not is_plain(bias, torch.float32)
        ):
            return None
        if torch.get_num_threads() != self.threads or not self._lock.acquire(blocking=False):
            return None
        try:
            self._update(rotation, length, 0 if bias is None else bias.data_ptr())
            ctypes.memset(self._at["counters"], 0, self._cleared)
            ctypes.memmove(self._at["x"], x.data_ptr(), self._row_bytes)
            launch(sequencing.address(), self._data, self.threads)
            out = x.new_empty(self.shape)
            ctypes.memmove(out.data_ptr(), self._at["x"], self._row_bytes)
            return out
        finally:
            self._lock.release()

    def _update(self, rotation: Rotation, length: int, bias: int) -> None:
        """Let the records be of a step after so many tokens, with the bias at this address."""
        self._slots.set(length)
        append, attend = self._records["append"], self._records["attend"]
        rotated, append["sign"], append["cos"], append["sin"], append["angles_batch"] = rotation
        append["key_rotated"] = append["rotated"] = rotated * self._rotates
        for (name, first), apart in zip(self._firsts, self._apart, strict=True):
            append[name] = first + length * apart
        attend["bias"], attend["bias_batch"] = bias, length + 1
        heads = self.plan.batch * self.plan.kv_heads
        ranges, keys = self.plan.tile.ranges(length + 1, heads, self.threads)
        attend["keys"], attend["ranges"], attend["range_keys"] = length + 1, ranges, keys


class _Slots:
    """The tokens in the memory of pages that a step writes, of each layer and row."""

    def __init__(self, layers: Sequence[LayerStep]) -> None:
        found = [slots_of(layer.pages).numpy() for layer in layers if layer.pages is not None]
        self._now = np.array(found, np.int64)  # [layers, B]; empty of buffers
        pages = layers[0].pages
        last, size = (0, 0) if pages is None else (pages.skipped + pages.keys - 1, pages.size)
        self._begin = last - last % size if size else 0  # the slot with which the last page begins
        self._size, self._at_begin = size, self._now - (last - self._begin)

    def address(self, layer: int) -> int:
        """Of a layer's slots; 0 of buffers."""
        return int(self._now[layer].ctypes.data) if self._size else 0

    def hold(self, length: int) -> bool:
        """Whether the slots after so many tokens lie in the last pages."""
        return not self._size or self._begin <= length < self._begin + self._size

    def set(self, length: int) -> None:
        """Let the slots be those after so many tokens."""
        if self._size:
            self._now[:] = self._at_begin + (length - self._begin)


def prepare_model(layers: Sequence[LayerStep], last: Norm, most: int) -> ModelStep | None:
    """The step of these layers and the last norm; None if the sizes of layers differ, or the
    kernels do not read a tensor."""
    first, plan = layers[0], layers[0].plan
    alike = [(_sizes_of(x.before), _sizes_of(x.after), x.plan, len(x.norms)) for x in layers]
    if any(each != alike[0] for each in alike):
        return None
    heads = plan.heads * plan.width, plan.kv_heads * plan.width, plan.kv_heads * plan.value_width
    before, after, merged = first.before, first.after, plan.heads * plan.value_width
    if before.outputs != heads or after.between[0] != merged or before.inputs != after.inputs:
        return None
    if {before.dtype, after.dtype} != {plan.dtype} or plan.batch > MOST_ROWS:
        return None
    norms = [norm.weight for layer in layers for norm in layer.norms]
    if not all(is_plain(x, plan.dtype) and x.shape == (plan.width,) for x in norms):
        return None
    if not is_plain(last.weight, plan.dtype) or last.weight.shape != before.inputs:
        return None
    if any(_places_of_buffers(layer, most - 1) is None for layer in layers):
        return None
    return ModelStep(layers, last, most)


def _sizes_of(products: PreparedChain) -> PreparedChain:
    """A chain without the parameters of a layer."""
    return products._replace(held=NOTHING_HELD, stages=b"")


def _held(layer: LayerStep) -> tuple[Held, ...]:
    """The tensors whose addresses a layer's records contain."""
    buffers = [(x,) if isinstance(x, Tensor) else (x.codes, x.scales) for x in layer.buffers]
    weights = [norm.weight for norm in layer.norms]
    return layer.before.held, layer.after.held, Held.of((*chain.from_iterable(buffers), *weights))


def _places_of_buffers(layer: LayerStep, length: int) -> tuple[Place, ...] | None:
    """The places of keys, values and the scales of both; None if the kernels do not read them."""
    plan, sizes = layer.plan, (layer.plan.batch, layer.plan.kv_heads)
    if layer.pages is not None:
        length, sizes = 0, (1, plan.kv_heads)  # the memory of all pages
    keys, keys_scales = places_of_buffer(
        layer.buffers[0], plan.keys, length, plan.dtype, (*sizes, plan.width)
    )
    values, values_scales = places_of_buffer(
        layer.buffers[1], plan.values, length, plan.dtype, (*sizes, plan.value_width)
    )
    found = keys, values, keys_scales, values_scales
    return None if None in found else cast("tuple[Place, ...]", found)


def _bytes_of_tokens(layer: LayerStep) -> list[int]:
    """Bytes from one token to the next of each of `SLOTS`."""
    plan, places = layer.plan, _places_of_buffers(layer, 0)
    assert places is not None
    if layer.pages is not None:
        return [0] * len(SLOTS)
    items = [1 if codes.bits else plan.dtype.itemsize for codes in (plan.keys, plan.values)]
    return [item * place[3] for item, place in zip((*items, 2, 2), places, strict=True)]


def _places(start: int, sizes: dict[str, int]) -> dict[str, int]:
    """Where parts of these sizes lie, each at the start of a cache line, and the end of all."""
    whole = accumulate((-(-size // LINE) * LINE for size in sizes.values()), initial=start)
    return dict(zip((*sizes, "end"), whole, strict=True))


def _counters(layer: LayerStep, threads: int) -> dict[str, int]:
    """Bytes of the counters of a layer's kernels, and of those that let threads wait for each."""
    return {
        "before": layer.before.counter_bytes(threads),
        "attend": counters_of(layer.plan.batch * layer.plan.kv_heads),
        "after": layer.after.counter_bytes(threads),
        "running": LINE * len(OFFSETS),
        "taken": LINE * len(OF_ONE),  # threads that come to a kernel that the first one runs
    }


def _shared(layer: LayerStep, threads: int) -> dict[str, int]:
    """Bytes of rows and of scratch, which all layers use one after the other."""
    before, after, plan, *_ = layer
    rows, pairs = plan.batch, plan.batch * plan.kv_heads
    of_task, of_thread = bytes_of(plan.tile, plan.heads // plan.kv_heads)
    names, widths = ("x", "q", "k", "v"), (*before.inputs, *before.outputs)
    wide = zip(("merged", "added", "gated"), after.between, strict=True)
    return {
        **{name: plan.dtype.itemsize * rows * n for name, n in zip(names, widths, strict=True)},
        "rotated": plan.query_bytes + plan.spare_bytes,
        "lse": 4 * plan.heads * rows,
        **{name: 4 * rows * width for name, width in wide},
        "parts": pairs * max(1, TASKS_A_THREAD * threads // pairs) * of_task,
        "of_attention": threads * of_thread,
        # each chain has scratch of its own: a thread that comes late to one, and finds no task, may
        # write to it while others run the next one
        "of_before": threads * before.scratch_bytes(rows),
        "of_after": threads * after.scratch_bytes(rows),
    }


def _records(
    layer: LayerStep, threads: int, counters: dict[str, int], at: dict[str, int], slots: int
) -> dict[str, bytes]:
    """The records of a layer's kernels, before the first token; `slots` is as in `Append`."""
    before, after, plan, (keys, _), scale, _, norms, pages = layer
    rows, (h, g, d, dv) = plan.batch, plan[2:6]
    of_heads = ((at["q"], rows * h, d), (at["k"], rows * g, d)) if norms else ()
    buffers = _places_of_buffers(layer, 0)
    assert buffers is not None
    heads = (at["q"], h * d, d, 0), (at["k"], g * d, d, 0), (at["v"], g * dv, dv, 0)
    memory = at["merged"], at["lse"], counters["attend"], at["parts"], at["of_attention"]
    into = [at[name] for name in ("x", "q", "k", "v")]
    back = [at[name] for name in ("x", "x", "merged", "added", "gated")]
    rotated = at["rotated"]
    table = NOWHERE if pages is None else table_of(pages, rows, keys.shape[2])
    return {
        "before": before.record(rows, threads, counters["before"], at["of_before"], into),
        "norm": head_norms.record(zip(of_heads, norms, strict=True)),
        "append": plan.append_record((*heads, *buffers), 0, UNROTATED, rotated, slots),
        "attend": plan.attend_record(buffers, 1, rotated, NOWHERE, memory, (1, 1), scale, table),
        "mix": MIXED.pack(at["merged"], rows * h, dv, plan.values.rotated),
        "after": after.record(rows, threads, counters["after"], at["of_after"], back),
    }


def _calls(layer: LayerStep, records: int, counters: dict[str, int]) -> list[KernelCall]:
    """The kernels of a layer whose records begin there."""
    before, after, plan, *_ = layer
    half, running, taken = plan.dtype is torch.bfloat16, counters["running"], counters["taken"]
    codes = {
        "before": before.address,
        "norm": _norm_address(plan) if layer.norms else 0,
        "append": append_address(half, False, plan.keys, plan.values),
        "attend": plan.address,
        "mix": int(mix_kernel().address) if plan.values.rotated else 0,
        "after": after.address,
    }
    return [
        KernelCall(codes[name], records + offset, running + LINE * i,
              taken + LINE * OF_ONE.index(name) if name in OF_ONE else 0)
        for i, (name, offset) in enumerate(OFFSETS.items()) if codes[name]
    ]  # fmt: skip


def _norm_address(plan: Plan) -> int:
    return int(head_norms.kernel(plan.dtype is torch.bfloat16).address)
