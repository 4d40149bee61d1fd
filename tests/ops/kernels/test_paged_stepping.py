"""The kernels of a step over pages: rotation and attention by definition, and what they write."""

import pytest
import torch

pytest.importorskip("numba")

from regard.cache.codes import QuantizedStream, quantize
from regard.ops.kernels.merging import Source
from regard.ops.kernels.paged_stepping import PagedPlan
from regard.ops.kernels.tiles import KeyPages

HEADS, KV_HEADS, WIDTH, V_WIDTH, PAGE, PAGES, SCALE = 12, 2, 48, 32, 16, 50, 0.3


def drawn(dtype, length, batch=2):
    """The arguments of a step after so many tokens of each row, in pages in random order; each row
    has its own position, as rows that are padded on the left have."""
    torch.manual_seed(0)
    count = length // PAGE + 1
    angle = torch.rand(batch, 1, WIDTH // 2).repeat(1, 1, 2) * 6
    return {
        "q": torch.randn(batch, HEADS, 1, WIDTH).to(dtype),
        "k": torch.randn(batch, KV_HEADS, 1, WIDTH).to(dtype),
        "v": torch.randn(batch, KV_HEADS, 1, V_WIDTH).to(dtype),
        "keys": torch.randn(1, KV_HEADS, PAGES * PAGE, WIDTH).to(dtype),
        "values": torch.randn(1, KV_HEADS, PAGES * PAGE, V_WIDTH).to(dtype),
        "table": torch.randperm(PAGES)[: batch * count].view(batch, count),
        "length": length,
        "angles": (angle.cos(), angle.sin()),
        "signed": False,
        "scale": SCALE,
    }


def run(given, *before, batch=2):
    """A step whose new tokens go to the pages of `given`, after the sources before them."""
    q, k, v, keys, values, table, length, angles, signed, scale = given.values()
    dtype = torch.bfloat16 if q.dtype is torch.bfloat16 else torch.float32
    sources = [*before, Source(keys, values, KeyPages(table, PAGE, 0, length + 1))]
    plan = PagedPlan(dtype, batch, HEADS, KV_HEADS, WIDTH, V_WIDTH)
    appended = plan.append(q, k, v, sources[-1], angles=angles, signed=signed)
    return None if appended is None else plan.attend(appended, sources, scale)


def slots_of(table, tokens):
    """The numbers, in the memory, of the first tokens of each row, `[B, tokens]`."""
    at = torch.arange(tokens)
    return table[:, at // PAGE] * PAGE + at % PAGE


def rotated(x, angles):
    """Channels `i` and `i + D / 2` turned together, in float64, then rounded."""
    (cos, sin), (a, b) = (each.double().unsqueeze(1) for each in angles), x.double().chunk(2, -1)
    return (x.double() * cos + torch.cat([-b, a], -1) * sin).to(x.dtype)


@pytest.mark.parametrize(
    ("dtype", "length", "threads", "batch"),
    [
        (torch.float32, 0, 1, 2),
        (torch.float32, 30, 2, 2),
        (torch.float32, 380, 2, 2),
        (torch.bfloat16, 31, 1, 2),
        (torch.bfloat16, 700, 2, 1),
    ],
    ids=str,
)
def test_a_step_is_attention_over_pages(dtype, length, threads, batch):
    torch.set_num_threads(threads)
    given = drawn(dtype, length, batch)
    slots = slots_of(given["table"], length + 1)
    keys, values = given["keys"].clone(), given["values"].clone()
    for row, slot in enumerate(slots[:, -1].tolist()):
        keys[0, :, slot] = rotated(given["k"], given["angles"])[row, :, 0]
        values[0, :, slot] = given["v"][row, :, 0]
    found = run(given, batch=batch)
    assert given["values"].equal(values)
    unit = torch.finfo(dtype).eps / 2
    torch.testing.assert_close(given["keys"], keys, rtol=2 * unit, atol=4 * unit)
    changed = (given["keys"] != drawn(dtype, length, batch)["keys"]).any(-1).any(1)[0]
    assert set(changed.nonzero().flatten().tolist()) == set(slots[:, -1].tolist())
    held = [given[name][0][:, slots].transpose(0, 1).double() for name in ("keys", "values")]
    check(found, given, *held)


def check(found, given, keys, values):
    """Compare an output with attention to these keys in float64, by the numeric contract."""
    dtype, batch = given["q"].dtype, len(given["q"])
    q = rotated(given["q"], given["angles"]).double().view(batch, KV_HEADS, -1, WIDTH)
    wanted = (SCALE * q @ keys.mT).softmax(-1) @ values
    unit = torch.finfo(dtype).eps / 2
    largest = SCALE * q.abs().sum(-1).amax() * keys.abs().amax()
    bound = 1.5 * unit if dtype is torch.bfloat16 else 2 * unit * (1 + largest)
    assert found.dtype is dtype
    assert (found.double() - wanted.reshape(found.shape)).abs().amax() <= bound * values.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_codes_and_numbers_before_the_new_token_are_attended_to(dtype):
    given = drawn(dtype, 20)
    x = [torch.randn(1, KV_HEADS, 10 * PAGE, width) for width in (WIDTH, V_WIDTH)]
    codes = [QuantizedStream(*quantize(each, 8, 16), 8, 16, each.shape[3], dtype) for each in x]
    table = torch.randperm(10)[:6].view(2, 3)
    first = Source(given["keys"], given["values"], KeyPages(torch.tensor([[3], [4]]), PAGE, 2, 9))
    second = Source(*codes, KeyPages(table, PAGE, 0, 41))
    found = run(given, first, second)
    slots = slots_of(given["table"], 21)
    every = []
    for name, stream in zip(("keys", "values"), codes, strict=True):
        memory = given[name][0].double()
        parts = memory[:, torch.stack([torch.arange(50, 59), torch.arange(66, 75)])]
        coded = stream.to_tensor()[0].double()[:, slots_of(table, 41)]
        every.append(torch.cat([parts, coded, memory[:, slots]], 2).transpose(0, 1))
    check(found, given, *every)


def strided(x):
    return torch.stack([x, x], -1)[..., 0]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("q", strided),
        ("q", lambda x: x[:1]),
        ("k", lambda x: x.double()),
        ("v", lambda x: x[..., :16]),
        ("keys", lambda x: x.mT.contiguous().mT),
        ("keys", lambda x: x[:, :, :-PAGE].contiguous()),  # of other pages than the values
        ("values", lambda x: x.to("meta")),
        ("angles", lambda x: (x[0].double(), x[1])),
    ],
)
def test_nothing_is_written_where_a_tensor_lies_otherwise(name, change):
    given = drawn(torch.float32, 30)
    keys, values = given["keys"].clone(), given["values"].clone()
    assert run({**given, name: change(given[name])}) is None
    assert given["keys"].equal(keys)
    assert given["values"].equal(values)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x + PAGES,
        lambda x: x - PAGES,
        lambda x: x[:, :1],
        lambda x: x[:1],
        torch.Tensor.int,
    ],
)
def test_a_table_that_leads_elsewhere_is_refused(change):
    given = drawn(torch.float32, 30)
    keys, given["table"] = given["keys"].clone(), change(given["table"])
    with pytest.raises(AssertionError, match="must not reach"):
        run(given)
    assert given["keys"].equal(keys)
