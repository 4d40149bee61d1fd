"""Decoders of Llama's form: a decoding step of all layers in one call of compiled code.

Between the kernels of two layers, Python and torch take a tenth of a millisecond. A step like the
one before it needs neither: the steps of attention that `steps.py` has recorded for each layer, and
the products of `decoder_layers.py`, run one after the other in one call.
"""

from contextlib import AbstractContextManager, nullcontext
from operator import is_
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from regard.cache import PagedCache
from regard.hf.families import rotating
from regard.hf.families.recognising import known_family
from regard.hf.families.table import Family
from regard.hf.packages import CACHES, cache_in
from regard.hf.running import decoder_layers
from regard.hf.running.binding import bind, function_of
from regard.hf.running.calls import outputs_collected
from regard.hf.running.facts import Facts
from regard.hf.running.latent_steps import LatentStep, attention_of
from regard.hf.running.products import most_rows
from regard.hf.running.steps import (
    BufferStep,
    InstalledStep,
    PagedStep,
    settings_of,
    sources_of,
)
from regard.ops.backends import BACKENDS
from regard.ops.backends.common import addend, is_finite
from regard.ops.observed import report_backend
from regard.tracing import is_immediate

# Classes with the source of these are known, each in its folder of transformers
MODELS = ("llama", "LlamaModel"), ("mistral", "MistralModel"), ("qwen3", "Qwen3Model")
# Arguments of a call that a step takes; others are None
ARGUMENTS = {"input_ids", "attention_mask", "position_ids", "use_cache", *CACHES}


def bind_models(model: nn.Module) -> int:
    """Bind `forward` to the decoders of the known form, and return how many have it."""
    decoders = [each for each in model.modules() if _is_known(each)]
    for decoder in decoders:
        bind(decoder, forward)
    return len(decoders)


def _is_known(model: Any) -> bool:
    kind: Any = type(model)  # typed: mypy takes no class of modules for hashable
    layers = getattr(model, "layers", None)
    if not isinstance(layers, nn.ModuleList) or not len(layers):
        return False
    if any(function_of(each, "forward") is not decoder_layers.forward for each in layers):
        return False
    own = "forward" not in vars(model) or function_of(model, "forward") is forward
    return own and any(decoder_layers.is_like(kind, each) for each in MODELS)


def forward(self: Any, *args: Any, **given: Any) -> Any:
    """The forward of the decoder's class; of one token on a CPU, without gradients, quicker."""
    states = None if args else _states(self, given)
    if states is None:
        return type(self).forward(self, *args, **given)
    from transformers.modeling_outputs import BaseModelOutputWithPast

    cache = cache_in(given)
    return BaseModelOutputWithPast(last_hidden_state=states, past_key_values=cache)


def _states(model: Any, given: dict[str, Any]) -> Tensor | None:
    """The normed hidden states after all layers, in a step that is like the one before it; None,
    and the cache is as before, in other calls."""
    tokens, cache = given.get("input_ids"), cache_in(given)
    if not isinstance(tokens, Tensor) or not is_immediate(tokens) or tokens.shape[-1:] != (1,):
        return None
    if not hasattr(cache, "append") or not _wants_states_alone(model, given):
        return None
    mask, shape = given.get("attention_mask"), (*tokens.shape[:-1], cache.get_seq_length() + 1)
    if not _is_of_rows(mask, shape):
        return None
    bias = None if mask is None or mask.all() else addend(mask.bool(), None, torch.float32)
    with _lock_of_pages(cache):
        if not _has_steps(cache, biased=bias is not None):
            return None
        return _run(model, cache, tokens, given.get("position_ids"), bias)


def _run(
    model: Any, cache: Any, tokens: Tensor, positions: Tensor | None, bias: Tensor | None
) -> Tensor | None:
    """The states of a step that repeats those of all layers; None of another one."""
    length, step = cache.get_seq_length(), _step(model, cache)
    if step.kernels is None or not all(layer.is_current(length) for layer in step.layers):
        return None
    x = model.embed_tokens(tokens)
    angles = _angles(model, x, positions, length, joint=step.is_joint)
    if angles is None or not step.layers[0].step.takes(x):  # as all do: kernels are of equal sizes
        return None
    out = step.kernels.run(x, angles, length, bias)
    if out is None:
        del _steps[model][cache]  # a tensor was moved: the next call has another step
        return None
    if bias is not None and not is_finite(out):  # hidden keys may be infinite, or NaN
        return None
    for layer in step.layers:
        layer.held.cache.count(1)
        report_backend(BACKENDS["fused"].run)
    return cast(Tensor, out)


