"""Decoding steps of an installed module as two calls of compiled code: rotate and append, attend.

The settings that the step before checked still hold in the next one, which needs no description of
its own. The operators that do the same take several times as long as their work in a small model.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.cache import KVCache, PagedCache, QuantizedCache, StaticCache
from regard.cache.quantized import Quantizing, streams_with_room
from regard.hf.families import rotating
from regard.hf.families.table import Family
from regard.hf.running.calls import visible_in, weights_wanted
from regard.masks import (
    EVERYTHING,
    AllOf,
    Causal,
    Dense,
    Everything,
    Mask,
    Padding,
    SlidingWindow,
    Span,
)
from regard.ops.backends import BACKENDS
from regard.ops.backends.common import addend, is_finite
from regard.ops.backends.fused import LEAST_PAGE, reads_pages, source_of
from regard.ops.call import Call
from regard.ops.choose import objection_of, seconds_of
from regard.ops.observed import CALLS, report_backend
from regard.ops.prepared import Prepared
from regard.rates import SPEED
from regard.sparse import CondensingCache, EvictingCache
from regard.sparse.evicting import Evicting
from regard.sparse.quantized import QuantizedEvicting
from regard.tracing import in_backward, is_immediate

FEW = 64  # keys: up to them, and up to twice as many as now, compiled code stays the choice: its
# lead over torch's kernels grows with the number of keys
_SAVED = 14  # operators that `fused` starts in a call of its own, and a step does not
_EVICTING = EvictingCache, QuantizedEvicting  # with a budget for each key head
_WHOLE = KVCache, StaticCache, QuantizedCache  # in whose buffers all heads hold the same tokens
# caches whose keys stay where they are, until some are evicted
_IN_PLACE = *_WHOLE, PagedCache, CondensingCache, *_EVICTING
Projected = tuple[Tensor, Tensor, Tensor]  # queries, keys and values, before rotation


class InstalledStep(NamedTuple):
    """A decoding step that an installed module has run, and the values that the next one shares."""

    settings: tuple[Any, ...]  # of the module
    shape: torch.Size  # of its input
    dtype: torch.dtype  # of queries, keys and values
    # the buffers of the cache. Their addresses, shapes and strides are read at each step, since
    # each buffer may be moved or changed in place before the next one.
    held: tuple[Tensor, ...]
    most: int  # keys up to which the step is the quickest and no key is hidden
    run_one: Callable[..., Tensor | None]  # runs the compiled code for these sizes on a cache
    scale: float  # of the scores
    version: int  # of the rates by which the step was chosen
    biased: bool  # whether it adds -inf to the scores of keys that rows of the batch do not see

    def fits(self, cache: Any, x: Tensor) -> bool:
        """Whether a call with the input `x` and this cache may repeat the step."""
        return self.is_over(cache) and self.takes(x)

    def is_over(self, cache: Any) -> bool:
        """Whether the cache has the buffers of the step, and room, under the same rates."""
        same = cache.buffers is self.held and SPEED.version == self.version
        return same and cache.length < self.most and cache.lengths.rows is None

    def takes(self, x: Tensor) -> bool:
        """Whether `x` is like the input of the step, without gradient, autocast or observer."""
        if x.shape != self.shape or x.dtype is not self.dtype or not is_immediate(x):
            return False
        if torch.is_grad_enabled() or torch._C._is_any_autocast_enabled() or in_backward():
            return False
        return not CALLS

    def run(
        self, family: Family, module: Any, heads: Projected, given: Mapping[str, Any]
    ) -> Tensor | None:
        """The heads' outputs `[B, H, 1, Dv]` for the new token, which is appended to the cache.

        None, and the cache is as before, if compiled code cannot read a tensor: heads with other
        strides or of another dtype, the model's angles, or a buffer that was changed; and if an
        output under padding is not finite, as hidden keys may not be.
        """
        cache = given[family.cache].layers[module.layer_idx].cache
        options = {"angles": _wide_angles(family, module, given), "signed": False}
        if self.biased:
            options["bias"] = _addend_of(family, module, given, cache, len(heads[0]))
            if options["bias"] is None:
                return None
        out = self.run_one(cache, *heads, **options, scale=self.scale)
        if out is None or (self.biased and not is_finite(out)):
            return None
        cache.count(1)
        report_backend(BACKENDS["fused"].run)
        return out


class HeadSteps(NamedTuple):
    """The steps of key heads that hold different tokens, each over buffers of its own."""

    settings: tuple[Any, ...]  # of the module
    steps: tuple[InstalledStep, ...]
    biased: bool = False  # no head adds to the scores

    def fits(self, cache: CondensingCache, x: Tensor) -> bool:
        """Whether a call with the input `x` and this cache may repeat the steps."""
        if cache.is_observed or len(cache.heads) != len(self.steps):
            return False
        return all(step.fits(head, x) for step, head in zip(self.steps, cache.heads, strict=True))

    def run(
        self, family: Family, module: Any, heads: Projected, given: Mapping[str, Any]
    ) -> Tensor | None:
        """As `InstalledStep.run`: the outputs of all query heads, those of a key head together."""
        cache = given[family.cache].layers[module.layer_idx].cache
        angles = _wide_angles(family, module, given)
        options = {"angles": angles, "signed": False, "scale": self.steps[0].scale}
        of_heads = [each.tensor_split(len(self.steps), 1) for each in heads]
        found = []
        for step, *own in zip(self.steps, cache.heads, *of_heads, strict=True):
            out = step.run_one(*own, **options)
            if out is None:  # tokens that other heads have written do not count yet
                return None
            found.append(out)
        cache.count(1)
        report_backend(BACKENDS["fused"].run)
        return torch.cat(found, 1)


def layer_of_step(family: Family, module: Any, x: Tensor, given: Mapping[str, Any]) -> Any:
    """`filled_layer` of a call that rotates halves or nothing; None of other calls."""
    rotated = family.rotate is rotating.halves and isinstance(
        given.get("position_embeddings"), tuple
    )
    if not rotated and family.rotate is not rotating.not_rotated:
        return None
    return filled_layer(family, module, x, given)


def filled_layer(family: Family, module: Any, x: Tensor, given: Mapping[str, Any]) -> Any:
    """The layer of regard's cache that a call fills, if the call is self-attention of one token and
    the keys of the cache stay where they are; else None."""
    if x.shape[1] != 1 or family.returns_bias or given.get(family.context) is not None:
        return None
    if any(family.sharing(module)):
        return None
    cache: Any = given.get(family.cache)
    if not x.is_cpu or not hasattr(cache, "append"):
        return None
    layer = cache.layers[module.layer_idx]
    return layer if type(layer.cache) in _IN_PLACE else None


def repeated_step(
    family: Family, module: Any, x: Tensor, given: Mapping[str, Any]
) -> InstalledStep | HeadSteps | None:
    """The step that this call repeats, with one token more in the cache; None if it is another."""
    if torch.compiler.is_compiling():
        return None
    return step_of(layer_of_step(family, module, x, given), family, module, x, given)


def step_of(layer: Any, family: Family, module: Any, x: Tensor, given: Mapping[str, Any]) -> Any:
    """The step of a layer of the cache, if this call repeats it; else None."""
    found: InstalledStep | HeadSteps | None = None if layer is None else layer.step
    if found is None or found.settings != settings_of(family, module):
        return None
    if weights_wanted(given) or not found.fits(layer.cache, x):
        return None
    mask = _mask_of_token(family, module, given, layer.cache)
    return found if (_is_of_rows(mask) if found.biased else mask is EVERYTHING) else None


def _wide_angles(family: Family, module: Any, given: Mapping[str, Any]) -> Any:
    """The model's angles, in float32; None where nothing is rotated."""
    if family.rotate is not rotating.halves:
        return None
    cos, sin = given["position_embeddings"]
    if cos.dtype is torch.float32:
        return cos, sin
    return rotating.memoised("_wide_angles", module, lambda: (cos.float(), sin.float()), cos, sin)


