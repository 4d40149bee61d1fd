"""The conversion of every attention layer of a model, calibrated on text, and what each lost.

target -> what all layers share (ranks, frequencies) -> block by block: calibrate, convert, refit
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from regard.convert.exact.expand import spell_out
from regard.convert.lossy.allocating import allot
from regard.convert.lossy.calibrate import Made, Make, Step, moments_of, refitted, walk
from regard.convert.lossy.decouple import WINDOWS, common_counts, components, decouple
from regard.convert.lossy.latentize import as_latent, energies_of, latentize
from regard.convert.lossy.predictions import gradients_of_predictions
from regard.convert.lossy.refining import refine
from regard.convert.lossy.regroup import regroup
from regard.convert.lossy.sensitivity import gradients_of
from regard.convert.recording import recording
from regard.convert.targets import Target, check_fits
from regard.convert.texts import check_tokens
from regard.hf.families.finding import attention_modules
from regard.hf.families.layers import attention_of
from regard.layers.attention import Attention

SHORTEST = 1024  # tokens of calibration: with fewer than channels the covariance is singular
# Shares of keys' and values' channels at which latents are fitted to the predictions. At half they
# lose 0.5 to 3 % less so; at a quarter, where errors are not small, 1 to 2 % more; at 75 %
# Gemma 3 lost 38 %, where the other fit loses a hundredth.
AROUND_HALF = 0.4, 0.55
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
        ValueError: before any work, if a target does not fit, the text is too short or has tokens
            that the model has not, or the model's attention is unknown or has no layer of regard
            that computes the same.
        TypeError: if a target is not made by `target_of`.

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
        if not isinstance(target, Target):
            raise TypeError(f"targets are made by target_of(to, layers), got {target!r}")
        for layer in shipped:
            check_fits(target, layer)
    made = {target: _exact(target, shipped) or Converted(target, [], []) for target in targets}
    lossy = [each for each in made.values() if not each.layers]
    if lossy:
        _check_text(model, tokens)
        text = _Calibration(model, shipped, tokens, progress)
        makes = [_appending(each, list(modules), text.maker(each.target)) for each in lossy]
        walk(model, tokens, makes, progress=partial(progress, "layers"))
    return [made[target] for target in targets]


def _check_text(model: Any, tokens: Any) -> None:
    rule = f"windows [N, L], int64 or int32, of at least {SHORTEST:,} tokens in all"
    if not isinstance(tokens, Tensor) or tokens.dtype not in (torch.int64, torch.int32):
        got = tokens.dtype if isinstance(tokens, Tensor) else type(tokens).__name__
        raise ValueError(f"calibration text is {rule}, got {got}; as windows_of makes them")
    if tokens.ndim != 2 or tokens.numel() < SHORTEST:
        got = f"{tuple(tokens.shape)}; about 10,000 are enough"
        raise ValueError(f"calibration text is {rule}, got {got}")
    check_tokens(tokens, model)


def _exact(target: Target, shipped: Sequence[Attention]) -> Converted | None:
    """The conversion if it is exact, and so needs no text; None otherwise."""
    layers: list[nn.Module]
    if target.kind == "heads" and target.num_kv_heads % shipped[0].num_kv_heads == 0:
        layers = [spell_out(layer, target.num_kv_heads) for layer in shipped]
    elif target.kind == "exact-rope" and all(
        target.rank >= min(layer.hidden_size, 2 * layer.num_kv_heads * layer.head_dim)
        for layer in shipped
    ):
        layers = [as_latent(layer) for layer in shipped]
    else:
        return None
    return Converted(target, layers, [])


@dataclass(eq=False)
class _Calibration:
    """A model, its layers and text, from which layers of every target are made."""

    model: Any
    shipped: Sequence[Attention]
    tokens: Tensor
    progress: Progress
    _of_outputs: tuple[nn.Module, Tensor] | None = None

    def maker(self, target: Target) -> Callable[[Step], nn.Module]:
        """Choose the ranks or frequencies of all layers; return the function that converts one."""
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
            ranks = self._ranks(target)
            return lambda step: (
                latentize(
                    attention_of(step.module), rank=ranks[step.index], **self._fit(step, target)
                ).layer
            )
        rank, rope_dim = target.rank - target.portable, target.rope_dim
        sizes: dict[str, Any] = {"rank": rank, "rope_dim": rope_dim}
        sizes["counts"] = self._counts(rope_dim) if target.portable else None
        return lambda step: (
            decouple(attention_of(step.module), **sizes, **self._fit(step, target)).layer
        )

    def _fit(self, step: Step, target: Target) -> dict[str, Any]:
        """The text that one layer's latent is fitted to, and the gradients by its keys and values:
        those of the predictions where layers are refined around half of the cache, else those of
        its outputs alone, which take less time. They are over the model's own inputs:
        over those behind converted layers they are nearly the same, and so conversions share them.
        """
        given = {"covariance": step.moments.covariance, "inputs": step.x}
        whole = 2 * self.shipped[0].num_kv_heads * self.shipped[0].head_dim
        least, most = (share * whole for share in AROUND_HALF)
        if target.passes and least <= target.rank + target.rope_dim <= most:
            return given | {"gradients": self._of_predictions[step.index]}
        if self._of_outputs is None or self._of_outputs[0] is not step.module:
            found = gradients_of(attention_of(step.module), step.own)
            self._of_outputs = step.module, found
        return given | {"gradients": self._of_outputs[1]}

    @cached_property
    def _of_predictions(self) -> list[Tensor]:
        progress = partial(self.progress, "gradients")
        return gradients_of_predictions(self.model, self.tokens, progress=progress)

    def _ranks(self, target: Target) -> list[int]:
        """A rank for each layer: the same for all, or allotted by how much predictions suffer."""
        if not target.by_layer:
            return [target.rank] * len(self.shipped)
        some = self._some(TRIALS)
        progress = partial(self.progress, "ranks")
        gradients = gradients_of_predictions(self.model, some, progress=progress)
        with recording(list(attention_modules(self.model).values())) as calls:
            self.model.base_model(input_ids=some, use_cache=False)
        costs = [
            energies_of(layer, call.x, each).cpu()
            for layer, (call,), each in zip(self.shipped, calls, gradients, strict=True)
        ]
        return allot(costs, target.rank)

    def _counts(self, rope_dim: int) -> tuple[int, ...]:
        """How many components of each frequency to rotate, equally in all layers."""
        with recording(list(attention_modules(self.model).values())) as calls:
            self.model.base_model(input_ids=self._some(WINDOWS), use_cache=False)
        pairs = zip(self.shipped, (call.x for (call,) in calls), strict=True)
        harms = [components(layer, moments_of(x).covariance, x).harm for layer, x in pairs]
        return common_counts(harms, rope_dim)

    def _some(self, most: int) -> Tensor:
        """Windows from all over the text, or their beginnings."""
        return self.tokens[:: max(1, len(self.tokens) // most)][:most, :TRIAL]


def _appending(to: Converted, names: list[str], make: Callable[[Step], nn.Module]) -> Make:
    """Wrap `make`: each layer it makes is refined, refitted and appended, its error reported."""

    def made(step: Step) -> Made:
        layer = make(step)
        before = layer.get_submodule("o_proj")
        missed, still, inputs = refitted(layer, step.x, step.target)
        if to.target.passes and to.target.refit:
            refine(layer, step.x, step.target, passes=to.target.passes)
            _, still, inputs = refitted(layer, step.x, step.target)
        if not to.target.refit:
            layer.o_proj, still = before, missed
        rank = getattr(layer, "kv_lora_rank", None)
        to.report.append(LayerReport(names[step.index], missed, still, rank))
        to.layers.append(layer)
        return Made(layer, layer.get_submodule("o_proj")(inputs))

    return made
