"""regard's caches in the form that `model.generate(past_key_values=...)` takes."""

import sys
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from regard.cache import Cache, KVCache, PagedCache, Part, QuantizedCache, SlidingCache, StaticCache
from regard.cache.paging.formats import GROUP
from regard.cache.quantized import QuantizedWindow
from regard.cache.stored import Stored
from regard.cache.streams import check_whole
from regard.layers.attending import Attending
from regard.names import FORMATS
from regard.ops.parts import concatenated
from regard.span import Span
from regard.sparse import (
    CondensingCache,
    EvictingCache,
    ExpectedAttention,
    QuantizedEvicting,
    Score,
)
from regard.sparse.evicting import RECENT, SINKS, Evicting

ASSISTED_ROLLBACK = 256  # tokens: more than an assistant model proposes in one step


class LayerState(NamedTuple):
    """A layer before a call: its attributes, and the length and the state of each of its caches."""

    attributes: dict[str, Any]
    caches: list[tuple[int, Any]]


class Layer:
    """One layer of a `GenerationCache`: what is done to it is done to each cache that it stores."""

    @property
    def stored(self) -> tuple[Any, ...]:
        """What the layer stores, as caches that are truncated, saved and described."""
        return ()

    def state(self) -> LayerState:
        """The present state, to which `restore` returns."""
        caches = [
            (each.length, each.snapshot() if hasattr(each, "snapshot") else None)
            for each in self.stored
        ]
        return LayerState(dict(vars(self)), caches)

    def kept(self) -> LayerState:
        """The same, to return to also after tokens were removed: a cache whose snapshot does not
        hold them, as its pages are released, is forked."""
        attributes, caches = self.state()
        cache: Any = attributes.get("cache")
        if cache is None or getattr(type(cache), "snapshot", None) is Stored.snapshot:
            return LayerState(attributes, caches)
        kept = attributes | {"cache": deepcopy(cache)}
        return LayerState(kept, [(cache.length, None), *caches[1:]])

    def restore(self, before: LayerState) -> None:
        """Undo the updates since `state` was called; nothing else may have happened.

        A cache without snapshots is truncated; an error that is being handled gets a note if it
        cannot be.
        """
        error = sys.exception()
        self.__dict__ = dict(before.attributes)
        for cache, (length, snapshot) in zip(self.stored, before.caches, strict=True):
            if snapshot is not None:
                cache.restore(snapshot)
            elif cache.length != length:
                try:
                    cache.truncate(length)
                except ValueError as reason:
                    if error is not None:
                        error.add_note(f"{cache!r} may hold tokens of this call: {reason}")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        for each in self.stored:
            each.reorder(beam_idx)


