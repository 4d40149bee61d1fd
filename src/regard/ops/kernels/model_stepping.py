"""A decoding step of all layers of a model in one call of compiled code.

A layer is a chain of products (norm, queries, keys, values), the append of the new tokens, their
attention, and another chain (outputs of the heads, norm, gated MLP). Keys that lie elsewhere, as in
pages of codes, are attended to before that. The records of these kernels are packed once. From one
step to the next only the number of tokens and the angles change in them.
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
from regard.ops.kernels import appending, head_norms, tiles
from regard.ops.kernels.chaining import Held, Norm, PreparedChain, is_plain
from regard.ops.kernels.encoding import MIXED, mix_kernel
from regard.ops.kernels.launching import NOWHERE, Place, bytes_of, counters_of, table_of
from regard.ops.kernels.merging import Reading
from regard.ops.kernels.paged_stepping import slots_of
from regard.ops.kernels.sequencing import Kernel, KernelSequence, lines
from regard.ops.kernels.stepping import (
    Angles,
    Plan,
    Rotation,
    append_address,
    places_of_buffer,
    rotation_of,
)
from regard.ops.kernels.tiles import LINE, TASKS_A_THREAD, KeyPages

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
    others: tuple[Reading, ...] = ()  # keys and values in other pages, before the new token


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
        shared = {"counters": len(layers) * apart, **shared}
        self._memory = lines(_places(0, shared)["end"])
        self._at = _places(self._memory.ctypes.data, shared)
        self._cleared, self._row_bytes = shared["counters"], shared["x"]
        self._slots, self._elsewhere = _Slots(layers), sum(x.keys for x in first.others)
        kernels: list[Kernel] = []
        for i, layer in enumerate(layers):
            at = self._at | _places(self._at["counters"] + i * apart, of_layer)
            own = _kernels(layer, self.threads, at, self._slots.address(i))
            kernels += own.values()
        names, (rows, _, width) = [*own], self.shape
        record = head_norms.record([((self._at["x"], rows, width), last)])
        self._sequence = KernelSequence([*kernels, Kernel(_norm_address(first.plan), record, True)])
        self._append, self._attend = (
            self._sequence.records(names.index(name), len(names), dtype)
            for name, dtype in (("append", appending.RECORD), ("attend", tiles.RECORD))
        )
        # tables are alive while records point to them
        self._tables = [(layer.pages, *(x.source.pages for x in layer.others)) for layer in layers]
        self._rotates = np.array([layer.rotates for layer in layers], np.int64)
        # a new token's slots in buffers are some bytes after the first one's
        self._firsts = [(name, self._append[name].copy()) for name in SLOTS]
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
        if not self._slots.hold(length - self._elsewhere) or x.shape != self.shape:
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
            self._sequence.run(self.threads)
            out = x.new_empty(self.shape)
            ctypes.memmove(out.data_ptr(), self._at["x"], self._row_bytes)
            return out
        finally:
            self._lock.release()

    def _update(self, rotation: Rotation, length: int, bias: int) -> None:
        """Let the records be of a step after so many tokens, with the bias at this address."""
        self._slots.set(length - self._elsewhere)
        append, attend, keys = self._append, self._attend, length + 1 - self._elsewhere
        rotated, append["sign"], append["cos"], append["sin"], append["angles_batch"] = rotation
        append["key_rotated"] = append["rotated"] = rotated * self._rotates
        for (name, first), apart in zip(self._firsts, self._apart, strict=True):
            append[name] = first + length * apart
        attend["bias"], attend["bias_batch"] = bias, length + 1
        heads = self.plan.batch * self.plan.kv_heads
        ranges, of_range = self.plan.tile.ranges(keys, heads, self.threads)
        attend["keys"], attend["ranges"], attend["range_keys"] = keys, ranges, of_range


class _Slots:
    """The tokens in the memory of open pages that a step writes, of each layer and row."""

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
        """Whether the slots after so many tokens in open pages lie in the last one."""
        return not self._size or self._begin <= length < self._begin + self._size

    def set(self, length: int) -> None:
        """Let the slots be those after so many tokens."""
        if self._size:
            self._now[:] = self._at_begin + (length - self._begin)


def prepare_model(layers: Sequence[LayerStep], last: Norm, most: int) -> ModelStep | None:
    """The step of these layers and the last norm; None if the sizes of layers differ, or the
    kernels do not read a tensor."""
    first, plan = layers[0], layers[0].plan
    alike = [_sizes_of(layer) for layer in layers]
    if any(each != alike[0] for each in alike):
        return None
    if any(x.stored.code[0].value_width != plan.value_width for x in first.others):
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


def _sizes_of(layer: LayerStep) -> tuple[Any, ...]:
    """All that must be equal in two layers of a model."""
    chains = (x._replace(held=NOTHING_HELD, stages=b"") for x in (layer.before, layer.after))
    others = [(x.sizes, x.half, x.rotated, x.stored.code) for x in layer.others]
    return *chains, layer.plan, len(layer.norms), others


def _held(layer: LayerStep) -> tuple[Held, ...]:
    """The tensors whose addresses a layer's records contain."""
    streams = [*layer.buffers, *(x for each in layer.others for x in each.source[:2])]
    buffers = [(x,) if isinstance(x, Tensor) else (x.codes, x.scales) for x in streams]
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
    """Bytes of the counters of a layer's kernels."""
    return {
        "of_before": layer.before.counter_bytes(threads),
        "of_attend": counters_of(layer.plan.batch * layer.plan.kv_heads),
        "of_after": layer.after.counter_bytes(threads),
        **{f"counters {i}": each.bytes(threads)["counters"] for i, each in enumerate(layer.others)},
    }


