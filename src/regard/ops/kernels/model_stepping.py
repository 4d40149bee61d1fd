"""A decoding step of all layers of a model in one call of compiled code.

A layer is a chain of products (norm, queries, keys, values), the append of the new tokens, their
attention, and another chain (outputs of the heads, norm, gated MLP). Keys that lie elsewhere, as in
pages of codes, are attended to before that. The records of these kernels are packed once. From one
step to the next only the number of tokens and the angles change in them.
"""

import ctypes
import threading
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from regard.matrices import MOST_ROWS
from regard.ops.kernels import appending, head_norms, tiles
from regard.ops.kernels.chaining import Held, Norm, PreparedChain, is_plain
from regard.ops.kernels.layer_steps import UNROTATED, AttentionStep, LatentsStep
from regard.ops.kernels.paged_stepping import slots_of
from regard.ops.kernels.sequencing import Kernel, KernelSequence, lines
from regard.ops.kernels.stepping import Angles, rotation_of
from regard.ops.kernels.tiles import LINE, KeyPages

SLOTS = ("keys", "values", "k_scales", "v_scales")  # of `Append`: the new token is written there
NOTHING_HELD = Held.of(())


class LayerStep(NamedTuple):
    """A decoder layer, as the kernels take it."""

    before: PreparedChain  # from hidden states to queries, keys and values
    after: PreparedChain  # from hidden states and, in float32, outputs of heads to hidden states
    attention: AttentionStep


class ModelStep:
    """A decoding step of a model's layers, which any number of calls repeat, one at a time.

    Args:
        layers: the layers, with chains and plans of the same sizes.
        last: the norm of the hidden states after all layers.
        most: tokens that the caches hold before a step, at most.
    """

    def __init__(self, layers: Sequence[LayerStep], last: Norm, most: int) -> None:
        first, self.threads, self.most = layers[0], torch.get_num_threads(), most
        self.shape = first.attention.plan.batch, 1, *first.before.inputs
        held = (held for layer in layers for held in _held(layer))
        self.held = Held.joined((*held, Held.of([last.weight])))
        self._lock = threading.Lock()
        self._attentions = [layer.attention for layer in layers]  # records point to their tables
        self.attention, self.plan = first.attention, first.attention.plan
        of_layer, shared = _counters(first, self.threads), _shared(first, self.threads)
        apart = _places(0, of_layer)["end"]
        shared = {"counters": len(layers) * apart, **shared}
        self._memory = lines(_places(0, shared)["end"])
        self._at = _places(self._memory.ctypes.data, shared)
        self._cleared, self._row_bytes = shared["counters"], shared["x"]
        self._slots, self._positions = _Slots(self._attentions), _Positions(self._attentions)
        kernels: list[Kernel] = []
        for i, layer in enumerate(layers):
            at = self._at | _places(self._at["counters"] + i * apart, of_layer)
            own = _kernels(layer, self.threads, at, self._slots.address(i))
            kernels += own.values()
        names, (rows, _, width) = [*own], self.shape
        record = head_norms.record([((self._at["x"], rows, width), last)])
        last_norm = Kernel(head_norms.address(self.plan.dtype), record, True)
        self._sequence = KernelSequence([*kernels, last_norm])
        self._append, self._attend = (
            self._sequence.records(names.index(name), len(names), dtype)
            for name, dtype in (("append", appending.RECORD), ("attend", tiles.RECORD))
        )
        self._rotates = np.array([x.rotations for x in self._attentions], np.int64).T
        # a new token's slots in buffers are some bytes after the first one's
        self._firsts = [(name, self._append[name].copy()) for name in SLOTS]
        self._apart = np.array([each.slots() for each in self._attentions], np.int64).T

    def run(
        self,
        x: Float[Tensor, "B 1 E"],
        angles: Angles | int | None,
        length: int,
        bias: Float[Tensor, "B S"] | None = None,
    ) -> Float[Tensor, "B 1 E"] | None:
        """The normed hidden states after all layers, whose caches hold `length` tokens. The new
        ones are written to their buffers, and not counted. `bias` is as in `Plan.run`, of all
        layers; instead of angles, layers of latents take the position of the token.

        None, and nothing is written, if a tensor does not lie where it did, or as the kernels read
        it, or another thread runs the step.
        """
        rotation: tuple[Any, ...] | None
        if isinstance(angles, int):
            rotation = self._positions.rotation(angles)
        else:
            rotation = rotation_of(angles, x.shape[0], self.plan.width, signed=False)
        if rotation is None or length >= self.most or not self.held.is_unchanged():
            return None
        if not self._slots.hold(length - self.attention.elsewhere) or x.shape != self.shape:
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
            self._positions.set(length, angles)
            ctypes.memset(self._at["counters"], 0, self._cleared)
            ctypes.memmove(self._at["x"], x.data_ptr(), self._row_bytes)
            self._sequence.run(self.threads)
            out = x.new_empty(self.shape)
            ctypes.memmove(out.data_ptr(), self._at["x"], self._row_bytes)
            return out
        finally:
            self._lock.release()

    def _update(self, rotation: tuple[Any, ...], length: int, bias: int) -> None:
        """Let the records be of a step after so many tokens, with the bias at this address."""
        here = length - self.attention.elsewhere
        self._slots.set(here)
        append, attend = self._append, self._attend
        rotated, append["sign"], append["cos"], append["sin"], append["angles_batch"] = rotation
        append["rotated"], append["key_rotated"] = rotated * self._rotates
        for (name, first), apart in zip(self._firsts, self._apart, strict=True):
            append[name] = first + length * apart
        attend["bias"], attend["bias_batch"] = bias, length + 1
        heads = self.plan.batch * self.plan.kv_heads
        ranges, keys = self.plan.tile.ranges(here + 1, heads, self.threads)
        attend["keys"], attend["ranges"], attend["range_keys"] = here + 1, ranges, keys


