"""The products with weights of a run: recorded, replaced, and laid out in their own shapes."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from projecting import by_head, call_of, right
from regard_verify.subject.projections import (
    Attention,
    Place,
    Products,
    Reached,
    bare_norms,
    placed,
)
from regard_verify.subject.subject import SubjectError


class Weights(nn.Module):
    """Weights of every kind for x [2, 3, 5]."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 7)
        self.w, self.t = nn.Parameter(torch.randn(5, 7)), nn.Parameter(torch.randn(7, 5))
        self.flat, self.heads = nn.Parameter(torch.randn(35)), nn.Parameter(torch.randn(3, 5, 2))
        self.bias = nn.Parameter(torch.randn(7))


MODULE = Weights()
USES = {
    "nn.Linear": (lambda m, x: m.linear(x), "linear.weight"),
    "x @ w": (lambda m, x: x @ m.w, "w"),
    "matmul": (lambda m, x: torch.matmul(x, m.w), "w"),
    "x @ w.T": (lambda m, x: x @ m.t.T, "t"),
    "w @ x.T": (lambda m, x: m.t @ x.transpose(1, 2), "t"),
    "a view": (lambda m, x: x @ m.flat.view(5, 7), "flat"),
    "cat": (lambda m, x: F.linear(x, torch.cat([m.t, m.t], 0)), "t"),
    "a chunk": (lambda m, x: x @ m.w.chunk(2, 1)[1], "w"),
    "times 2": (lambda m, x: x @ (m.w * 2), "w"),
    "einsum": (lambda m, x: torch.einsum("ble,hed->bhld", x, m.heads), "heads"),
    "addmm": (lambda m, x: torch.addmm(m.bias, x.flatten(0, 1), m.w), "w"),
    "bmm": (lambda m, x: torch.bmm(x, m.w.expand(2, 5, 7)), "w"),
    "tensordot": (lambda m, x: torch.tensordot(x, m.w, 1), "w"),
}


@pytest.mark.parametrize("name", USES)
def test_products_with_weights_are_recorded(name):
    use, parameter = USES[name]
    x = torch.randn(2, 3, 5)
    with torch.no_grad(), Products() as products:
        out = use(MODULE, x)
    (product,) = products.found
    assert product.key == (id(dict(MODULE.named_parameters())[parameter]), 0)
    assert torch.equal(product.out, out)
    assert product.given.numel() == x.numel()


@pytest.mark.parametrize("name", USES)
def test_products_are_replaced(name):
    use, parameter = USES[name]
    key = (id(dict(MODULE.named_parameters())[parameter]), 0)
    instead = torch.randn(4)
    with torch.no_grad(), Products({key: instead}):
        assert use(MODULE, torch.randn(2, 3, 5)) is instead


def test_products_of_activations_are_none():
    x = torch.randn(2, 3, 5)
    with Products() as products:
        scores = x @ x.mT
        torch.einsum("bij,bjd->bid", scores.softmax(-1), x) + MODULE.bias[:5]
        F.scaled_dot_product_attention(x, x, x)
    assert products.found == []


def test_a_weight_that_is_used_twice_has_two_keys():
    x = torch.randn(2, 3, 5)
    with Products() as products:
        (x @ MODULE.w, 2 * x @ MODULE.w)
    assert [product.key[1] for product in products.found] == [0, 1]
    one, two = products.found
    assert torch.equal(two.given, 2 * one.given)


def test_a_run_with_other_products_is_refused():
    x = torch.randn(2, 3, 5)
    with Products({(id(MODULE.w), 0): x}), pytest.raises(SubjectError, match="other projections"):
        MODULE.linear(x)
    with Products({(id(MODULE.w), 0): x}, rest=True) as products:
        out = MODULE.linear(x @ MODULE.w)
    assert [product.key[0] for product in products.found] == [id(MODULE.linear.weight)]
    assert torch.equal(out, MODULE.linear(x))


def test_the_run_ends_at_the_output_projection():
    x = torch.randn(2, 3, 5)
    with Products({}, stop=(id(MODULE.linear.weight), 0)), pytest.raises(Reached) as reached:
        MODULE.linear(x + 1)
    assert torch.equal(reached.value.given, x + 1)


def test_norms_are_left_out():
    x = torch.randn(2, 3, 5)
    for norm in (nn.LayerNorm(5), nn.RMSNorm(5)):
        with torch.no_grad(), Products({}, bare=True):
            assert torch.equal(norm(x), x)
        with torch.no_grad(), Products({}):
            assert not torch.allclose(norm(x), x)


class OwnNorm(nn.Module):
    def forward(self, x):
        return x / x.norm(dim=-1, keepdim=True)


class PreNorm(nn.Module):
    """A wrapper that is called a norm, and is none."""

    def __init__(self):
        super().__init__()
        self.norm, self.fn = OwnNorm(), nn.Linear(5, 5)

    def forward(self, x):
        return self.fn(self.norm(x))


def test_submodules_that_are_called_norms_are_left_out():
    block, x = nn.Sequential(PreNorm()), torch.randn(2, 3, 5)
    usual = block(x)
    with bare_norms(block):
        assert torch.equal(block(x), block[0].fn(x))
    with bare_norms(block, active=False):
        assert torch.equal(block(x), usual)
    assert torch.equal(block(x), usual)


