"""The losses of distillation: of each attention layer's output, and of the predictions."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.convert.measuring import divergence
from regard.convert.recording import first, recording
from regard.hf.generating.predicting import hidden_states


class Distillation(nn.Module):
    """The loss of a student and its teacher on one batch.

    It is a module, so that wrappers for several devices (DDP) run every forward.

    Args:
        student: a transformers causal language model.
        teacher: the model that it was converted from.
        students: the attention modules of the student, in order.
        teachers: those of the teacher, as many.
        layer_weight: weight of the layers' errors, added to the divergence of predictions.
    """

    def __init__(
        self,
        student: nn.Module,
        teacher: nn.Module,
        students: Sequence[nn.Module],
        teachers: Sequence[nn.Module],
        *,
        layer_weight: float,
    ) -> None:
        super().__init__()
        self.student, self.teacher = student, teacher
        # in tuples, so that their parameters are registered in the models alone
        self._students, self._teachers = tuple(students), tuple(teachers)
        self.layer_weight = layer_weight
        self._memoised: dict[torch.Size, list[dict[str, Any]]] = {}

    def forward(
        self, tokens: Int[Tensor, "B L"], chosen: Int[Tensor, " P"] | None
    ) -> Float[Tensor, ""]:
        """The loss of the predictions at the `chosen` positions, and of the layers; if `chosen` is
        None, the loss of each layer on the inputs of the teacher's."""
        return self._align(tokens) if chosen is None else self._imitate(tokens, chosen)

    def _align(self, tokens: Tensor) -> Tensor:
        """The mean error of the student's layers on the inputs of the teacher's."""
        with torch.no_grad(), recording(self._teachers) as calls:
            hidden_states(self.teacher, tokens)
        dtype = next(self.student.parameters()).dtype  # the teacher's may be narrower
        layers = zip(self._students, self._arguments(tokens), calls, strict=True)
        errors = [
            relative_error(first(layer(call.x.to(dtype), **given)), call.out)
            for layer, given, (call,) in layers
        ]
        return torch.stack(errors).mean()

    def _imitate(self, tokens: Tensor, chosen: Tensor) -> Tensor:
        """The divergence of the predictions, and the layers' errors within the whole student."""
        both = bool(self.layer_weight)
        with torch.no_grad(), recording(self._teachers if both else ()) as theirs:
            wanted = hidden_states(self.teacher, tokens)
        with recording(self._students if both else ()) as ours:
            hidden = hidden_states(self.student, tokens)
        loss = divergence(self.student, hidden[:, chosen], self.teacher, wanted[:, chosen])
        if not both:
            return loss
        pairs = zip(ours, theirs, strict=True)
        errors = [relative_error(mine.out, its.out) for (mine,), (its,) in pairs]
        return loss + self.layer_weight * torch.stack(errors).mean()

    @torch.no_grad()
    def _arguments(self, tokens: Tensor) -> list[dict[str, Any]]:
        """The arguments of each attention module besides hidden states: positions and masks, which
        depend only on the shape of the batch and are memoised by it."""
        if tokens.shape not in self._memoised:
            with recording(self._students) as calls:
                hidden_states(self.student, tokens)
            self._memoised[tokens.shape] = [call.given for (call,) in calls]
        return self._memoised[tokens.shape]


def relative_error(
    ours: Float[Tensor, "*shape"], theirs: Float[Tensor, "*shape"]
) -> Float[Tensor, ""]:
    """The energy of the difference, as a share of the energy of `theirs`.

    Examples:
        >>> relative_error(torch.tensor([3.0, 1.0]), torch.tensor([3.0, 0.0])).item()
        0.1111111119389534
    """
    theirs = theirs.float()
    return (ours.float() - theirs).square().sum() / theirs.square().sum()
