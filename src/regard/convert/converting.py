"""The conversion of every attention layer of a model, calibrated on text, and what each lost.

target -> what all layers share (ranks, frequencies) -> block by block: calibrate, convert, refit
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.convert.exact.expand import spell_out
from regard.convert.lossy.allocating import allot, importance
from regard.convert.lossy.calibrate import Made, Make, Step, refitted, walk, watch
from regard.convert.lossy.decouple import common_counts, components, decouple
from regard.convert.lossy.latentize import as_latent, energies_of, latentize
from regard.convert.lossy.regroup import regroup
from regard.convert.lossy.sensitivity import gradients_of
from regard.convert.recording import recording
from regard.convert.targets import Target, check_fits
from regard.hf.families.finding import attention_modules
from regard.hf.families.layers import attention_of
from regard.layers.attention import Attention

SHORTEST = 1024  # tokens of calibration: with fewer than channels the covariance is singular
TRIALS = 4  # windows on which ranks by layer are chosen
TRIAL = 512  # tokens of each
Progress = Callable[[str, int, int], None]  # the present step, steps done, their number


@dataclass(frozen=True)
class LayerReport:
    """The error of one layer's outputs over the calibration text, as a share of their energy.

    Attributes:
        name: the module's name in the model.
        missed: the error before the output projection was refitted; 0.01 is 1 %.
        still_missed: the error after.
        rank: of the latent, if there is one.

    Examples:
        >>> from regard.convert import LayerReport
        >>> report = LayerReport("model.layers.0.self_attn", missed=0.04, still_missed=0.01)
        >>> f"{report.still_missed:.0%} of the energy is missed"
        '1% of the energy is missed'
    """

    name: str
    missed: float
    still_missed: float
    rank: int | None = None


@dataclass(frozen=True, eq=False)
class Converted:
    """A layer for each attention module of a model, for `regard.hf.place`, and what they lost.

    Parameters that a conversion does not change are shared with the model.

    Attributes:
        target: the kind of attention.
        layers: in the order of the model's attention modules.
        report: the errors of each layer; empty if the conversion is exact.

    Examples:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from regard.convert import convert, target_of
        >>> from regard.hf import attention_modules, attention_of
        >>> config = LlamaConfig(hidden_size=16, num_attention_heads=4, num_key_value_heads=2,
        ...     vocab_size=20, num_hidden_layers=1, intermediate_size=16)
        >>> model = LlamaForCausalLM(config)
        >>> shipped = [attention_of(module) for module in attention_modules(model).values()]
        >>> (mha,) = convert(model, [target_of("mha", shipped)], torch.zeros(1, 8).long())
        >>> mha.layers[0].kind, mha.report
        ('MHA', [])
    """

    target: Target
    layers: list[nn.Module]
    report: list[LayerReport]


@torch.no_grad()
def convert(
    model: Any,
    targets: Sequence[Target],
    tokens: Int[Tensor, "N L"],
    *,
    progress: Progress = lambda what, done, total: None,
) -> list[Converted]:
    """Convert the attention of a model to each of `targets`; the model is not changed.

    Args:
        model: a causal language model of a family that `regard.hf` supports, not installed.
        targets: from `target_of`. They share the model's own forward pass over the text.
        tokens: windows of calibration text, as long as the texts that the model will be used for.
            Ten thousand tokens are enough; they should be like those texts.
        progress: called with the present step, the steps done and their number.

    Raises:
        ValueError: before any work, if a target does not fit, the text is too short, or the
            model's attention is unknown or has no layer of regard that computes the same.

    Examples:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from regard.convert import convert, target_of
        >>> from regard.hf import attention_modules, attention_of
        >>> config = LlamaConfig(hidden_size=16, num_attention_heads=4, num_key_value_heads=2,
        ...     vocab_size=20, num_hidden_layers=2, intermediate_size=16)
        >>> model = LlamaForCausalLM(config).eval()
        >>> shipped = [attention_of(module) for module in attention_modules(model).values()]
        >>> (mqa,) = convert(model, [target_of("mqa", shipped)], torch.randint(0, 20, (4, 256)))
        >>> [layer.kind for layer in mqa.layers]
        ['MQA', 'MQA']
    """
    modules = attention_modules(model)
    shipped = [attention_of(module) for module in modules.values()]
    for target in targets:
        for layer in shipped:
            check_fits(target, layer)
    made = {target: _exact(target, shipped) or Converted(target, [], []) for target in targets}
    lossy = [each for each in made.values() if not each.layers]
    if lossy:
        _check_text(tokens)
        gradients = _Gradients()
        makers = [
            _maker(model, each.target, shipped, tokens, gradients, progress) for each in lossy
        ]
        makes = [
            _appending(each, list(modules), make) for each, make in zip(lossy, makers, strict=True)
        ]
        walk(model, tokens, makes, progress=partial(progress, "layers"))
    return [made[target] for target in targets]


def _check_text(tokens: Tensor) -> None:
    if tokens.ndim != 2 or tokens.numel() < SHORTEST:
        raise ValueError(
            f"calibration text is windows [N, L] of at least {SHORTEST:,} tokens in all, got "
            f"{tuple(tokens.shape)}; about 10,000 are enough"
        )


def _exact(target: Target, shipped: Sequence[Attention]) -> Converted | None:
    """The conversion if it is exact, and so needs no text; None otherwise."""
    layers: list[nn.Module]
    if target.kind == "heads" and target.num_kv_heads % shipped[0].num_kv_heads == 0:
        layers = [spell_out(layer, target.num_kv_heads) for layer in shipped]
    elif target.kind == "exact-rope" and all(_is_full(target, layer) for layer in shipped):
        layers = [as_latent(layer) for layer in shipped]
    else:
        return None
    return Converted(target, layers, [])


def _is_full(target: Target, layer: Attention) -> bool:
    return target.rank >= min(layer.hidden_size, 2 * layer.num_kv_heads * layer.head_dim)


def _maker(
    model: Any,
    target: Target,
    shipped: Sequence[Attention],
    tokens: Tensor,
    gradients: "_Gradients",
    progress: Progress,
) -> Callable[[Step], nn.Module]:
    """The function that converts one layer, after choosing what all layers share."""
    if target.kind == "heads":
        return lambda step: (
            regroup(
                attention_of(step.module),
                target.num_kv_heads,
                covariance=step.moments.augmented,
                method=target.method,
            ).layer
        )
    if target.kind == "exact-rope":
        ranks = _ranks(model, target, shipped, tokens, progress)
        return lambda step: (
            latentize(
                attention_of(step.module),
                rank=ranks[step.index],
                covariance=step.moments.covariance,
                inputs=step.x,
                gradients=gradients.of(step),
            ).layer
        )
    counts = _counts(model, target, shipped, tokens) if target.portable else None
    rank = target.rank - target.portable
    return lambda step: (
        decouple(
            attention_of(step.module),
            rank=rank,
            rope_dim=target.rope_dim,
            covariance=step.moments.covariance,
            counts=counts,
            inputs=step.x,
            gradients=gradients.of(step),
        ).layer
    )


class _Gradients:
    """The gradients of one layer at a time, over the model's own inputs: over those behind
    converted layers they are nearly the same, and so all conversions share them."""

    def __init__(self) -> None:
        self._of: tuple[nn.Module, Tensor] | None = None

    def of(self, step: Step) -> Float[Tensor, "T R"]:
        if self._of is None or self._of[0] is not step.module:
            self._of = step.module, gradients_of(attention_of(step.module), step.own)
        return self._of[1]


def _ranks(
    model: Any,
    target: Target,
    shipped: Sequence[Attention],
    tokens: Tensor,
    progress: Progress,
) -> list[int]:
    """A rank for each layer: the same for all, or allotted by how much the predictions suffer."""
    if not target.by_layer:
        return [target.rank] * len(shipped)
    progress("ranks", 0, len(shipped))
    modules = list(attention_modules(model).values())
    some = tokens[:: max(1, len(tokens) // TRIALS)][:TRIALS, :TRIAL]
    weights = importance(model, modules, some)
    with recording(modules) as calls:
        model.base_model(input_ids=some, use_cache=False)
    costs = []
    for index, (layer, (call,)) in enumerate(zip(shipped, calls, strict=True)):
        costs.append(weights[index] * energies_of(layer, call.x).cpu())
        progress("ranks", index + 1, len(shipped))
    return allot(costs, target.rank)


def _counts(
    model: Any, target: Target, shipped: Sequence[Attention], tokens: Tensor
) -> tuple[int, ...]:
    """How many components of each frequency to rotate, equally in all layers."""
    with watch(list(attention_modules(model).values())) as moments:
        for window in tokens:
            model.base_model(input_ids=window[None], use_cache=False)
    pairs = zip(shipped, moments, strict=True)
    return common_counts(
        [components(layer, each.covariance).harm for layer, each in pairs], target.rope_dim
    )


def _appending(to: Converted, names: list[str], make: Callable[[Step], nn.Module]) -> Make:
    """Wrap `make`: each layer it makes is refitted and appended, and its error reported."""

    def made(step: Step) -> Made:
        layer = make(step)
        before = layer.get_submodule("o_proj")
        missed, still, inputs = refitted(layer, step.x, step.target)
        if not to.target.refit:
            layer.o_proj, still = before, missed
        rank = getattr(layer, "kv_lora_rank", None)
        to.report.append(LayerReport(names[step.index], missed, still, rank))
        to.layers.append(layer)
        return Made(layer, layer.get_submodule("o_proj")(inputs))

    return made