def _angles(model: Any, x: Tensor, positions: Any, length: int, *, joint: bool) -> Any:
    """The model's angles, in float32; of joint latents, the position of the token in all rows, and
    None if there are several, or it is no integer."""
    if joint and positions is not None:
        first, *others = set(positions.flatten().tolist())
        return first if isinstance(first, int) and not others else None
    if joint:
        return length
    if positions is None:
        positions = torch.arange(length, length + 1, device=x.device).unsqueeze(0)
    return tuple(each.float() for each in model.rotary_emb(x, position_ids=positions))


def _wants_states_alone(model: Any, given: dict[str, Any]) -> bool:
    """Whether a call wants hidden states and a filled cache, and nothing else."""
    if model.training or _has_any_global_hook() or outputs_collected(model.config):
        return False
    if any(value is not None for name, value in given.items() if name not in ARGUMENTS):
        return False
    use_cache = given.get("use_cache")
    return bool(model.config.use_cache if use_cache is None else use_cache)


def _is_of_rows(mask: Any, shape: tuple[int, ...]) -> bool:
    """Whether a model's mask, if there is one, tells for each row which keys it sees, and each row
    sees one."""
    if mask is None:
        return True
    plain = isinstance(mask, Tensor) and is_immediate(mask) and mask.is_cpu
    return plain and mask.shape == shape and bool(mask.any(-1).all())


def _lock_of_pages(cache: Any) -> AbstractContextManager[Any]:
    """The lock of the pool in whose pages a cache lies: no other thread moves them meanwhile."""
    first = getattr(cache.layers[0], "cache", None)
    return first.memory.lock if isinstance(first, PagedCache) else nullcontext()


def _has_steps(cache: Any, *, biased: bool) -> bool:
    """Whether all layers of a cache have recorded steps over buffers under masks of that kind, or
    over pages of one memory, with room for the token in an open page."""
    steps: list[Any] = [getattr(layer, "step", None) for layer in cache.layers]
    if not all(type(each) is InstalledStep and each.biased is biased for each in steps):
        return False
    kinds = {type(each.run_one) for each in steps}
    if kinds == {PagedStep}:
        pages = [layer.cache.memory for layer in cache.layers]
        return all(each is pages[0] for each in pages) and bool(_pages(cache.layers[0].cache))
    return kinds in ({BufferStep}, {LatentStep})


# ---- the step of a model over a cache ----


class StepOfLayer(NamedTuple):
    """The attention of a layer, its place in the cache, and the step that it has recorded there."""

    family: Family
    attention: Any
    held: Any
    step: InstalledStep
    pages: tuple[Any, ...]  # where the pages that the step reads lie; none of buffers

    def is_current(self, length: int) -> bool:
        """Whether the step is of the module's present settings, and the cache holds so many tokens,
        as those of the other layers do, in the buffers of the step."""
        same = self.step.settings == settings_of(self.family, self.attention)
        return same and self.held.cache.length == length and self.step.is_over(self.held.cache)


class DecoderStep(NamedTuple):
    """A step of all layers, and the values that the next one shares."""

    facts: Facts
    layers: tuple[StepOfLayer, ...]
    kernels: Any  # a `ModelStep`; None of layers that the kernels do not run together

    @property
    def is_joint(self) -> bool:
        """Whether it is over joint latents."""
        return type(self.layers[0].step.run_one) is LatentStep

    def is_of(self, cache: Any) -> bool:
        """Whether the layers of a cache have the steps and pages that this one was made of."""
        at = {id(each) for each in cache.layers}
        if any(x.held.step is not x.step or id(x.held) not in at for x in self.layers):
            return False
        now = ((x.pages, _pages(x.held.cache)) for x in self.layers)
        return all(len(a) == len(b) and all(map(is_, a, b)) for a, b in now)


def _pages(cache: Any) -> tuple[Any, ...]:
    """The segments of pages that a step reads, and the memory of each: the same objects until a
    page is added, or memory is moved. None of buffers."""
    segments = cache.segments_of_step if isinstance(cache, PagedCache) else ()
    memory = (each.slab and each.slab.streams for each in segments)
    return (segments, *memory) if segments else ()


_steps: "WeakKeyDictionary[nn.Module, WeakKeyDictionary[Any, DecoderStep]]" = WeakKeyDictionary()


