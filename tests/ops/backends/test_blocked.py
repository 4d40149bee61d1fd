"""Queries in blocks: the definition for any size of block, without computing hidden keys, and
without a tensor as large as queries by keys."""

import itertools

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

import cases
from blocks import BLOCKS, MASKS, tensors
from cases import draw_case
from contract import compare
from covering import covering
from regard import (
    EVERYTHING,
    NOTHING,
    Alibi,
    Causal,
    Chunked,
    Dense,
    Documents,
    Mask,
    Padding,
    Prefix,
    RelativeBias,
    SlidingWindow,
    Span,
    attend,
    attend_partial,
    merge,
    prepare,
)
from regard.ops import blocks as planned
from regard.ops.backends import blocked, tiled
from session import LONG

TILED, FULL = (  # the backend of a prefill in bfloat16, and in float32, if this machine can run it
    "tiled" if tiled._machine_objection(dtype) is None else None
    for dtype in (torch.bfloat16, torch.float32)
)


def features(name: str) -> dict:
    """What else a call may have, in float64, with gradients."""
    bias = torch.randn(1, 4, 23, 23, dtype=torch.float64, requires_grad=True)
    relative = RelativeBias(4, num_buckets=8, max_distance=9).double()
    return {
        "plain": {},
        "softcap": {"softcap": 2.0},
        "sinks": {"sinks": torch.randn(4, dtype=torch.float64, requires_grad=True)},
        "bias": {"score_bias": bias},
        "alibi": {"score_bias": Alibi.for_heads(4)},
        "relative": {"score_bias": relative},
    }[name]


FEATURES = ("plain", "softcap", "sinks", "bias", "alibi", "relative")


def learned(given: dict) -> list[torch.Tensor]:
    """What of a call's options has gradients."""
    found = [x for x in given.values() if isinstance(x, torch.Tensor) and x.requires_grad]
    for rule in given.values():
        found += list(rule.parameters()) if isinstance(rule, torch.nn.Module) else []
    return found


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_random_calls_are_the_definition(blocks, dtype):
    accepted = 0
    for seed in range(40):
        case = draw_case(40_000_000 + seed, dtype)
        if 0 in (case.q.numel(), case.k.numel()):
            continue
        try:
            out = attend(case.q, case.k, case.v, **case.given, backend="blocked")
        except ValueError as error:
            if not cases.is_objection(error, "blocked"):
                raise
            continue
        compare(out, case, what="blocked")
        accepted += 1
    assert accepted > 20


@pytest.mark.parametrize(
    ("blocks", "mask", "feature", "v_dim"),
    covering(BLOCKS, MASKS, FEATURES, [3, 5]),
    indirect=["blocks"],
)
def test_output_and_gradients_are_those_of_the_definition(blocks, mask, feature, v_dim):
    """Every mask with everything else there is; hidden keys may hold anything."""
    if MASKS[mask] is NOTHING:
        pytest.skip("no key is in sight: blocked objects")
    found = []
    for backend in ("blocked", "eager"):
        torch.manual_seed(7)
        inputs = [x.requires_grad_() for x in tensors(v_dim=v_dim)]
        given = features(feature)
        out = attend(*inputs, mask=MASKS[mask], **given, backend=backend)
        out.backward(torch.randn(out.shape, dtype=out.dtype))
        with torch.no_grad():
            again = attend(*inputs, mask=MASKS[mask], **given, backend=backend)
        found.append([out, again, *(x.grad for x in (*inputs, *learned(given)))])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


def visited(mask: Mask, length: int, **options) -> int:
    """Cells that blocks compute for a mask."""
    q = torch.empty(1, 1, length, 8)
    call = prepare(q, q, q, mask=mask, backend="blocked", **options).call
    return sum(block.cells for block in blocked.plan(call))


