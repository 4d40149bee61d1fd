"""`KVCache` copies its buffers rarely, and gradients flow through it."""

import torch

from regard import KVCache


def test_gradients_are_those_of_a_plain_concatenation():
    chunks = [torch.randn(2, 2, n, 3, requires_grad=True) for n in (4, 1, 1, 3)]
    weight, cache, held = torch.randn(2, 2, 9, 3), KVCache(), None
    with torch.no_grad():
        cache.update(torch.randn(2, 2, 5, 3))
    for chunk in chunks:
        held = cache.update(chunk)[0].streams[0][:, :, 5:]
    assert torch.equal(held, torch.cat(chunks, dim=2))
    (held.sin() * weight).sum().backward()
    mine = [chunk.grad.clone() for chunk in chunks]
    wanted = torch.autograd.grad((torch.cat(chunks, dim=2).sin() * weight).sum(), chunks)
    for have, want in zip(mine, wanted, strict=True):
        assert torch.equal(have, want)


def test_gradients_flow_through_ragged_cached_tokens():
    cached = torch.randn(2, 1, 3, 2, requires_grad=True)
    cache = KVCache()
    cache.update(cached)
    cache.truncate(torch.tensor([3, 1]))
    new = torch.randn(2, 1, 1, 2, requires_grad=True)
    cache.update(new)[0].streams[0].sum().backward()
    assert torch.equal(new.grad, torch.ones_like(new))
    assert cached.grad[1, 0, 1].eq(0).all()  # overwritten by the new token


def test_a_growing_cache_copies_rarely():
    cache = KVCache()
    pointers = {cache.update(torch.zeros(1, 1, 1, 1))[0].streams[0].data_ptr() for _ in range(2000)}
    assert len(pointers) <= 5
