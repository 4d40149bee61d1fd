"""Tables of cosines and sines hold what is computed without them, and only where they may."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from regard.rope import NTK, Rotary, Yarn, tables

ROPES = [
    Rotary(6, theta=77.0),
    Rotary(6, theta=77.0, pairing="pairs"),
    Rotary(2, scaling=Yarn(4, original_max_position=8)),  # has an attention factor
]


@pytest.fixture(autouse=True)
def no_tables(monkeypatch):
    monkeypatch.setattr(tables, "_TABLES", {})


def read(rope, positions, dtype=torch.float32):
    return tables.read_table(rope, rope._computed, positions, dtype)


@pytest.mark.parametrize("rope", ROPES, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "positions",
    [[0], [255], [256], [1000], [[3]], [5, 3, 700], [[0, 1], [300, 9]], [[7, 8]]],
    ids=str,
)
def test_a_table_holds_what_is_computed(rope, dtype, positions):
    positions = torch.tensor(positions)
    found, expected = read(rope, positions, dtype), rope._computed(positions, dtype)
    for mine, other in zip(found, expected, strict=True):
        x = torch.ones(max(2, len(positions)), 3, positions.shape[-1], rope.dim, dtype=dtype)
        torch.testing.assert_close(x * mine, x * other, rtol=0, atol=0)
        assert mine.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.uint16, torch.int32])
@pytest.mark.parametrize("positions", [[9], [0, 2, 9]], ids=str)
def test_positions_may_be_any_integers(dtype, positions):
    positions = torch.tensor(positions)
    expected = read(ROPES[0], positions)
    for mine, other in zip(read(ROPES[0], positions.to(dtype)), expected, strict=True):
        assert torch.equal(mine, other)


def test_a_table_grows_by_doubling_and_serves_equal_ropes():
    read(ROPES[0], torch.tensor([5]))
    ((cos, _),) = tables._TABLES.values()
    assert cos.shape == (256, 6)
    read(Rotary(6, theta=77.0), torch.tensor([255]))
    assert next(iter(tables._TABLES.values()))[0] is cos
    read(ROPES[0], torch.tensor([3, 600]))
    ((cos, _),) = tables._TABLES.values()
    assert cos.shape == (1024, 6)


def test_there_are_few_tables():
    for theta in range(2, 40):
        read(Rotary(2, theta=theta), torch.tensor([0]))
        assert len(tables._TABLES) <= tables._MOST


@pytest.mark.parametrize(
    ("rope", "positions"),
    [
        (ROPES[0], torch.tensor([1.0])),
        (ROPES[0], torch.tensor([-1])),
        (ROPES[0], torch.tensor([-1, 5])),
        (ROPES[0], torch.tensor([tables._LONGEST])),
        (ROPES[0], torch.tensor([0, 1 << 40])),
        (ROPES[0], torch.arange(0)),
        (ROPES[0], torch.arange(3, device="meta")),
        (Rotary(6, scaling=NTK(2.0, original_max_position=4)), torch.tensor([1])),
    ],
    ids=str,
)
def test_other_positions_have_no_table(rope, positions):
    assert read(rope, positions) is None
    assert not tables._TABLES


def test_a_table_of_inference_mode_serves_autograd_and_no_traced_program_has_one():
    rope, positions = ROPES[0], torch.tensor([2, 3])
    with torch.inference_mode():
        read(rope, positions)
    x = torch.randn(1, 2, 2, 6, requires_grad=True)
    rope.rotate(x, positions).sum().backward()
    assert x.grad is not None and not any(each.is_inference() for each in read(rope, positions))
    with FakeTensorMode() as mode:
        assert read(rope, mode.from_tensor(positions)) is None
        assert read(Rotary(6), torch.arange(2)) is None
    seen = []
    torch.func.vmap(lambda each: seen.append(read(rope, each[None])) or each)(positions)
    assert seen == [None]
    assert len(tables._TABLES) == 1


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_a_traced_rotation_reads_its_positions():
    rope, x = ROPES[0], torch.randn(1, 1, 1, 6)
    program = torch.jit.trace(rope.rotate, (x, torch.tensor([3])))
    found = program(x, torch.tensor([40]))
    torch.testing.assert_close(found, rope.rotate(x, torch.tensor([40])))


def test_tables_do_not_depend_on_the_caller():
    positions = torch.tensor([1, 300])
    plain = read(ROPES[0], positions)
    tables._TABLES.clear()
    with torch.device("meta"), torch.autocast("cpu", dtype=torch.bfloat16):
        again = ROPES[0].rotate(torch.ones(1, 1, 2, 6, device="cpu"), positions)
    assert torch.equal(again, ROPES[0].rotate(torch.ones(1, 1, 2, 6), positions))
    for mine, other in zip(plain, read(ROPES[0], positions), strict=True):
        assert torch.equal(mine, other)


def test_a_row_may_be_written_to():
    rope = Rotary(6)
    expected = [each.clone() for each in rope.row(3)]
    for each in rope.row(3):
        each.zero_()
    assert all(map(torch.equal, rope.row(3), expected))
