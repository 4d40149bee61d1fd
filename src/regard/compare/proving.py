"""The proof before a comparison: with regard's attention, the model's logits are its own.

The bound is on rounding: 32 roundings of the largest logit for each layer.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

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
def prove(model: Any, window: Int[Tensor, " L"]) -> Proof:
    """Compare logits over a window with and without `regard.hf.install`; the model is not changed.

    The model's own forward runs twice before: if its logits agree with each other to the bound of
    `Proof`, a difference under regard is due to regard. Their bits may differ, since the order of
    sums may change from run to run.

    Args:
        model: a transformers model of a family that `regard.hf` supports.
        window: tokens `[L]`.

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
    first, second = (hidden_states(model, window[None]) for _ in range(2))
    repeated = _difference(model, window, first, second)
    if not math.isfinite(repeated.largest_logit):
        raise ValueError("the model's own logits are not finite; nothing was compared")
    if not repeated.holds:
        raise ValueError(
            "the model's own logits change from run to run, without regard, by up to "
            f"{repeated.largest_difference:.2e}, and rounding explains {repeated.tolerance:.2e} at "
            "most; nothing was compared: give a model whose forward is deterministic"
        )
    install(model)
    try:
        under_regard = hidden_states(model, window[None])
    finally:
        uninstall(model)
    proof = _difference(model, window, second, under_regard)
    if not proof.holds:
        raise ValueError(
            f"under regard the model's logits change by up to {proof.largest_difference:.2e}, and "
            f"rounding explains {proof.tolerance:.2e} at most; nothing was compared: please report "
            "this model"
        )
    return proof


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