SIZES = [{"B": 2, "L": 3, "S": 4}, {"B": 3, "L": 5, "S": 7}]
AXES = {
    "channels last": ("B", "L", 5),
    "heads": ("B", 3, "L", 5),
    "heads before rows": (3, "B", "L", 5),
    "tokens first": ("L", "B", 5),
    "transposed": ("B", 5, "L"),
    "in one axis": ("BL", 15),
    "in one axis, by head": (3, "BL", 5),
    "no channels": ("B", "L"),
    "of the other sequence": ("B", 3, "S", 5),
    "of the other, in one axis": ("BS", 15),
}


def size(axes, sizes):
    b, n, s = sizes["B"], sizes["L"], sizes["S"]
    of = {"B": b, "L": n, "S": s, "BL": b * n, "BS": b * s}
    return torch.Size(of[axis] if isinstance(axis, str) else axis for axis in axes)


@pytest.mark.parametrize("name", AXES)
def test_axes_are_found_from_two_runs(name):
    axes = AXES[name]
    found = placed((1, 0), [(size(axes, each), each) for each in SIZES])
    assert found == Place((1, 0), axes)
    assert found.tokens == ("S" if "S" in "".join(map(str, axes)) else "L")
    assert found.channels == max(
        size([a for a in axes if isinstance(a, int)], {**SIZES[0]}).numel(), 1
    )


@pytest.mark.parametrize(
    "shapes",
    [
        [(2, 3, 5), (3, 5)],  # another number of axes
        [(2, 3, 5), (3, 5, 6)],  # channels that change
        [(2, 5), (3, 5)],  # no tokens
        [(2, 3, 3), (3, 5, 5)],  # tokens twice
        [(2, 3, 4), (3, 5, 7)],  # tokens of both sequences
        [(6, 2, 5), (15, 3, 5)],  # rows twice
    ],
)
def test_other_shapes_have_no_place(shapes):
    given = [(torch.Size(shape), each) for shape, each in zip(shapes, SIZES, strict=True)]
    assert placed((1, 0), given) is None


@pytest.mark.parametrize("tokens_first", [False, True])
@pytest.mark.parametrize("name", AXES)
def test_values_are_read_as_they_were_laid_out(name, tokens_first):
    place = Place((1, 0), AXES[name], tokens_first)
    length = SIZES[0][place.tokens]
    values = torch.randn(2, length, place.channels)
    x = place.laid_out(values)
    assert x.shape == size(AXES[name], SIZES[0])
    assert torch.equal(place.read(x, 2, length), values)


def test_each_value_has_its_cell():
    values = torch.randn(2, 3, 20)
    x = Place((1, 0), ("B", 4, "L", 5)).laid_out(values)
    assert all(
        x[b, h, i, d] == values[b, i, 5 * h + d]
        for b in range(2) for h in range(4) for i in range(3) for d in range(5)
    )  # fmt: skip
    rows = Place((1, 0), ("BL", 20)).laid_out(values)
    tokens = Place((1, 0), ("BL", 20), tokens_first=True).laid_out(values)
    assert torch.equal(rows[1 * 3 + 2], values[1, 2])
    assert torch.equal(tokens[2 * 2 + 1], values[1, 2])


def test_another_shape_is_refused():
    with pytest.raises(SubjectError, match=r"shape \[2, 5, 3\], not \[2, 3, 5\]"):
        Place((1, 0), ("B", "L", 5)).read(torch.zeros(2, 5, 3), 2, 3)


class Viewing(nn.Module):
    """It takes a view of what its projections give, which only contiguous outputs allow."""

    def __init__(self, out=True):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(6, 6) for _ in range(3))
        self.out = nn.Linear(6, 6) if out else nn.Identity()

    def forward(self, x):
        q, k, v = (by_head(w(x).view(-1, 6).view(x.shape), 2) for w in (self.q, self.k, self.v))
        return self.out(right(q, k, v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("out", [True, False])
def test_attention_alone_is_called_between_the_projections(out):
    module = Viewing(out)
    sources = tuple(Place((id(w.weight), 0), ("B", "L", 6)) for w in (module.q, module.k, module.v))
    sink = Place((id(module.out.weight), 0), ("B", "L", 6)) if out else None
    attention = Attention(call_of(module, width=6), sources, sink)
    values = torch.randn(2, 3, 18).split(6, -1)
    with torch.no_grad():
        got = attention(values)
    wanted = right(*(by_head(x, 2) for x in values)).transpose(1, 2).flatten(2)
    torch.testing.assert_close(got, wanted)
    assert attention.channels() == [6, 6, 6]


def test_an_output_projection_that_is_not_reached_is_an_error():
    module = Viewing()
    sources = tuple(
        Place((id(w.weight), 0), ("B", "L", 6)) for w in (module.q, module.k, module.v, module.out)
    )
    attention = Attention(call_of(module, width=6), sources, Place((1, 0), ("B", "L", 6)))
    with torch.no_grad(), pytest.raises(SubjectError, match="did not come to"):
        attention([torch.randn(2, 3, 6)] * 4)
