"""A cache for every layer of a model: what is done to it is done to all layers or to none."""

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache as TransformersCache

from regard.cache import Part, load_all, save_all, truncate_all
from regard.cache.files import is_naturals
from regard.cache.streams import check_rows, check_whole
from regard.hf.generating.caches import CacheLayer
from regard.hf.generating.states import (
    EmptyLayer,
    ModelCall,
    StateLayer,
    States,
    call_of,
    check_states_go_on,
)
from regard.hf.generating.watching import watch
from regard.hf.packages import cache_in
from regard.words import ranges


class _Across(NamedTuple):
    """The state of cross-attention's cache, where there is one."""

    pair: Any
    is_updated: dict[int, bool]
    layers: list[tuple[Any, dict[str, Any]]]

    @classmethod
    def of(cls, cache: Any) -> "_Across":
        if not hasattr(cache, "cross_attention_cache"):
            return cls(None, {}, [])
        layers = cache.cross_attention_cache.layers
        return cls(cache, dict(cache.is_updated), [(each, dict(vars(each))) for each in layers])

    def restore(self) -> None:
        if self.pair is None:
            return
        self.pair.is_updated = self.is_updated
        self.pair.cross_attention_cache.layers[:] = [layer for layer, _ in self.layers]
        for layer, attributes in self.layers:
            vars(layer).clear()
            vars(layer).update(attributes)


