"""After a conversion, writing and reading weights of each channel have the same size."""

import pytest
import torch

from layers import WIDTH, attention
from regard import Causal, Rotary
from regard.convert import Moments, decouple, latentize, regroup
from regard.convert.lossy.directions import gain_of

DIM, HEADS, GROUPS = 6, 4, 2


def uneven():
    """A layer with large values, and with queries that are large in some channels."""
    torch.manual_seed(3)
    rope = Rotary(DIM, theta=50.0)
    layer = attention(HEADS, num_kv_heads=GROUPS, head_dim=DIM, rope=rope, mask=Causal()).double()
    with torch.no_grad():
        layer.v_proj.weight.mul_(30.0)
        rows = layer.q_proj.weight.unflatten(0, (HEADS, 2, DIM // 2))
        rows.mul_(torch.tensor([1.0, 8.0, 40.0], dtype=torch.float64)[:, None])
    return layer


def moments():
    torch.manual_seed(4)
    found = Moments()
    found.add(torch.randn(90, WIDTH, dtype=torch.float64) * torch.linspace(0.1, 3.0, WIDTH))
    return found


def size(rows):
    """The root of the mean square of each row."""
    return rows.detach().square().mean(1).sqrt()


def paired(rows):
    """The two rows of each rotated pair, side by side."""
    return torch.cat(rows.chunk(2), dim=1)


def readers(weight):
    """The rows of every head's queries, by channel."""
    return weight.unflatten(0, (HEADS, -1)).transpose(0, 1).flatten(1)


def test_in_a_joint_latent():
    layer = latentize(uneven(), rank=7, covariance=moments().covariance).layer
    written, read = layer.kv_a_proj.weight, layer.kv_b_proj.weight.mT
    torch.testing.assert_close(size(written), size(read), rtol=1e-9, atol=0)


def test_in_deepseeks_form():
    made = decouple(uneven(), rank=7, rope_dim=8, covariance=moments().covariance).layer
    latent, shared = made.kv_a_proj_with_mqa.weight.split([7, 8])
    once = made.kv_b_proj.weight.unflatten(0, (HEADS, -1))[
        :: HEADS // GROUPS
    ]  # query heads share copies
    torch.testing.assert_close(size(latent), size(once.flatten(0, 1).mT), rtol=1e-9, atol=0)
    queries = readers(made.q_proj.weight)[DIM:]
    torch.testing.assert_close(size(paired(shared)), size(paired(queries)), rtol=1e-9, atol=0)


def test_in_merged_heads():
    made = regroup(uneven(), 1, covariance=moments().covariance).layer
    keys, queries = paired(made.k_proj.weight), paired(readers(made.q_proj.weight))
    torch.testing.assert_close(size(keys), size(queries), rtol=1e-9, atol=0)
    columns = readers(made.o_proj.weight.mT)
    biased = (WIDTH + 1) / WIDTH  # the rows of values have a column of biases too, here zeros
    written = size(made.v_proj.weight) / biased**0.5
    torch.testing.assert_close(written, size(columns), rtol=1e-9, atol=0)


@pytest.mark.parametrize(("written", "read"), [(0.0, 1.0), (1.0, 0.0), (0.0, 0.0)])
def test_a_channel_of_zeros_is_unchanged(written, read):
    one, other = (torch.full((1, 2), value).double() for value in (written, read))
    assert gain_of(one, other).tolist() == [1.0]