def _shared(layer: LayerStep, threads: int) -> dict[str, int]:
    """Bytes of rows and of scratch, which all layers use one after the other."""
    before, after, plan, *_ = layer
    elsewhere = {
        f"{name} {i}": size
        for i, each in enumerate(layer.others)
        for name, size in each.bytes(threads).items()
        if name != "counters"
    }
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
        "scratch": threads * of_thread,
        **elsewhere,
        # each chain has scratch of its own: a thread that comes late to one, and finds no task, may
        # write to it while others run the next one
        "scratch_before": threads * before.scratch_bytes(rows),
        "scratch_after": threads * after.scratch_bytes(rows),
    }


def _kernels(layer: LayerStep, threads: int, at: dict[str, int], slots: int) -> dict[str, Kernel]:
    """The kernels of a layer in order, with records before the first token; `slots` is as in
    `Append`."""
    before, after, plan, (keys, _), scale, _, norms, pages, others = layer
    rows, (h, g, d, dv), half = plan.batch, plan[2:6], plan.dtype is torch.bfloat16
    buffers, results = _places_of_buffers(layer, 0), (at["merged"], at["lse"])
    assert buffers is not None
    into = [at[name] for name in ("x", "q", "k", "v")]
    products = before.record(rows, threads, at["of_before"], at["scratch_before"], into)
    found = {"before": Kernel(before.address, products, False)}
    if norms:
        of_heads = zip(((at["q"], rows * h, d), (at["k"], rows * g, d)), norms, strict=True)
        found["norms"] = Kernel(_norm_address(plan), head_norms.record(of_heads), True)
    heads = (at["q"], h * d, d, 0), (at["k"], g * d, d, 0), (at["v"], g * dv, dv, 0)
    record = plan.append_record((*heads, *buffers), 0, UNROTATED, at["rotated"], slots)
    code = append_address(half, False, plan.keys, plan.values)
    found["append"] = Kernel(code, record, True)
    memory = *results, at["of_attend"], at["parts"], at["scratch"]
    table = NOWHERE if pages is None else table_of(pages, rows, keys.shape[2])
    last = buffers, 1, at["rotated"], NOWHERE, memory, (1, 1), scale, table
    found["attend"] = Kernel(plan.address, plan.attend_record(*last), False)
    if plan.values.rotated:
        mixed = MIXED.pack(at["merged"], rows * h, dv, plan.values.rotated)
        found["mix"] = Kernel(int(mix_kernel().address), mixed, True)
    for i, each in enumerate(others):
        own = {name.removesuffix(f" {i}"): x for name, x in at.items() if name.endswith(f" {i}")}
        q = at["rotated"], h * d, (h // g) * d, d
        for name, kernel in each.kernels(q, results, own, threads, scale, adds=True).items():
            found[f"{name} {i}"] = kernel
    back = [at[name] for name in ("x", "x", "merged", "added", "gated")]
    products = after.record(rows, threads, at["of_after"], at["scratch_after"], back)
    return found | {"after": Kernel(after.address, products, False)}


def _norm_address(plan: Plan) -> int:
    return int(head_norms.kernel(plan.dtype is torch.bfloat16).address)
