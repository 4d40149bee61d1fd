"""Few queries packed by key head: pieces of a long key head are merged."""

import pytest
import torch

from regard import attend, prepare


def test_grouped_has_no_gradient_in_half_precision():
    q = torch.randn(1, 2, 1, 4, dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(ValueError, match="no gradient in half precision"):
        attend(q, q, q, backend="grouped")


@pytest.mark.parametrize("keys", [1023, 1024, 1025, 2049])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("joined", [True, False])
def test_one_key_head_is_split_and_merged(keys, dtype, joined):
    """Long enough for pieces, with and without a remainder, against the definition."""
    torch.manual_seed(keys)
    q = torch.randn(1, 6, 1, 24).to(dtype)
    kv = torch.randn(1, 1, keys, 24).to(dtype)
    v = kv[..., :16] if joined else torch.randn(1, 1, keys, 24).to(dtype)
    made = prepare(q, kv, v, backend="grouped")
    from regard import Part

    streams = (kv,) if joined else (kv, v)
    with torch.no_grad():
        got = made.run(q, (Part(0, keys, streams),))
        halves = made.run(
            q,
            tuple(
                Part(a, b, tuple(s[:, :, a:b] for s in streams)) for a, b in ((0, 700), (700, keys))
            ),
        )
    want = attend(q.double(), kv.double(), v.double(), scale=24**-0.5, backend="eager")
    unit = torch.finfo(dtype).eps / 2
    largest = (q.double().abs() @ kv.double().abs().mT).max() * 24**-0.5
    half = dtype.itemsize < 4
    bound = (1.5 if half else 2 * (1 + largest)) * unit * v.double().abs().max()
    assert (got.double() - want).abs().max() <= bound
    assert (halves.double() - want).abs().max() <= bound