class CacheLayer(Layer, CacheLayerMixin):  # type: ignore[misc]
    """A cache of regard for one layer, with the methods that transformers calls.

    `append` takes any streams and returns parts, as regard's caches do; `update` takes keys and
    values and returns all of them.
    """

    supports_early_init = False  # shapes are known from the first tokens

    def __init__(self, make: Callable[[], Cache]) -> None:
        CacheLayerMixin.__init__(self)
        self.make, self.cache = make, make()
        self.step: Any = None  # of `regard.hf.running.steps`: the last one, which may repeat
        self.window: int | None = getattr(self.cache, "window", None)
        if isinstance(self.cache, SlidingCache | QuantizedWindow):
            self.window = self.cache.size
        self.is_sliding = self.window is not None
        self.is_compileable = isinstance(self.cache, StaticCache)

    def __getstate__(self) -> dict[str, Any]:
        """A copy has buffers of its own, elsewhere than a step's addresses."""
        return {**vars(self), "step": None}

    @property
    def stored(self) -> tuple[Any, ...]:
        return (self.cache,)

    @property
    def is_croppable(self) -> bool:
        if isinstance(self.cache, Evicting):
            return False
        return not self.is_sliding or getattr(self.cache, "rollback", 0) > 0

    def append(self, *streams: Tensor) -> tuple[Part, ...]:
        """Append the streams of new tokens; returns all parts that may be attended to. Raises a
        ValueError if rows hold different numbers of tokens, which transformers' masks cannot
        express."""
        self._span(streams[0].shape[2])
        self.is_initialized, self.batch_size = True, streams[0].shape[0]
        return self.cache.update(*streams)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if isinstance(self.cache, Attending):
            raise ValueError(
                f"{type(self.cache).__name__} does not return all keys; regard.hf.install(model) "
                "lets layers read it, but for those run by their own forward: use hf.cache(model)"
            )
        keys, values = concatenated(list(self.append(key_states, value_states))).streams
        return keys, values

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do before the first tokens."""

    def get_seq_length(self) -> int:
        return self.cache.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        span = self._span(query_length)
        return span.num_keys, span.kv_start

    def _span(self, new: int) -> Span:
        span = self.cache.span(new)
        if isinstance(span.q_start, Tensor):
            raise ValueError(
                f"rows of this cache hold {span.q_start.tolist()} tokens, and transformers' masks "
                "and positions count one length for all rows: stale tokens would be visible; pad "
                "on the left instead, or truncate to a whole number"
            )
        return span

    def get_max_length(self) -> int:
        if isinstance(self.cache, StaticCache):
            return self.cache.max_length
        return -1 if self.window is None else self.window

    get_max_cache_shape = get_max_length  # its name before transformers 5.20

    def activate_past_recording(self) -> None:
        """Hold enough tokens, from now on, for those that assisted decoding may remove."""
        if self.is_sliding:
            cache: Any = self.cache
            cache.rollback = max(cache.rollback, ASSISTED_ROLLBACK)

    def reset(self) -> None:
        self.cache, self.is_initialized = self.make(), False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.is_initialized:
            super().reorder_cache(beam_idx)
            self.batch_size = len(beam_idx)

    def __repr__(self) -> str:
        return repr(self.cache)


class IndexedLayer(CacheLayer):
    """The cache of a layer of sparse attention, and the keys by which its indexer selects.

    A layer that attends to the keys of another one (Mistral Large 4) has only those of its indexer.
    A ValueError is raised for a cache that drops tokens, or stores them in pages or on several
    ranks.
    """

    def __init__(self, make: Callable[[], Cache], has_keys: bool = True) -> None:
        super().__init__(make)
        self.has_keys, self.index, self.is_compileable = has_keys, KVCache(), False
        if self.is_sliding or isinstance(self.cache, Evicting | PagedCache | Attending):
            raise ValueError(
                "an indexer selects among all tokens, and reads them at once, got a layer with "
                f"{self.cache!r}; use kind='growing', 'static' or codes, such as 'int8'"
            )

    @property
    def stored(self) -> tuple[Any, ...]:
        return (self.cache, self.index) if self.has_keys else (self.index,)

    def update_indexer(self, keys: Tensor) -> Tensor:
        """Append `[B, L, D]` keys of the indexer; returns all."""
        self.is_initialized, self.batch_size = True, len(keys)
        (every,) = concatenated(list(self.index.update(keys.unsqueeze(1)))).streams
        return every.squeeze(1)

    def reset(self) -> None:
        super().reset()
        self.index = KVCache()


def growing() -> Callable[[int | None], Cache]:
    """All tokens, of layers with a window too, in buffers that double."""
    return lambda window: KVCache()


def static(*, max_length: int) -> Callable[[int | None], Cache]:
    """A layer that holds all tokens, in buffers for `max_length` that are allocated once."""
    return lambda window: StaticCache(max_length)


def sliding(*, rollback: int = 0) -> Callable[[int | None], Cache]:
    """The window of layers that have one, and `rollback` more tokens; all tokens of others."""
    check_whole("rollback", rollback, least=0)  # of a model without windows, too
    return _by_window(KVCache, lambda window: SlidingCache(window, rollback))


def quantized(
    *, bits: int | None = None, group: int = GROUP, format: str | None = None, rollback: int = 0
) -> Callable[[int | None], Cache]:
    """As `sliding`, in codes of 8 or 4 bits, or of a format such as "K8V4"."""
    check_whole("rollback", rollback, least=0)
    codes = _codes(bits, group, format)
    windowed = partial(QuantizedWindow, rollback=rollback, **codes)
    return _by_window(partial(QuantizedCache, **codes), windowed)


def evicting(
    *,
    budget: int | float = 0.5,
    score: Score | None = None,
    sinks: int = SINKS,
    recent: int = RECENT,
    bits: int | None = None,
    group: int = GROUP,
    format: str | None = None,
) -> Callable[[int | None], Cache]:
    """A budget of tokens for each key head, of layers without a window; as values, or in codes of
    8 or 4 bits, or of a format such as "K8V4". Other layers hold their window, stored alike."""
    own = budget, score or ExpectedAttention(), sinks, recent
    if bits is None and format is None:
        return _by_window(partial(EvictingCache, *own), SlidingCache)
    codes = _codes(bits, group, format)
    return _by_window(partial(QuantizedEvicting, *own, **codes), partial(QuantizedWindow, **codes))


def condensing(*, format: str | None = None) -> Callable[[int | None], Cache]:
    """All tokens of layers without a window until `regard.hf.condense`; as values, or in codes of a
    format. Other layers hold their window, stored alike."""
    if format is None:
        return _by_window(CondensingCache, SlidingCache)
    whole = partial(CondensingCache, format)
    return _by_window(whole, partial(QuantizedWindow, format=format))


def _codes(bits: int | None, group: int, format: str | None) -> dict[str, Any]:
    """The options of a cache of codes. Raises a ValueError for bits beside those of a format."""
    if bits is not None and format is not None:
        raise ValueError(f"{format=} has bits of its own, got {bits=}; leave one of the two out")
    return {"bits": 8 if bits is None else bits, "group": group, "format": format}


def _by_window(
    whole: Callable[[], Cache], windowed: Callable[[int], Cache]
) -> Callable[[int | None], Cache]:
    return lambda window: whole() if window is None else windowed(window)


def made(make: Callable[[], Cache], /) -> Callable[[int | None], Cache]:
    """The caches of the caller: what `make` returns, for each layer."""

    def checked(window: int | None) -> Cache:
        found: Any = make()
        if isinstance(found, type) or not isinstance(found, Cache):
            raise TypeError(f"kind is a function that makes a cache of regard, got {found!r:.80}")
        return found

    return checked


AUTO, PAGED, EVICTING = "auto", "paged", "evicting"
KINDS: dict[str, Callable[..., Callable[[int | None], Cache]]] = {
    AUTO: sliding,
    "growing": growing,
    "static": static,
    "sliding": sliding,
    "quantized": quantized,
    EVICTING: evicting,
    "condensing": condensing,
}
NAMES: dict[str, tuple[str, dict[str, Any]]] = {  # the name of a cache: its kind, with options
    **{kind: (kind, {}) for kind in (*KINDS, PAGED)},
    "int8": ("quantized", {"bits": 8}),
    "int4": ("quantized", {"bits": 4, "group": 32}),
    **{name: ("quantized", {"format": name}) for name in FORMATS},
}
