"""Tensors that are written in place after they were read are detected, and refused."""

import copy
import pickle

import pytest
import torch

from regard import (
    Attention,
    Causal,
    Chunked,
    Dense,
    Documents,
    KVCache,
    Padding,
    Prefix,
    RelativeBias,
    SlidingWindow,
    Span,
    StaticCache,
    attend,
)
from regard.versions import Versions

REFUSED = {  # backends whose backward pass reads the input again; others read copies
    ("sdpa", "strict", "q"),
    *(("blocked", "strict", which) for which in "qkv"),
    *(("blocked", "fast", which) for which in "kv"),
}
WINDOW = Causal() & SlidingWindow(64)


def inputs(dtype=torch.float32, length=300):
    generator = torch.Generator().manual_seed(0)
    made = (torch.randn(1, 2, length, 16, dtype=dtype, generator=generator) for _ in range(3))
    return [x.requires_grad_() for x in made]


@pytest.mark.parametrize(
    ("backend", "precision", "dtype"),
    [
        ("sdpa", "strict", torch.float32),
        ("grouped", "strict", torch.float32),
        ("blocked", "strict", torch.float32),
        ("blocked", "fast", torch.bfloat16),
        ("eager", "strict", torch.float32),
    ],
)
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_inputs_changed_before_backward_give_the_right_gradient_or_an_error(
    backend, precision, dtype, which
):
    length = 100 if backend == "grouped" else 300
    leaves = inputs(dtype, length)

    def gradients():
        q, k, v = (1 * x for x in leaves)
        out = attend(q, k, v, mask=WINDOW, backend=backend, precision=precision)
        with torch.no_grad():
            {"q": q, "k": k, "v": v}[which].mul_(0.5)
        return torch.autograd.grad(out.float().square().sum(), leaves)

    unchanged = attend(*leaves, mask=WINDOW, backend=backend, precision=precision)
    expected = torch.autograd.grad(unchanged.float().square().sum(), leaves)
    if (backend, precision, which) in REFUSED:
        with pytest.raises(RuntimeError, match=r"written in place|modified .*inplace"):
            gradients()
        return
    found = gradients()
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("which", ["bias", "sinks", "module"])
def test_biases_and_sinks_changed_before_backward_are_refused(which):
    q, k, v = inputs()
    module = RelativeBias(2)
    learned = {
        "bias": torch.zeros(2, 300, 300, requires_grad=True),
        "sinks": torch.zeros(2, requires_grad=True),
        "module": module,
    }[which]
    options = {"sinks": learned} if which == "sinks" else {"score_bias": learned}
    out = attend(q, k, v, mask=WINDOW, backend="blocked", **options)
    changed = module.relative_attention_bias.weight if which == "module" else learned
    with torch.no_grad():
        changed.add_(1.0)
    with pytest.raises(RuntimeError, match=r"written in place between|modified by an inplace"):
        out.sum().backward()


def test_gradients_of_parameters_of_functional_call():
    torch.manual_seed(0)
    bias = RelativeBias(2, num_buckets=8, max_distance=20)
    layer = Attention(12, 2, mask=Causal() & SlidingWindow(40), score_bias=bias).double()
    others = {name: (3 * p.detach() + 0.5).requires_grad_() for name, p in layer.named_parameters()}
    x, slopes = torch.randn(1, 300, 12).double(), []
    for layer.backend in ("blocked", "eager"):
        out = torch.func.functional_call(layer, others, (x,))
        slopes.append(torch.autograd.grad(out.square().sum(), list(others.values())))
    for found, expected in zip(*slopes, strict=True):
        assert torch.allclose(found, expected, rtol=1e-9, atol=1e-9)


def test_caches_filled_again_before_the_backward_pass():
    """Only queries have gradients; the backward pass reads the cached keys and values again."""
    torch.manual_seed(0)
    layer = Attention(32, 2, mask=WINDOW)
    layer.k_proj.requires_grad_(False)
    layer.v_proj.requires_grad_(False)
    cache = StaticCache(700)
    with pytest.raises(ValueError, match="StaticCache writes in place"):
        layer(torch.randn(1, 600, 32), cache=cache)
    assert cache.length == 0
    growing, first = KVCache(), torch.randn(1, 600, 32)
    out = layer(first, cache=growing)
    growing.truncate(0)
    layer(torch.randn(1, 600, 32), cache=growing)
    out.square().sum().backward()
    found = layer.q_proj.weight.grad.clone()
    layer.zero_grad()
    layer(first).square().sum().backward()
    assert torch.allclose(found, layer.q_proj.weight.grad, rtol=1e-4, atol=1e-5)