def _mask_of_token(
    family: Family, module: Any, given: Mapping[str, Any], cache: Any
) -> Mask | None:
    """The simplest mask of a call over the tokens that the cache holds and the new one; None of
    calls whose mask is for another slot, or adds to the scores."""
    mask, held = given.get(family.mask), cache.length
    if mask is None:
        return EVERYTHING
    at = visible_in(family, module, given, 1, mask.shape[-1])
    if at.bias is not None or at.span.q_start != held:
        return None
    return at.mask.within(Span(held, held + 1, 0, held + 1))


def _is_of_rows(mask: Mask | None) -> bool:
    """Whether a mask of one token tells for each row of the batch which keys all heads see."""
    if isinstance(mask, Dense):
        return mask.keep.dim() < 3 or mask.keep.shape[-3] == 1
    return isinstance(mask, Padding)


def _addend_of(
    family: Family, module: Any, given: Mapping[str, Any], cache: Any, batch: int
) -> Tensor | None:
    """The numbers `[B, S]` that a call's mask adds to the scores of its token, the same for all
    heads and for all layers of a pass; None if a row sees no key."""

    def make() -> Tensor | None:
        mask, held = _mask_of_token(family, module, given, cache), cache.length
        assert mask is not None
        span = Span(held, held + 1, 0, held + 1)
        keep = mask.dense(span, batch=batch).expand(batch, 1, 1, held + 1)[:, 0, 0]
        return addend(keep, None, torch.float32).contiguous() if keep.any(-1).all() else None

    return rotating.memoised("_addend_of_regard", module, make, given[family.mask])


