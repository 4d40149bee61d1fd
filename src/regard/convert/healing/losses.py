"""The loss of distillation: the divergence of the student's predictions from the teacher's."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.convert.measuring import divergence
from regard.hf.generating.predicting import hidden_states


class Distillation(nn.Module):
    """The loss of a student and its teacher on one batch.

    It is a module, so that wrappers for several devices (DDP) run every forward.

    Args:
        student: a transformers causal language model.
        teacher: the model that it was converted from.
    """

    def __init__(self, student: nn.Module, teacher: nn.Module) -> None:
        super().__init__()
        self.student, self.teacher = student, teacher

    def forward(self, tokens: Int[Tensor, "B L"], chosen: Int[Tensor, " P"]) -> Float[Tensor, ""]:
        """The mean `KL(teacher || student)` of the predictions at the `chosen` positions, in nats a
        token."""
        with torch.no_grad():
            wanted = hidden_states(self.teacher, tokens)
        hidden = hidden_states(self.student, tokens)
        return divergence(self.student, hidden[:, chosen], self.teacher, wanted[:, chosen])