def test_keys_hidden_from_a_block_are_skipped(monkeypatch):
    monkeypatch.setattr(blocked, "BLOCK", 64)
    monkeypatch.setattr(planned, "GAP", 32)
    monkeypatch.setattr(planned, "DIAGONAL", 64)
    length, wide = 1024, 1024 * 1024
    assert visited(EVERYTHING, length) == wide
    assert visited(Causal(), length) == (wide + 64 * length) // 2
    assert visited(Causal() & SlidingWindow(128), length) <= length * (128 + 64)
    assert visited(Causal() & SlidingWindow(128) | Prefix(16), length) <= length * (128 + 64 + 16)
    assert visited(Chunked(128), length) == length * 128
    ids = torch.arange(length) // 128
    assert visited(Documents(ids), length) == length * 128
    assert visited(Causal() & Documents(ids.flip(0)), length) == length * (128 + 64) // 2
    assert visited(Documents(ids % 4), length) == length * 256
    assert visited(Padding.from_lengths([512], total=length), length) == length * 512
    assert visited(~Causal(), length) == (wide + 64 * length) // 2 - length


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that anything made."""

    cells = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = out if isinstance(out, tuple | list) else [out]
        for x in made:
            if isinstance(x, torch.Tensor):
                self.cells = max(self.cells, x.untyped_storage().nbytes() // x.itemsize)
        return out


LONG_MASKS = {
    "causal": lambda length: Causal(),
    "window": lambda length: Causal() & SlidingWindow(40),
    "chunks": lambda length: Causal() & Chunked(64),
    "prefix": lambda length: Causal() & SlidingWindow(40) | Prefix(10),
    "documents": lambda length: Documents(torch.arange(length) // 50) & Causal(),
    "padding": lambda length: Padding.from_lengths([length - 3]) & Causal(),
}
LONG_FEATURES = {
    "plain": {},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": torch.zeros(2)},
    "bias": {"score_bias": Alibi.for_heads(2)},
    "dropout": {"dropout": 0.5},
    "fast": {"precision": "fast"},
}


def cost(length: int, mask: str, feature: str) -> tuple[int, int]:
    """Elements saved for backward, and those of the largest tensor of forward and backward."""
    dtype = torch.bfloat16 if feature == "fast" else torch.float32
    q, k, v = (x.requires_grad_() for x in tensors(length, 1, 2, 1, 8, 8, dtype))
    kept: dict[int, int] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes() // x.itemsize
        return x

    given = {"mask": LONG_MASKS[mask](length), **LONG_FEATURES[feature]}
    with Largest() as largest:
        with saved_tensors_hooks(keep, lambda x: x):
            out = attend(q, k, v, **given, backend="blocked")
        out.sum().backward()
    return sum(kept.values()), largest.cells


@pytest.mark.parametrize(
    ("mask", "feature"),
    [
        (mask, feature)
        for mask, feature in itertools.product(LONG_MASKS, LONG_FEATURES)
        if LONG or mask == "documents" or feature == "plain"
    ],
)
def test_nothing_grows_with_the_square_of_the_length(monkeypatch, mask, feature):
    monkeypatch.setattr(blocked, "BLOCK", 32)
    kept, largest = cost(256, mask, feature)
    longer_kept, longer_largest = cost(1024, mask, feature)
    assert longer_kept <= 4.4 * kept
    assert longer_largest <= 4.4 * largest
    assert longer_largest < 1024 * 1024 / 8


def call(length=8192, heads=8, kv_heads=8, dim=64, dtype=torch.float32, grad=False, **options):
    q = torch.empty(1, heads, length, dim, dtype=dtype, requires_grad=grad)
    k = torch.empty(1, kv_heads, length, dim, dtype=dtype)
    return prepare(q, k, k, **options)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, FULL or "sdpa"),
        ({"mask": Causal()}, FULL or "sdpa"),
        ({"mask": Causal(), "grad": True}, FULL or "sdpa"),
        ({"mask": Causal(), "precision": "fast"}, FULL or "sdpa"),
        ({"mask": Causal(), "precision": "fast", "dtype": torch.bfloat16}, TILED or "blocked"),
        ({"mask": Causal(), "dtype": torch.bfloat16}, TILED or "sdpa"),
        ({"mask": Causal() & SlidingWindow(1024)}, FULL or "blocked"),
        ({"mask": Causal() & SlidingWindow(1024), "grad": True}, FULL or "blocked"),
        ({"mask": Documents(torch.arange(8192) // 512)}, FULL or "blocked"),
        ({"mask": Causal() & Padding.from_lengths([8000], total=8192)}, FULL or "blocked"),
        ({"softcap": 30.0}, "blocked"),
        ({"softcap": 30.0, "grad": True}, "blocked"),
        ({"score_bias": Alibi.for_heads(8), "grad": True}, "blocked"),
        ({"sinks": torch.zeros(8), "mask": Causal(), "grad": True}, FULL or "blocked"),
        ({"mask": Causal(), "length": 64, "softcap": 30.0}, "grouped"),
    ],
)
def test_it_runs_where_it_wins(options, name):
    assert call(**options).name == name


def test_hidden_keys_may_hold_anything(blocks):
    inputs = [x.requires_grad_() for x in tensors()]
    q, k, v = inputs
    with torch.no_grad():
        k[1, :, 8:], v[1, :, 8:] = torch.nan, torch.inf
    mask = Causal() & Padding.from_lengths([23, 8])
    before = [x.detach().clone() for x in inputs]
    for feature in ({}, {"softcap": 2.0}):
        out = attend(q, k, v, mask=mask, **feature, backend="blocked")
        with torch.no_grad():
            assert torch.equal(out, attend(q, k, v, mask=mask, **feature, backend="blocked"))
        out.sum().backward()
        assert out.isfinite().all()
        assert all(x.grad.isfinite().all() for x in inputs)
        assert (k.grad[1, :, 8:] == 0).all()
        assert (v.grad[1, :, 8:] == 0).all()
    for x, y in zip(inputs, before, strict=True):  # nor are they touched
        torch.testing.assert_close(x.detach(), y, rtol=0, atol=0, equal_nan=True)


def test_fast_gradients_do_not_depend_on_hidden_keys(blocks):
    """Nor do queries that see nothing give any, whatever stands behind them."""
    inputs = q, k, v = tuple(x.requires_grad_() for x in tensors(dtype=torch.bfloat16))
    with torch.no_grad():
        k[1, :, 8:], v[1, :, 8:] = torch.nan, torch.inf
        k[:, :, :3], v[:, :, :3] = torch.inf, torch.nan
    mask = Causal() & Padding.from_lengths([23, 8]) & Dense((torch.arange(23) > 2).expand(23, 23))
    out = attend(q, k, v, mask=mask, precision="fast", backend="blocked")
    out.sum().backward()
    assert (out[:, :, :3] == 0).all()
    assert (q.grad[:, :, :3] == 0).all()
    for grad in (k.grad, v.grad):
        assert (grad[:, :, :3] == 0).all()
        assert (grad[1, :, 8:] == 0).all()
    assert all(x.grad.isfinite().all() for x in inputs)


def test_fully_masked_rows_are_zero_and_have_no_gradient(blocks):
    q, k, v = inputs = [x.requires_grad_() for x in tensors()]
    mask = Causal() & Dense((torch.arange(23) >= 11)[None].expand(23, 23))
    out = attend(q, k, v, mask=mask, backend="blocked")
    assert (out[:, :, :11] == 0).all()
    assert (out[:, :, 11:] != 0).any(-1).all()
    out.sum().backward()
    assert (q.grad[:, :, :11] == 0).all()
    assert all(x.grad.isfinite().all() for x in inputs)


def test_rows_may_start_apart(blocks):
    q, k, v = tensors()
    q = q[:, :, :11]
    starts = torch.tensor([3, 9])
    given = {
        "mask": (Causal() & SlidingWindow(5)) | Prefix([1, 4]),
        "span": Span.ragged(starts, queries=11, kv_start=0, kv_stop=23, bounds=(3, 9)),
    }
    got = attend(q, k, v, **given, backend="blocked")
    torch.testing.assert_close(got, attend(q, k, v, **given, backend="eager"))


def test_the_backward_pass_drops_the_same_weights(blocks):
    """The output is linear in the values, if both ways drop the same weights."""
    q, k, v = (x.requires_grad_() for x in tensors())
    out = attend(q, k, v, mask=Causal(), dropout=0.4, backend="blocked")
    cotangent = torch.randn_like(out)
    (grad,) = torch.autograd.grad(out, v, cotangent)
    torch.testing.assert_close((grad * v).sum(), (out * cotangent).sum())
    assert not torch.equal(out, attend(q, k, v, mask=Causal(), dropout=0.4, backend="blocked"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_partial_results_in_half_precision_are_float32(blocks, dtype, monkeypatch):
    """So that parts, merged and rounded once, keep the bound of one rounding and a half."""
    monkeypatch.setattr(blocked, "_CONVERTED", 5)
    q, k, v = tensors(dtype=dtype)
    given = {"mask": Causal() & SlidingWindow(9)}
    parts = []
    for a, b in ((0, 7), (7, 23)):
        some, span = (x[:, :, a:b] for x in (k, v)), Span(0, 23, a, b)
        parts.append(attend_partial(q, *some, **given, span=span, backend="blocked"))
    assert {x.dtype for part in parts for x in part} == {torch.float32}
    want = attend(q.double(), k.double(), v.double(), **given, backend="eager")
    error = (merge(*parts).out.double() - want).abs().max()
    assert error <= 0.1 * torch.finfo(dtype).eps * v.abs().max()


@pytest.mark.parametrize("feature", ["softcap", "bias", "alibi"])
def test_partial_results_with_what_torch_has_no_kernel_for(blocks, feature):
    q, k, v = tensors()
    with torch.no_grad():
        given = {"mask": Causal(), **features(feature)}
        found, wanted = (attend_partial(q, k, v, **given, backend=b) for b in ("blocked", "eager"))
    torch.testing.assert_close(found.out, wanted.out)
    torch.testing.assert_close(found.lse, wanted.lse)


def test_it_says_where_it_gives_no_log_sum_exp():
    q = torch.randn(1, 2, 3, 4)
    for x, options, words in (
        (q.bfloat16(), {"precision": "fast"}, "with precision='fast'"),
        (q.clone().requires_grad_(), {}, "with a gradient"),
        (q.to("meta"), {}, "on meta"),
    ):
        with pytest.raises(ValueError, match=f"blocked gives no log-sum-exp {words}"):
            prepare(x, x, x, backend="blocked", partial=True, **options)
