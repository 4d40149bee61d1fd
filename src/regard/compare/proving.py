"""The proof of a comparison: with regard's attention, the model's logits are its own."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.convert.measuring import compare_logits, largest
from regard.hf import attention_modules
from regard.hf.generating.predicting import hidden_states

ROUNDINGS = 32  # roundings of the largest logit that each layer may add, since sums are reordered


@dataclass(frozen=True)
class Proof:
    """The largest difference between the logits under regard and the model's own, and the bound.

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


def proved(
    model: Any, difference: float, window: Int[Tensor, " L"], wanted: Sequence[Float[Tensor, "K V"]]
) -> Proof:
    """The proof that a difference between the model's logits and those under regard, the largest of
    all windows, makes. Raises a ValueError if it is more than rounding, naming the reason.

    Then the model's own forward runs again, over the last window: its logits tell whether the
    difference is due to regard. `wanted` are its own logits over the last tokens of each window.
    """
    logit = max(float(largest(each)) for each in wanted)
    tolerance = ROUNDINGS * torch.finfo(model.dtype).eps / 2 * len(attention_modules(model)) * logit
    proof = Proof(difference, tolerance, logit)
    if proof.holds:
        return proof
    if not largest(wanted[-1]).isfinite():
        raise ValueError("the model's own logits are not finite; nothing was compared")
    bound = f"rounding explains {tolerance:.2e} at most; nothing was compared"
    _, again = compare_logits(model, window, hidden_states(model, window[None])[0], wanted[-1])
    if not again <= tolerance:
        raise ValueError(
            f"the model's own logits change from run to run, without regard, by up to {again:.2e}, "
            f"and {bound}: give a model whose forward is deterministic"
        )
    raise ValueError(
        f"under regard the model's logits change by up to {difference:.2e}, and {bound}: please "
        "report this model"
    )
