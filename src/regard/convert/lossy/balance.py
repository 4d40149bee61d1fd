"""Channels whose writers and readers weigh alike.

What one matrix writes and another reads may be multiplied by any number, if its readers are divided
by it. Calibration leaves the two as far apart as roots of energies are; training moves every weight
by steps of one size, so that the small ones would be swept away.
"""

import torch
from jaxtyping import Float64, Inexact
from torch import Tensor

MOST = 1e6  # times: a channel that nobody writes, or nobody reads, stays as it is


def gain_of(written: Inexact[Tensor, "R W"], read: Inexact[Tensor, "R V"]) -> Float64[Tensor, " R"]:
    """What to multiply the writers' rows by, and divide the readers' by; a row is a channel.

    >>> gain_of(torch.tensor([[8.0, 8.0]]).double(), torch.tensor([[2.0]]).double())
    tensor([0.5000], dtype=torch.float64)
    """
    sizes = (rows.abs().square().mean(1).sqrt() for rows in (read, written))
    ratio = torch.nan_to_num(torch.div(*sizes), nan=1.0, posinf=MOST * 2)
    gain: Tensor = torch.where((ratio > 1 / MOST) & (ratio < MOST), ratio, 1.0).sqrt()
    return gain