def record_step(
    family: Family, module: Any, x: Tensor, given: Mapping[str, Any], prepared: Prepared
) -> None:
    """Record a call that has just been run, if it is a step that the next call may repeat."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return
    layer = layer_of_step(family, module, x, given)
    if layer is None or family.sinks(module) is not None:
        return
    settings = settings_of(family, module)
    if type(layer.cache) is CondensingCache:
        heads = layer.cache.heads
        group = prepared.call.num_heads // len(heads)
        one = prepared.call.but(num_heads=group, num_kv_heads=1)
        steps = [_step_over(prepared._replace(call=one), each, settings, x) for each in heads]
        found = tuple(each for each in steps if each is not None)
        if len(found) == len(heads):
            layer.step = HeadSteps(settings, found)
    elif step := _step_over(prepared, layer.cache, settings, x):
        layer.step = _until_full(step, layer.cache) if type(layer.cache) in _EVICTING else step


def _until_full(step: InstalledStep, cache: Evicting) -> InstalledStep | None:
    """The step of a cache with a budget, up to the token for which others are evicted; None of a
    score that sums the attention of all queries, which a step does not return."""
    if cache.score.sums:
        return None

    def run_one(
        cache: Evicting, q: Tensor, k: Tensor, v: Tensor, *, angles: Any, **options: Any
    ) -> Tensor | None:
        out = step.run_one(cache, q, k, v, angles=angles, **options)
        if out is not None and cache.score.queries:
            cache.remember(q if angles is None else rotating.halves(None, q, angles))
        return out

    most = min(step.most, cache.length + cache.most - cache.rows)
    return step._replace(most=most, run_one=run_one)


def _step_over(
    prepared: Prepared, cache: Any, settings: tuple[Any, ...], x: Tensor
) -> InstalledStep | None:
    """The step of a call over a cache; None if the next call cannot repeat it."""
    biased = type(cache) in _WHOLE and _is_of_rows(prepared.call.mask)
    if not is_repeatable(prepared, cache, biased=biased):
        return None
    if any(each.dtype is not x.dtype for each in cache.empty_streams):
        return None
    paged, held = type(cache) is PagedCache, cache.buffers
    make: Callable[..., Any] = _in_pages if paged else in_buffers
    run_one = make(prepared, cache)
    if run_one is None:
        return None
    room = sys.maxsize if paged else cache.length + held[0].shape[2] - _rows(cache)
    call, most = prepared.call, most_keys(prepared, room)
    same = settings, x.shape, call.dtype, held, most
    return InstalledStep(*same, run_one, call.scale, SPEED.version, biased)


def _rows(cache: Any) -> int:
    """The number of tokens in the buffers of a cache."""
    return cache.rows if isinstance(cache, Evicting) else cache.length


class BufferStep(NamedTuple):
    """The function of a step over buffers, which hold the tokens that a cache counts."""

    plan: Any  # of the kernels
    buffers: tuple[Any, Any]  # of keys and values

    def __call__(self, cache: Any, *heads: Tensor, **options: Any) -> Tensor | None:
        out: Tensor | None = self.plan.run(*heads, *self.buffers, _rows(cache), **options)
        return out


def in_buffers(prepared: Prepared, cache: Any) -> BufferStep | None:
    """The function of a step over buffers; None if their codes are of another kind."""
    from regard.ops.kernels.encoding import codes_of  # imports numba
    from regard.ops.kernels.stepping import Plan

    streams: Any = streams_with_room(cache) if isinstance(cache, Quantizing) else cache.buffers
    codes = codes_of(streams)
    if codes is None:
        return None
    plan: Any = Plan.of(*sizes_of(prepared.call), *codes, biased=_is_of_rows(prepared.call.mask))
    return BufferStep(plan, streams)


class PagedStep(NamedTuple):
    """The function of a step over pages."""

    plan: Any  # of the kernels

    def __call__(
        self, cache: PagedCache, *heads: Tensor, scale: float, **options: Any
    ) -> Tensor | None:
        """Another thread may replace the memory once the token is written: then this step reads
        what was there."""
        with cache.memory.lock:
            if not (sources := sources_of(cache)):
                return None
            appended = self.plan.append(*heads, sources[-1], **options)
        return None if appended is None else self.plan.attend(appended, sources, scale)


def sources_of(cache: PagedCache) -> list[Any]:
    """The pages that a step reads, as the kernel takes them, with room for the new token in those
    of the last source; none if it opens or fills a page, or the kernel does not read its codes."""
    *others, last = cache.pages_of_step() or [()]
    if not last or not all(map(reads_pages, others)):
        return []
    return [source_of(*streams) for streams in (*others, last)]


def _in_pages(prepared: Prepared, cache: PagedCache) -> PagedStep | None:
    """The function of a step over pages; None if the kernel does not read pages of this size."""
    from regard.ops.kernels.paged_stepping import PagedPlan  # imports numba

    if not cache.pages_of_step() or cache.memory.page_size < LEAST_PAGE:
        return None
    return PagedStep(PagedPlan(*sizes_of(prepared.call)))


def sizes_of(call: Call) -> tuple[torch.dtype, int, int, int, int, int]:
    """The dtype and the sizes that a kernel is compiled for."""
    heads, widths = (call.num_heads, call.num_kv_heads), (call.head_dim, call.v_head_dim)
    return call.dtype, call.batch, *heads, *widths


def is_repeatable(prepared: Prepared, cache: Any, *, biased: bool = False) -> bool:
    """Whether a call has seen all that the cache holds, or with `biased` the keys that its mask
    shows to each row, the next one will, too, and compiled code is the quickest for both."""
    call = prepared.call
    if (call.span.kv_start, call.span.kv_stop) != (0, cache.length):
        return False
    rules = {type(part) for part in _parts(call.given_mask)}
    if not biased and call.mask is not EVERYTHING:
        return False
    if not rules <= {Everything, Causal, SlidingWindow, *((Padding, Dense) if biased else ())}:
        return False
    return call.sinks is None and call.score_bias is None and is_quickest(prepared)


def most_keys(prepared: Prepared, room: int) -> int:
    """The number of keys up to which a step like this call is the quickest and sees all of them."""
    call = prepared.call
    windows = (part.size for part in _parts(call.given_mask) if isinstance(part, SlidingWindow))
    return min(max(FEW, 1 << call.num_keys.bit_length()), room, *windows)


def is_quickest(prepared: Prepared) -> bool:
    """Whether compiled code can run the call, and is estimated to be quicker as a step than the
    backend that ran it."""
    call = prepared.call
    if objection_of(call, "fused") is not None:
        return False
    saved = _SAVED * SPEED.call
    return seconds_of(call, BACKENDS["fused"]) - saved <= seconds_of(call, prepared.backend)


def _parts(mask: Mask) -> tuple[Mask, ...]:
    return mask.parts if isinstance(mask, AllOf) else (mask,)


def settings_of(family: Family, module: nn.Module) -> tuple[Any, ...]:
    """The settings of a module that may change between two calls."""
    options = family.scale(module), family.softcap(module), family.window_of(module)
    dropout = family.dropout(module) if module.training else 0.0
    return id(module), *options, dropout, getattr(module, "precision", "strict")