def _step(model: Any, cache: Any) -> DecoderStep:
    """The step of a model over a cache: the last one, unless a module or a layer's step changed."""
    of_model = _steps.setdefault(model, WeakKeyDictionary())
    step = of_model.get(cache)
    if step is None or not step.facts.hold() or not step.is_of(cache):
        step = of_model[cache] = _new_step(model, cache)
    return step


def _new_step(model: Any, cache: Any) -> DecoderStep:
    from regard.ops.kernels.model_stepping import LayerStep, prepare_model  # imports numba

    layers = model.layers[: model.config.num_hidden_layers]
    plans, steps, own = [*map(decoder_layers.plan_of, layers)], [], []
    for layer, plan in zip(layers, plans, strict=True):
        family, held = known_family(layer.self_attn), cache.layers[layer.self_attn.layer_idx]
        steps.append(StepOfLayer(family, layer.self_attn, held, held.step, _pages(held.cache)))
        attention = _attention(family, layer.self_attn, held)
        if attention is not None and plan.after_wide is not None and _are_few(plan, attention):
            own.append(LayerStep(plan.before, plan.after_wide, attention))
    last = decoder_layers.norm_of(model.norm)
    whole = len(own) == len(layers) and all(map(decoder_layers.is_plain_layer, layers))
    most = min(each.step.most for each in steps)
    facts = Facts.joined((_facts(model, layers), *(plan.facts for plan in plans)))
    return DecoderStep(
        facts, tuple(steps), prepare_model(own, last, most) if whole and last else None
    )


def _are_few(plan: decoder_layers.Plan, attention: Any) -> bool:
    return bool(attention.plan.batch <= most_rows(plan.before.dtype, *plan.before.inputs))


def _attention(family: Family, attention: Any, held: Any) -> Any:
    """The attention of a layer over its part of the cache, as the kernels take it; None of one that
    they do not run between the products."""
    from regard.ops.kernels.layer_steps import HeadsStep  # imports numba

    step = held.step
    if type(step.run_one) is LatentStep:
        return attention_of(attention, step, held.cache.length)
    norms, at = _head_norms(family, attention), _places(held)
    if norms is None or at is None:
        return None
    plan, buffers, *where = at
    return HeadsStep(plan, buffers, step.scale, family.rotate is rotating.halves, norms, *where)


def _places(held: Any) -> tuple[Any, ...] | None:
    """The plan of the attention of a layer in the cache, the streams in which the new token lies,
    the pages of these, and what else it reads; None of a layer without room in an open page."""
    from regard.ops.kernels.merging import Reading  # imports numba

    run_one = held.step.run_one
    if type(run_one) is BufferStep:
        return run_one
    *others, last = sources_of(held.cache) or [None]
    if last is None or not all(isinstance(x, Tensor) for x in last[:2]):
        return None
    plan = run_one.plan.plan_of(last.pages.size)
    sizes = plan.batch, plan.kv_heads, plan.heads // plan.kv_heads, plan.width
    found = tuple(Reading.of(x, sizes, plan.dtype, plan.value_width) for x in others)
    return plan, last[:2], last.pages, found


def _head_norms(family: Family, attention: Any) -> tuple[Any, ...] | None:
    """The norms of an attention's queries and keys, or none of a family without; None of one that
    computes more between the products of its children and its cache, but for rotation."""
    names = family.project.children
    if names is None or family.rotate not in (rotating.halves, rotating.not_rotated):
        return None
    if names.norm is None:
        return ()
    norms = tuple(map(decoder_layers.norm_of, (attention.q_norm, attention.k_norm)))
    return None if None in norms or names.norm != "head" else norms


def _facts(model: Any, layers: Any) -> Facts:
    """Which layers and which last norm a model has, and the forwards and hooks of these."""
    entries = [(model._modules, "layers"), (vars(model.config), "num_hidden_layers")]
    entries += [(model._modules, "norm")]
    entries += [(model.norm._parameters, name) for name in model.norm._parameters]
    entries += [(vars(model.norm), name) for name in ("forward", *decoder_layers.EPS)]
    entries += [(model.layers._modules, name) for name in model.layers._modules]
    entries += [(vars(layer), "forward") for layer in layers]
    entries += [(vars(layer.self_attn), "rope") for layer in layers]  # of placed layers
    hooked = *layers, model.norm
    return Facts.of(entries, [x for y in hooked for x in (y._forward_hooks, y._forward_pre_hooks)])