MASKS = {
    "Padding": lambda: Padding(torch.tensor([[0, 1, 1, 1, 1]] * 2).bool()),
    "Documents": lambda: Documents(torch.tensor([[0, 0, 1, 1, 1]] * 2)),
    "Dense": lambda: Dense(torch.ones(2, 1, 5, 5, dtype=torch.bool)),
    "Chunked": lambda: Chunked(2, start=torch.tensor([0, 1])),
    "Prefix": lambda: Prefix(torch.tensor([1, 2])),
}
DATA = {"Padding": "valid", "Documents": "ids", "Dense": "keep", "Chunked": "start",
        "Prefix": "lengths"}  # fmt: skip
COPIES = {
    "itself": lambda mask: mask,
    "deepcopy": copy.deepcopy,
    "pickle": lambda mask: pickle.loads(pickle.dumps(mask)),
    "part": lambda mask: Causal() & mask,
    "not": lambda mask: ~mask,
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("backend", ["eager", "sdpa", "blocked"])
def test_a_mask_whose_tensor_was_written_is_refused(name, how, backend):
    q = torch.randn(2, 2, 5, 8)
    mask = COPIES[how](MASKS[name]())
    inner = mask.parts[1] if how == "part" else mask.mask if how == "not" else mask
    attend(q, q, q, mask=mask, backend=backend)
    getattr(inner, DATA[name])[0] = 1 - 1 * getattr(inner, DATA[name])[0].int()
    with pytest.raises(ValueError, match=f"the tensor of {name}.*make a new mask"):
        attend(q, q, q, mask=mask, backend=backend)
    with pytest.raises(ValueError, match="written in place"):
        mask.dense(Span(0, 5, 0, 5), batch=2)


BY_ROW = torch.tensor([[0] * 6 + [1] * 6, [0] * 2 + [1] * 10])
REWRITTEN = {  # a mask of a tensor, the tensor, and what is written to it
    "Documents": (Documents, BY_ROW, BY_ROW.flip(0)),
    "Padding": (Padding, BY_ROW > 0, BY_ROW.flip(0) > 0),
    "Prefix": (Prefix, torch.tensor([3, 8]), torch.tensor([8, 3])),
    "Chunked": (lambda start: Chunked(4, start), torch.tensor([1, 2]), torch.tensor([2, 1])),
    "Dense": (Dense, torch.eye(12).bool(), torch.ones(12, 12).tril(2).bool()),
}
WRITES = {
    "in place": torch.Tensor.copy_,
    "by data": lambda x, new: x.data.copy_(new),
    "other data": lambda x, new: setattr(x, "data", new),
    "by NumPy": lambda x, new: x.numpy().__setitem__(slice(None), new.numpy()),
}


@pytest.mark.parametrize("backend", ["eager", "blocked", "flex"])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("name", REWRITTEN)
def test_masks_of_a_tensor_that_was_written_are_those_of_its_elements(name, write, backend):
    """The mask made before the write, which still exists, and the one made after it."""
    make, data, new = REWRITTEN[name]
    q, tensor = torch.randn(2, 2, 12, 8), data.clone()

    def attended(mask):
        return attend(q, q, q, mask=mask, backend=backend)

    before = make(tensor)
    first = attended(before)
    write(tensor, new.clone())
    again, expected = make(tensor), attended(make(new.clone()))
    assert attended(again).equal(expected)
    assert not first.equal(expected)
    if name != "Dense" and write is not torch.Tensor.copy_:
        assert before != again
        assert attended(before).equal(first)


def test_a_mask_copies_inference_tensors():
    with torch.inference_mode():
        valid = torch.ones(1, 4, dtype=torch.bool)
        mask = Padding(valid)
        valid.zero_()
        assert mask.dense(Span(0, 4, 0, 4)).all()


def test_versions_change_with_their_tensors():
    x = torch.zeros(2)
    read = Versions(x)
    assert not read.changed
    x.add_(1)
    assert read.changed
    assert not copy.deepcopy(read).changed
    assert not Versions().changed
