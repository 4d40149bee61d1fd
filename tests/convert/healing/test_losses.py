"""The loss of distillation by its definition."""

import pytest
import torch

from regard.convert.healing.losses import Distillation
from students import WINDOWS, distance, pair


@torch.no_grad()
def test_the_loss_of_the_predictions_is_their_divergence():
    student, teacher = pair()
    loss = Distillation(student, teacher)
    every = torch.arange(WINDOWS.shape[1])
    ours, theirs = (m(WINDOWS).logits.double().log_softmax(-1) for m in (student, teacher))
    wanted = (theirs.exp() * (theirs - ours)).sum(-1).mean()
    assert float(loss(WINDOWS, every)) == pytest.approx(float(wanted), rel=1e-4)
    assert distance(student, teacher) > 0
