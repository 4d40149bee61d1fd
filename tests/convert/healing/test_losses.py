"""The losses of distillation by their definitions."""

import pytest
import torch

from regard.convert.healing.losses import Distillation, relative_error
from regard.hf import attention_modules
from students import WINDOWS, distance, pair


def test_relative_error_is_a_share_of_the_teachers_energy():
    assert relative_error(torch.zeros(3), torch.tensor([1.0, 2.0, 2.0])) == 1
    assert relative_error(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.0])) == 0


@torch.no_grad()
def test_the_loss_of_the_predictions_is_their_divergence():
    student, teacher = pair()
    students, teachers = (list(attention_modules(model).values()) for model in (student, teacher))
    loss = Distillation(student, teacher, students, teachers, layer_weight=0.0)
    every = torch.arange(WINDOWS.shape[1])
    ours, theirs = (m(WINDOWS).logits.double().log_softmax(-1) for m in (student, teacher))
    wanted = (theirs.exp() * (theirs - ours)).sum(-1).mean()
    assert float(loss(WINDOWS, every)) == pytest.approx(float(wanted), rel=1e-4)
    assert distance(student, teacher) > 0


@torch.no_grad()
def test_layers_alone_are_compared_on_the_inputs_of_the_teachers():
    student, teacher = pair()
    students, teachers = (list(attention_modules(model).values()) for model in (student, teacher))
    alone = Distillation(student, teacher, students, teachers, layer_weight=1.0)(WINDOWS, None)
    assert float(alone) > 0
    same = Distillation(teacher, teacher, teachers, teachers, layer_weight=1.0)
    assert float(same(WINDOWS, None)) < 1e-9
