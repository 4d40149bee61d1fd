"""The order of words: each channel of a query meets its own code, and each value its own sum."""

import pytest
import torch

pytest.importorskip("numba")

from kernel_checks import of_stream, quantized
from regard.ops.kernels.launching import decode
from regard.ops.kernels.vectors import machine_lanes, multiplies_words

pytestmark = pytest.mark.skipif(
    not multiplies_words(machine_lanes()), reason="this processor has no such products"
)


@pytest.mark.parametrize(("bits", "width"), [(8, 64), (4, 128)])
def test_each_channel_of_a_query_meets_its_code(bits, width):
    """The log-sum-exp of a single key is its product with a query of one channel."""
    torch.manual_seed(0)
    q = torch.eye(width).view(1, width, 1, width).bfloat16()
    k = quantized(torch.randn(1, width, 1, width), bits)
    keys, _ = of_stream(k)
    _, lse = decode(q, k, quantized(torch.randn(1, width, 1, 64)), scale=1.0)
    wanted = keys.diagonal(dim1=1, dim2=3)
    torch.testing.assert_close(lse.flatten(), wanted.flatten(), rtol=0, atol=1e-4)


@pytest.mark.parametrize(("bits", "width"), [(8, 64), (4, 128), (8, 96)])
@pytest.mark.parametrize("keys", [1, 2, 33])
def test_each_code_of_a_value_reaches_its_channel(bits, width, keys):
    """Queries of zeros: an output is the mean of the values."""
    torch.manual_seed(0)
    q, k = torch.zeros(1, 2, 3, 64).bfloat16(), quantized(torch.randn(1, 2, keys, 64))
    v = quantized(torch.randn(1, 2, keys, width), bits, 32 if width == 96 else 64)
    values, _ = of_stream(v)
    out, _ = decode(q, k, v, scale=1.0)
    wanted = values.mean(2, keepdim=True).expand_as(out)
    torch.testing.assert_close(out, wanted, rtol=0, atol=1e-4)