class GenerationCache(TransformersCache):  # type: ignore[misc]
    """A cache for every layer of a model, made by `regard.hf.cache`: what is done to it is done to
    all layers or to none.

    While it exists, the model has two hooks: a call that fails leaves the cache as it was. Layers
    with recurrent or convolutional states hold them as transformers does. Those return to before
    the last call of the model and to where `mark` was called; tokens of the last call that are
    kept are then computed again.
    """

    def __init__(self, layers: list[Any], model: nn.Module | None = None) -> None:
        super().__init__(layers=layers)
        self._last: ModelCall | None = None  # the last call of the model, for layers with states
        self._running: ModelCall | None = None  # the call that is running
        self._model = None if model is None else ref(model)
        self._before: Any = None  # the state before the call that is running
        self._thread = threading.get_ident()  # that runs it
        if model is not None:
            watch(model, self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.model is not None:
            watch(self.model, self)

    @property
    def model(self) -> nn.Module | None:
        """The model it was made for; None if that exists no more."""
        return None if self._model is None else self._model()

    @property
    def _attending(self) -> list[CacheLayer]:
        """The layers with keys and values."""
        return [each for each in self.layers if isinstance(each, CacheLayer)]

    @property
    def _with_states(self) -> list[StateLayer]:
        """The layers with recurrent or convolutional states."""
        return [each for each in self.layers if isinstance(each, StateLayer)]

    @property
    def caches(self) -> list[Any]:
        """The cache of each layer; of one with states, those too."""
        return [each for layer in self.layers for each in layer.stored]

    @property
    def nbytes(self) -> int:
        """Bytes of the tokens held, in all layers."""
        return sum(cache.nbytes for cache in self.caches)

    def describe(self) -> str:
        """The cache of each layer, in a few lines: layers that are alike are described once."""
        groups: dict[str, list[int]] = {}
        for index, layer in enumerate(self.layers):
            for cache in layer.stored:
                groups.setdefault(cache.describe(), []).append(index)
        return "\n".join(f"layers {ranges(each)}: {text}" for text, each in groups.items())

    def __repr__(self) -> str:
        return f"{type(self).__name__}: {self.describe()}"

    @property
    def is_linear(self) -> list[bool]:
        """Which layers have states and no keys, as transformers asks to choose masks."""
        return [isinstance(x, StateLayer) and not isinstance(x, CacheLayer) for x in self.layers]

    @property
    def is_dummy(self) -> list[bool]:
        """Which layers store nothing, as transformers asks to choose masks."""
        return [isinstance(each, EmptyLayer) for each in self.layers]

    # ---- calls of the model ----

    def append(self, layer_idx: int, *streams: Tensor) -> tuple[Part, ...]:
        """Append the streams of new tokens in one layer; returns all parts."""
        parts: tuple[Part, ...] = self.layers[layer_idx].append(*streams)
        return parts

    def begin(self, given: dict[str, Any]) -> dict[str, Any]:
        """A call of the model begins; returns the arguments that its forward gets.

        Raises:
            ValueError: if the call before was interrupted in a way that hooks do not see
                (KeyboardInterrupt): the cache is now as it was before that call. If another thread
                is filling this cache, or the tokens are not those after the ones held: nothing
                changes then.
        """
        if self._is_filled_elsewhere():
            raise ValueError(
                "a call of the model in another thread is filling this cache; give each thread a "
                "cache of its own, over one PagePool if they are paged. If that call was "
                "interrupted, reset() this one"
            )
        if self._settle():
            raise ValueError(
                "the last call of the model was interrupted when some layers had appended its "
                "tokens; the cache is now as it was before that call: call again"
            )
        _check_follows(given, self.get_seq_length())
        if self._with_states:
            check_states_go_on(self._watched(), given, self.get_seq_length())
            self._running = call_of(self._watched(), given, self.get_seq_length())
        layers = [layer.state() for layer in self.layers]
        self._before = layers, _Across.of(cache_in(given))
        self._thread = threading.get_ident()
        return given

    def _is_filled_elsewhere(self) -> bool:
        """Whether a call that is running, or was interrupted, is of another thread that lives."""
        if self._before is None or self._thread == threading.get_ident():
            return False
        return any(each.ident == self._thread for each in threading.enumerate())

    def done(self) -> None:
        """Keep the tokens of the call of the model that has returned."""
        before, self._before = self._before, None
        if before is None or not self._with_states:
            return
        self._last = self._running
        for layer, state in zip(self.layers, before[0], strict=True):
            if isinstance(layer, StateLayer):
                layer.follow(self.get_seq_length(), state)

    def undo(self) -> bool:
        """Return to the state before the call of the model that is running; whether that changes
        anything. Nothing is done if none is running."""
        if self._before is None or self._is_filled_elsewhere():
            return False
        (before, across), self._before = self._before, None
        lengths = [cache.length for cache in self.caches]
        for layer, state in zip(self.layers, before, strict=True):
            layer.restore(state)
        across.restore()
        return lengths != [cache.length for cache in self.caches]

    _settle = undo  # where an operation finds a call that is running, that was interrupted

    # ---- operations on all layers or none ----

    def can_truncate(self, length: int) -> bool:
        """Whether `truncate(length)` would not raise."""
        self._settle()
        if not is_naturals([length]):
            return False
        start = self._start_of(length)
        return all(cache.can_truncate(start) for cache in self.caches)

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens in all layers.

        Raises:
            ValueError: if it is no whole number, as one length is that of all rows, or a layer
                cannot; no layer is then changed, nor if tokens cannot be computed again.
        """
        self._settle()
        start, last = self._start_of(length), self._last
        if start == length or last is None:
            return truncate_all(self.caches, start)
        before = [layer.kept() for layer in self.layers]
        try:
            truncate_all(self.caches, start)
            last.repeat(self._watched(), self, length - start)
        except BaseException:
            for layer, state in zip(self.layers, before, strict=True):
                layer.restore(state)
            self._last, self._before = last, None
            raise

    def _start_of(self, length: int) -> int:
        """The length to return to before the tokens up to `length` are computed again: where all
        states can be had, itself."""
        check_whole("length", length)
        if self._last is None or all(States(x).can_truncate(length) for x in self._with_states):
            return length
        past = self._last.past
        return past if past < length < self.get_seq_length() else length

    def mark(self) -> None:
        """Let `truncate` return to the present length, as long as the cache is not shorter.

        Keys and values need no mark. Of recurrent and convolutional states, a copy is held.
        """
        self._settle()
        for layer in self._with_states:
            layer.mark()

    @contextmanager
    def undone(self) -> Iterator[nn.Module]:
        """Calls of the model inside of the `with` block are undone at its end: the model."""
        self._settle()
        before, last = [layer.state() for layer in self.layers], self._last
        try:
            yield self._watched()
        finally:
            for layer, state in zip(self.layers, before, strict=True):
                layer.restore(state)
            self._last, self._before = last, None

    @contextmanager
    def assisted(self) -> Iterator[None]:
        """Inside of the `with` block, `generate` may decode with an assistant or look up the
        prompt: transformers refuses that for models with states, which its caches cannot cut."""
        model: Any = self._watched()
        before = vars(model).get("_is_stateful")
        model._is_stateful = False
        try:
            yield
        finally:
            if before is None:
                del model._is_stateful

    def crop(self, tokens_to_remove: int | Tensor) -> None:
        """Remove the last tokens of all layers; their number is negative, as transformers has it.

        Raises:
            ValueError: if the number is positive, or a layer cannot; no layer is then changed.
        """
        self._settle()
        if isinstance(tokens_to_remove, Tensor) and tokens_to_remove.numel() != 1:
            raise ValueError(
                "crop takes one number for all rows, as a model of transformers has one length for "
                f"all, got {tokens_to_remove.tolist()}"
            )
        change = int(tokens_to_remove)  # before transformers 5.20 it may be a tensor
        if change > 0:
            raise ValueError(f"crop takes the tokens to remove as a negative number, got {change}")
        self.truncate(max(0, self.get_seq_length() + change))

    def reset(self) -> None:
        """Hold no tokens."""
        self._before = self._last = None
        super().reset()

    def reorder(self, rows: Tensor) -> None:
        """Keep these batch rows, `[N]` integers, in this order, in all layers. Raises a ValueError
        if they are not rows of this cache; no layer is then changed."""
        self._settle()
        self._check_rows(rows)
        self._last = None
        for layer in self.layers:
            layer.reorder_cache(rows)

    reorder_cache = reorder

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row, in all layers."""
        rows = self._batch_size()
        if rows is not None:
            self.reorder(torch.arange(rows).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some rows, in all layers."""
        rows = self._batch_size()
        if rows is not None:
            self.reorder(torch.arange(rows)[indices.cpu()])

    def _check_rows(self, rows: Tensor) -> None:
        held = self._batch_size()
        if held is not None:
            check_rows(rows, [torch.empty(held, 0, device="meta")])

    def _batch_size(self) -> int | None:
        first = self._attending[0]
        return first.batch_size if first.is_initialized else None

    def fork(self) -> "GenerationCache":
        """An independent cache with the same tokens."""
        self._settle()
        return copy.deepcopy(self)

    def save(self, path: str | Path) -> None:
        """Write the tokens of all layers to one file, with the fingerprint of the model's weights.

        Raises:
            OSError: if the disk is full or read-only; a file of that name is as before.
        """
        self._settle()
        save_all(self.caches, path, weights=self._watched())

    def load(self, path: str | Path) -> None:
        """Take the tokens that `save` wrote, into all layers of this empty cache.

        Raises:
            OSError: if the file cannot be read.
            ValueError: if this cache holds tokens, or the file is of other weights, of other kinds
                of caches or damaged; no layer is then changed.
        """
        self._settle()
        model = self._watched()
        load_all(self.caches, path, weights=model, device=next(model.parameters()).device)
        for layer in self._attending:
            (cache, *_), layer.is_initialized = layer.stored, bool(layer.cache.length)
            layer.batch_size = cache.empty_streams[0].shape[0] if layer.is_initialized else 0

    def _watched(self) -> nn.Module:
        model = self.model
        if model is None:
            raise ValueError("the model of this cache exists no more; make one for the other model")
        return model


def _check_follows(given: dict[str, Any], past: int) -> None:
    """Raise if a call does not go on with what is held: generate got a prompt that is no longer
    than that, and cut it somewhere."""
    tokens = given.get("input_ids")
    if not past or not isinstance(tokens, Tensor):
        return
    new, mask = tokens.shape[-1], given.get("attention_mask")
    if mask is None:
        got = _positions_before(given.get("position_ids"), new, past)
    elif isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape[-1] < past + new:
        got = f"a mask of {mask.shape[-1]} tokens for {new} more"
    else:
        return
    if got:
        raise ValueError(
            f"this cache holds {past} tokens, and the call has {got}: a cache goes on with the "
            "text that it holds. For another text make a new cache, or call reset(); to go back in "
            "this one, truncate(n). generate(use_cache=False) takes no cache"
        )


def _positions_before(positions: Any, new: int, past: int) -> str:
    """Describe the positions of several new tokens if they begin before the end of the cache, or if
    they are more or fewer than the tokens; else ""."""
    if not isinstance(positions, Tensor) or positions.dim() != 2 or new == 1:
        return ""
    first, number = int(positions[0, 0]) if positions.numel() else 0, positions.shape[-1]
    if number == new and first >= past:
        return ""
    return f"positions from {first} to {first + number - 1}"
