"""The proof before a comparison: with regard's attention, the model's logits are its own.

The bound is on rounding: 32 roundings of the largest logit for each layer.
"""

import math
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.convert.measuring import compare_logits, largest, last_logits
from regard.hf import attention_modules, install, uninstall
from regard.hf.generating.predicting import hidden_states

ROUNDINGS = 32  # roundings of the largest logit that each layer may add, since sums are reordered


@dataclass(frozen=True)
class Proof:
    """The largest difference between logits with and without `regard.hf.install`, and the bound.

    The bound is `32 * u * layers * max |logit|`, u being the unit roundoff of the model's dtype.

    Attributes:
        largest_difference: over the vocabulary and the last tokens, as many as 256 MiB of logits
            hold (`regard.convert.measuring.LOGITS`).
        tolerance: the bound.
        largest_logit: of the model.

    Examples:
        >>> from regard.compare import Proof
        >>> Proof(largest_difference=2e-6, tolerance=1e-4, largest_logit=9.0).holds
        True
    """

    largest_difference: float
    tolerance: float
    largest_logit: float

    @property
    def holds(self) -> bool:
        """Whether regard computes what the model computes, to rounding."""
        return self.largest_difference <= self.tolerance


@torch.no_grad()
def prove(
    model: Any, window: Int[Tensor, " L"], hidden: Float[Tensor, "1 L E"] | None = None
) -> Proof:
    """Compare logits over a window with and without `regard.hf.install`; the model is not changed.

    If they differ by more than the bound, the model's own forward runs again, without regard. If it
    agrees with the first, the difference is due to regard; likewise if installing regard left a
    change in the model. If not, the model's own forward runs a third time: if the last two agree,
    the first was wrong, and the output under regard is compared with them. Regard's output is
    computed once, and the bound is always that of `Proof`. Two forwards of the model agree if they
    differ by no more than that bound: the order of sums may change from run to run, so their bits
    may differ.

    Args:
        model: a transformers model of a family that `regard.hf` supports.
        window: tokens `[L]`.
        hidden: the model's own last hidden states over the window, if they are known.

    Raises:
        ValueError: if they differ by more than rounding, or if the model's own logits change from
            run to run or are not finite.

    Examples:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from regard.compare import prove
        >>> config = LlamaConfig(hidden_size=16, num_attention_heads=2, vocab_size=20,
        ...     num_hidden_layers=1, intermediate_size=16)
        >>> prove(LlamaForCausalLM(config).eval(), torch.arange(12)).holds
        True
    """

    def own() -> Tensor:
        return hidden_states(model, window[None])

    before, first = _fingerprint(model), own() if hidden is None else hidden
    install(model)
    try:
        under_regard = own()
    finally:
        uninstall(model)
    proof = _difference(model, window, first, under_regard)
    if not math.isfinite(proof.largest_logit):
        raise ValueError("the model's own logits are not finite; nothing was compared")
    if not proof.holds and _fingerprint(model) == before:
        second = own()
        if not _difference(model, window, first, second).holds:
            proof = _against_two(model, window, under_regard, second, own())
    if not proof.holds:
        raise ValueError(
            f"under regard the model's logits change by up to {proof.largest_difference:.2e}, and "
            f"rounding explains {proof.tolerance:.2e} at most; nothing was compared: please report "
            "this model"
        )
    return proof


def _fingerprint(model: nn.Module) -> tuple[list[str], list[int]]:
    """A value that changes if a weight is changed or a `forward` replaced."""
    replaced = [name for name, module in model.named_modules() if "forward" in vars(module)]
    tensors = chain(model.parameters(), model.buffers())
    sums = [each.detach().float().sum() for each in tensors if not each.is_meta]
    return replaced, [int(each.view(torch.int32)) for each in sums]  # bits, since nan != nan


def _against_two(
    model: Any,
    window: Tensor,
    under_regard: Float[Tensor, "1 L E"],
    second: Float[Tensor, "1 L E"],
    third: Float[Tensor, "1 L E"],
) -> Proof:
    """Regard's output against two forwards of the model that agree: the greater difference."""
    repeated = _difference(model, window, second, third)
    if not repeated.holds:
        raise ValueError(
            "the model's own logits change from run to run, without regard, by up to "
            f"{repeated.largest_difference:.2e}, and rounding explains {repeated.tolerance:.2e} at "
            "most; nothing was compared: give a model whose forward is deterministic"
        )
    proofs = [_difference(model, window, each, under_regard) for each in (second, third)]
    return max(proofs, key=lambda proof: proof.largest_difference)


def _difference(
    model: Any, window: Tensor, hidden: Float[Tensor, "1 L E"], others: Float[Tensor, "1 L E"]
) -> Proof:
    """The largest difference between the logits of two runs, and the bound by the first run's."""
    wanted = last_logits(model, hidden[0])
    _, difference = compare_logits(model, window, others[0], wanted)
    return bounded(model, difference, float(largest(wanted)))


def bounded(model: Any, difference: float, largest_logit: float) -> Proof:
    """The proof that a difference between the model's logits and those under regard makes."""
    unit = torch.finfo(model.dtype).eps / 2
    tolerance = ROUNDINGS * unit * len(attention_modules(model)) * largest_logit
    return Proof(difference, tolerance, largest_logit)