class _Slots:
    """The tokens in the memory of open pages that a step writes, of each layer and row."""

    def __init__(self, layers: Sequence[AttentionStep]) -> None:
        every = [layer.pages for layer in layers]
        found = [slots_of(pages).numpy() for pages in every if pages is not None]
        self._now = np.array(found, np.int64)  # [layers, B]; empty of buffers
        pages: KeyPages | None = every[0]
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


class _Positions:
    """The positions of tokens in the caches of latents, and the angles that belong to them."""

    def __init__(self, layers: Sequence[AttentionStep]) -> None:
        keys = [layer.keys for layer in layers if isinstance(layer, LatentsStep)]
        self._slots = [each.positions.numpy()[:, 0, :, 0] for each in keys]
        tables = [[each.cos.data_ptr(), each.sin.data_ptr()] for each in keys]
        self._tables: Any = np.array(tables, np.int64).T
        count, self._rotated = (int(x) for x in keys[0].cos.shape) if keys else (0, 0)
        self._most = count if self._rotated else 1 << 31  # positions are int32

    def rotation(self, position: int) -> tuple[Any, ...] | None:
        """The rotation of a token, of all layers; None of one beyond the tables."""
        if not 0 <= position < self._most:
            return None
        if not self._rotated:
            return UNROTATED
        cos, sin = self._tables + 4 * self._rotated * position
        return self._rotated, 1, cos, sin, 0

    def set(self, length: int, position: object) -> None:
        """Write the position of the token after so many."""
        for slots in self._slots:
            slots[:, length] = position


def prepare_model(layers: Sequence[LayerStep], last: Norm, most: int) -> ModelStep | None:
    """The step of these layers and the last norm; None if the sizes of layers differ, or the
    kernels do not read a tensor."""
    first, plan = layers[0], layers[0].attention.plan
    alike = [_sizes_of(layer) for layer in layers]
    if any(each != alike[0] for each in alike):
        return None
    before, after, (heads, merged) = first.before, first.after, first.attention.widths
    if before.outputs != heads or after.between[0] != merged or before.inputs != after.inputs:
        return None
    if {before.dtype, after.dtype} != {plan.dtype} or plan.batch > MOST_ROWS:
        return None
    if not is_plain(last.weight, plan.dtype) or last.weight.shape != before.inputs:
        return None
    if not all(layer.attention.is_readable(most) for layer in layers):
        return None
    return ModelStep(layers, last, most)


def _sizes_of(layer: LayerStep) -> tuple[object, ...]:
    """All that must be equal in two layers of a model."""
    chains = (x._replace(held=NOTHING_HELD, stages=b"") for x in (layer.before, layer.after))
    return *chains, *layer.attention.sizes


def _held(layer: LayerStep) -> tuple[Held, ...]:
    """The tensors whose addresses a layer's records contain."""
    return layer.before.held, layer.after.held, layer.attention.held


def _places(start: int, sizes: dict[str, int]) -> dict[str, int]:
    """Where parts of these sizes lie, each at the start of a cache line, and the end of all."""
    whole = accumulate((-(-size // LINE) * LINE for size in sizes.values()), initial=start)
    return dict(zip((*sizes, "end"), whole, strict=True))


def _counters(layer: LayerStep, threads: int) -> dict[str, int]:
    """Bytes of the counters of a layer's kernels."""
    return {
        "of_before": layer.before.counter_bytes(threads),
        "of_after": layer.after.counter_bytes(threads),
        **layer.attention.counters(threads),
    }


def _shared(layer: LayerStep, threads: int) -> dict[str, int]:
    """Bytes of rows and of scratch, which all layers use one after the other."""
    before, after, attention = layer
    rows, item = attention.plan.batch, attention.plan.dtype.itemsize
    widths = zip(("x", "q", "k", "v"), (*before.inputs, *before.outputs), strict=False)
    wide = zip(("merged", "added", "gated"), after.between, strict=True)
    return {
        **{name: item * rows * width for name, width in widths},
        **{name: 4 * rows * width for name, width in wide},
        **attention.shared(threads),
        # each chain has scratch of its own: a thread that comes late to one, and finds no task, may
        # write to it while others run the next one
        "scratch_before": threads * before.scratch_bytes(rows),
        "scratch_after": threads * after.scratch_bytes(rows),
    }


def _kernels(layer: LayerStep, threads: int, at: dict[str, int], slots: int) -> dict[str, Kernel]:
    """The kernels of a layer in order, with records before the first token; `slots` is as in
    `Append`."""
    before, after, attention = layer
    rows, outputs = attention.plan.batch, ("q", "k", "v")[: len(before.outputs)]
    into = [at[name] for name in ("x", *outputs)]
    back = [at[name] for name in ("x", "x", "merged", "added", "gated")]
    first = before.record(rows, threads, at["of_before"], at["scratch_before"], into)
    last = after.record(rows, threads, at["of_after"], at["scratch_after"], back)
    return {
        "before": Kernel(before.address, first, False),
        **attention.kernels(at, threads, slots),
        "after": Kernel(after.address, last, False),
    }
