"""RoPE against products of complex numbers whose angles are exact to 40 digits."""

import copy
import pickle
import warnings

import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from covering import covering, few
from regard.rope import NO_ROPE, NoRotary, Rope, Rotary
from regard.rope.scaling import NTK, LinearScaling, Llama3, LongRope, Yarn

PAIRINGS = ("halves", "pairs")
SCALINGS = (
    None,
    LinearScaling(2),
    NTK(4.0),
    NTK(4.0, original_max_position=6),
    Yarn(8, original_max_position=64, mscale=0.7, mscale_all_dim=1.2),
    Llama3(8, original_max_position=64),
    LongRope([1.0, 1.5, 2.0], [3.0, 5.0, 9.0], original_max_position=6, factor=4),
)
EVERY_ROPE = [Rotary(6, pairing=p, scaling=s) for p in PAIRINGS for s in SCALINGS]

mpmath.mp.dps = 40


def partners(dim, pairing):
    half = dim // 2
    return [(i, i + half) if pairing == "halves" else (2 * i, 2 * i + 1) for i in range(half)]


def rotated_as_complex_numbers(x, positions, dim, theta, pairing):
    """Each pair of channels as one complex number, times `exp(i * position * frequency)`."""
    out = x.double().clone()
    batch, heads, length, _ = x.shape
    rows = positions.expand(batch, length).tolist()
    for b in range(batch):
        for t in range(length):
            for i, (real, imaginary) in enumerate(partners(dim, pairing)):
                angle = mpmath.mpf(rows[b][t]) * mpmath.mpf(theta) ** (-mpmath.mpf(2 * i) / dim)
                factor = complex(mpmath.expj(angle))
                for h in range(heads):
                    z = complex(float(x[b, h, t, real]), float(x[b, h, t, imaginary])) * factor
                    out[b, h, t, real], out[b, h, t, imaginary] = z.real, z.imag
    return out


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize(("dim", "width"), [(2, 2), (8, 8), (6, 10), (2, 5)])
@pytest.mark.parametrize("positions", [[0, 1, 2], [5, 3, 1000], [[0, 1, 2], [7, 8, 999_999]]])
def test_rotation_is_a_product_of_complex_numbers(pairing, dim, width, positions):
    q = torch.randn(2, 3, 3, width, dtype=torch.float64)
    k = torch.randn(2, 1, 3, width, dtype=torch.float64)
    positions = torch.tensor(positions)
    rope = Rotary(dim, theta=500.0, pairing=pairing)
    rotated = rope(q, k, positions)
    for x, y in zip((q, k), rotated, strict=True):
        expected = rotated_as_complex_numbers(x, positions, dim, 500.0, pairing)
        torch.testing.assert_close(y, expected, rtol=0, atol=3e-10)  # 1e6 * 2**-53, and a little
        assert torch.equal(y[..., dim:], x[..., dim:])
        assert torch.equal(y, rope.rotate(x, positions))


@pytest.mark.parametrize("position", [1_000, 65_536, 100_003, 1_000_000])
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_the_error_of_a_float32_angle_is_its_rounding(position, pairing):
    x = torch.randn(1, 1, 1, 16)
    rope = Rotary(16, pairing=pairing)
    positions = torch.tensor([position])
    expected = rotated_as_complex_numbers(x, positions, 16, 10_000.0, pairing)
    bound = (position * 2**-24 * 2 + 2**-22) * x.abs().max().item() * 2
    assert (rope.rotate(x, positions) - expected).abs().max() <= bound
    exact = rope.rotate(x.double(), positions)
    torch.testing.assert_close(exact, expected, rtol=0, atol=1e-9)


def test_float32_rotation_is_what_transformers_computes():
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    config = llama.LlamaConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
    theirs = llama.LlamaRotaryEmbedding(config)
    q, k = torch.randn(1, 4, 9, 16), torch.randn(1, 2, 9, 16)
    positions = torch.tensor([[0, 1, 2, 63, 512, 1023, 1500, 2000, 4095]])
    expected = llama.apply_rotary_pos_emb(q, k, *theirs(q, positions))
    for ours, their in zip(Rotary(16)(q, k, positions), expected, strict=True):
        torch.testing.assert_close(ours, their, rtol=0, atol=4095 * 2**-22)


def test_pairs_are_halves_with_the_channels_in_another_order():
    x = torch.randn(2, 3, 5, 8)
    order = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])  # pairs to halves
    positions = torch.arange(5)
    halves = Rotary(8).rotate(x, positions)
    assert torch.equal(
        Rotary(8, pairing="pairs").rotate(x[..., order], positions), halves[..., order]
    )


@pytest.mark.parametrize("rope", EVERY_ROPE, ids=repr)
@given(start=st.integers(0, 500), shift=st.integers(0, 500))
def test_a_score_depends_on_distance_only(rope, start, shift):
    if rope.scaling is not None and rope.scaling.uses_length:
        rope = Rotary(6, pairing=rope.pairing)  # a shift changes the length
    q, k = torch.randn(2, 1, 2, 6, 8, dtype=torch.float64)

    def scores(positions):
        rotated_q, rotated_k = rope(q, k, positions)
        return rotated_q @ rotated_k.mT

    positions = torch.arange(6) + start
    torch.testing.assert_close(scores(positions), scores(positions + shift), rtol=0, atol=1e-9)


@pytest.mark.parametrize("rope", EVERY_ROPE, ids=repr)
def test_rotation_multiplies_norms_by_the_attention_factor(rope):
    x = torch.randn(2, 3, 9, 6, dtype=torch.float64)
    rotated = rope.rotate(x, torch.arange(9) * 100)
    torch.testing.assert_close(rotated.norm(dim=-1), x.norm(dim=-1) * rope.attention_factor)


@pytest.mark.parametrize("rope", EVERY_ROPE, ids=repr)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(rope, dtype):
    x = torch.randn(2, 3, 9, 10).to(dtype)
    positions = torch.arange(9) * 7777
    assert torch.equal(rope.rotate(x, positions), rope.rotate(x.float(), positions).to(dtype))


@pytest.mark.parametrize("rope", EVERY_ROPE, ids=repr)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_has_no_effect(rope, dtype):
    q, k = torch.randn(2, 1, 2, 5, 8)
    positions = torch.arange(65_536, 65_541)
    plain = rope(q, k, positions)
    fresh = copy.deepcopy(rope)
    with torch.autocast("cpu", dtype=dtype):
        for x, y in zip(fresh(q, k, positions), plain, strict=True):
            assert torch.equal(x, y) and x.dtype == torch.float32


def test_a_module_cast_to_bfloat16_keeps_its_rope():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.rope = Rotary(6)

    layer = Layer().to(torch.bfloat16)
    assert layer.state_dict() == {} and layer.rope == Rotary(6)


@pytest.mark.parametrize("rope", EVERY_ROPE, ids=repr)
def test_batch_rows_may_have_different_positions(rope):
    x = torch.randn(3, 2, 5, 8)
    rows = torch.stack([torch.arange(5) + s for s in (9, 0, 4)])
    whole = rope.rotate(x, rows)
    if rope.scaling is not None and rope.scaling.uses_length:
        return  # the length is that of the longest row
    for i in range(3):
        assert torch.equal(whole[i : i + 1], rope.rotate(x[i : i + 1], rows[i]))
    assert torch.equal(rope.rotate(x, rows[:1]), rope.rotate(x, rows[0]))


@pytest.mark.parametrize("scaling", [SCALINGS[3], SCALINGS[6]], ids=repr)
def test_the_length_of_a_batch_is_that_of_its_longest_row(scaling):
    rope = Rotary(6, scaling=scaling)
    x = torch.randn(1, 1, 1, 6, dtype=torch.float64)
    within = rope.angles(torch.tensor([5]), torch.float64)
    assert torch.equal(within, 5 * scaling.frequencies(6, 10_000.0)[None])
    beyond = rope.angles(torch.tensor([[5], [6]]), torch.float64)
    assert (beyond[0, :, 1:] < within[:, 1:]).all()
    both = rope.rotate(x.expand(2, 1, 1, 6), torch.tensor([[5], [6]]))
    assert not torch.equal(both[:1], rope.rotate(x, torch.tensor([5])))
    assert torch.equal(both[1:], rope.rotate(x, torch.tensor([6])))


@pytest.mark.parametrize("rope", EVERY_ROPE, ids=repr)
def test_empty_tensors_stay_empty(rope):
    x = torch.randn(2, 3, 0, 6)
    assert rope.rotate(x, torch.arange(0)).shape == x.shape
    assert rope.rotate(x[:0], torch.arange(0)).shape == (0, 3, 0, 6)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8, torch.float32])
def test_positions_may_be_any_integers_or_float32(dtype):
    x = torch.randn(1, 1, 4, 6)
    positions = torch.tensor([0, 1, 2, 100])
    for rope in (Rotary(6), Rotary(6, scaling=SCALINGS[3])):
        assert torch.equal(rope.rotate(x, positions.to(dtype)), rope.rotate(x, positions))


@pytest.mark.parametrize("rope", [*EVERY_ROPE, Rotary(4, theta=7), Rotary(2, pairing="pairs")])
def test_a_rope_can_be_compared_copied_pickled_and_rebuilt_from_its_repr(rope):
    names = {c.__name__: c for c in (Rotary, LinearScaling, NTK, Yarn, Llama3, LongRope)}
    rebuilt = eval(repr(rope), names)
    for other in (rebuilt, copy.deepcopy(rope), pickle.loads(pickle.dumps(rope))):
        assert other == rope and hash(other) == hash(rope) and repr(other) == repr(rope)
    with pytest.raises(AttributeError):
        rope.dim = 4
    assert isinstance(rope, Rope) and rope != Rotary(6, theta=9.0)


def test_repr_leaves_out_defaults():
    assert repr(Rotary(64)) == "Rotary(64)"
    assert repr(Rotary(64, theta=1e6, pairing="pairs")) == (
        "Rotary(64, theta=1000000.0, pairing='pairs')"
    )
    assert repr(Rotary(8, scaling=LinearScaling(2))) == "Rotary(8, scaling=LinearScaling(2))"


@pytest.mark.parametrize("rope", EVERY_ROPE, ids=repr)
def test_inputs_are_not_written_and_may_share_memory(rope):
    x = torch.randn(2, 5, 3, 8).transpose(1, 2)
    positions = torch.arange(5)
    before = x.clone(), positions.clone()
    out = rope(x, x, positions)
    assert torch.equal(x, before[0]) and torch.equal(positions, before[1])
    assert out[0].data_ptr() != x.data_ptr() and torch.equal(out[0], out[1])


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_gradients_are_rotated_back(pairing):
    x = torch.randn(2, 3, 5, 8, dtype=torch.float64, requires_grad=True)
    rope = Rotary(6, pairing=pairing)
    out = rope.rotate(x, torch.arange(5))
    weight = torch.randn_like(out)
    (grad,) = torch.autograd.grad((out * weight).sum(), x)
    torch.testing.assert_close(grad, rope.rotate(weight, -torch.arange(5)))


@pytest.mark.parametrize(
    ("scaling", "pairing"), few(covering(SCALINGS, PAIRINGS, together=1), 3), ids=repr
)
def test_compiles_in_one_graph_and_at_any_length(unchecked, scaling, pairing):
    rope = Rotary(6, pairing=pairing, scaling=scaling)
    torch.compiler.reset()
    compiled = torch.compile(lambda *a: rope(*a), fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (3, 5, 9):
        q, k = torch.randn(1, 2, length, 8), torch.randn(1, 1, length, 8)
        positions = torch.arange(length) + 2
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*lru_cache")
            found = compiled(q, k, positions)
        for x, y in zip(found, rope(q, k, positions), strict=True):
            torch.testing.assert_close(x, y)


def test_exports_with_a_dynamic_length(unchecked):
    class Layer(nn.Module):
        rope = EVERY_ROPE[3]

        def forward(self, x):
            return self.rope.rotate(x, torch.arange(x.shape[2], device=x.device))

    length = torch.export.Dim("length", min=2, max=64)
    x = torch.randn(1, 2, 8, 6)
    program = torch.export.export(Layer(), (x,), dynamic_shapes=({2: length},))
    longer = torch.randn(1, 2, 20, 6)
    torch.testing.assert_close(program.module()(longer), Layer()(longer))


@pytest.mark.parametrize("scaling", SCALINGS, ids=repr)
def test_what_is_kept_serves_whoever_comes_next(scaling):
    """Frequencies first computed under a mode are not poisoned by it."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    x = torch.randn(1, 1, 4, 6)
    positions = torch.arange(4)
    rope = Rotary(6, theta=4321.0, scaling=scaling)
    with FakeTensorMode():
        assert rope.rotate(torch.randn(1, 1, 4, 6), torch.arange(4)).shape == x.shape
    with torch.inference_mode():
        expected = rope.rotate(x, positions)
    with FakeTensorMode():
        assert rope.rotate(torch.randn(1, 1, 4, 6), torch.arange(4)).shape == x.shape
    assert rope.rotate(x.to("meta"), positions.to("meta")).shape == x.shape
    x.requires_grad_()
    out = rope.rotate(x, positions.float().requires_grad_())
    out.sum().backward()
    assert torch.equal(out, expected)
    rope.rotate(x.double(), positions.double().requires_grad_()).sum().backward()
    other = Rotary(6, theta=1234.0, scaling=scaling)
    gradient = torch.func.grad(lambda y: other.rotate(y, positions).sum())(x.detach())
    (again,) = torch.autograd.grad(other.rotate(x, positions).sum(), x)
    assert torch.equal(gradient, again)
    rows = torch.func.vmap(lambda y: other.rotate(y, positions))(x.detach().expand(3, 1, 1, 4, 6))
    assert torch.equal(rows[1], other.rotate(x.detach(), positions))


def test_factors_come_from_the_scaling():
    assert Rotary(6).attention_factor == Rotary(6).softmax_factor == 1.0
    yarn = Yarn(40, original_max_position=4096, mscale_all_dim=1.0)
    rope = Rotary(6, scaling=yarn)
    assert (rope.attention_factor, rope.softmax_factor) == (
        yarn.attention_factor,
        yarn.softmax_factor,
    )
    assert rope.softmax_factor > 1.8


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"dim": 5}, ValueError, "dim must be even, got 5"),
        ({"dim": 0}, ValueError, "dim must be finite and greater than 0"),
        ({"dim": -2}, ValueError, "dim must be finite and greater than 0, got -2"),
        ({"dim": 6, "theta": 0.0}, ValueError, "theta must be finite and greater than 0"),
        ({"dim": 6, "theta": float("nan")}, ValueError, "theta must be finite"),
        ({"dim": 6, "pairing": "interleaved"}, ValueError, "'halves'.*'pairs'.*'interleaved'"),
        ({"dim": 8, "scaling": SCALINGS[6]}, ValueError, "3 entries, but dim=8 has 4 pairs"),
        ({"dim": 2, "scaling": NTK(2)}, ValueError, "dim >= 4"),
        ({"dim": 6, "scaling": 2.0}, TypeError, "scaling must be a value"),
        ({"dim": "6"}, TypeError, "dim must be a number"),
    ],
)
def test_errors_of_the_constructor_say_why(unchecked, arguments, error, message):
    with pytest.raises(error, match=message):
        Rotary(**arguments)


@pytest.mark.parametrize(
    ("shape", "positions", "error", "message"),
    [
        ((1, 1, 3, 4), torch.arange(3), ValueError, "first 6 channels.*has 4"),
        ((1, 1, 3, 6), torch.arange(4), ValueError, r"L=3 and B=1, but.*\(4,\)"),
        ((2, 1, 3, 6), torch.zeros(3, 3), ValueError, r"L=3 and B=2, but.*\(3, 3\)"),
        ((1, 1, 3, 6), torch.tensor(3), ValueError, r"\[L\] or \[B, L\]"),
        ((1, 1, 3, 6), torch.zeros(1, 1, 3), ValueError, r"\[L\] or \[B, L\]"),
        ((1, 1, 3, 6), torch.zeros(3).bfloat16(), TypeError, "torch.bfloat16.*cannot count"),
        ((1, 1, 3, 6), torch.ones(3).bool(), TypeError, "torch.bool.*cannot count"),
    ],
)
def test_errors_of_calls_say_why(unchecked, shape, positions, error, message):
    x = torch.zeros(shape)
    for call in (lambda: Rotary(6).rotate(x, positions), lambda: Rotary(6)(x, x, positions)):
        with pytest.raises(error, match=message):
            call()


def test_integer_tensors_are_refused(unchecked):
    with pytest.raises(TypeError, match="rotates floating-point tensors, got"):
        Rotary(2).rotate(torch.ones(1, 1, 1, 2, dtype=torch.int64), torch.arange(1))


def test_no_rope_returns_its_inputs():
    q, k = torch.randn(1, 2, 3, 4), torch.randn(1, 1, 5, 4)
    assert all(x is y for x, y in zip(NO_ROPE(q, k, torch.arange(3)), (q, k), strict=True))
    assert NO_ROPE.rotate(q, torch.arange(3)) is q
    assert (NO_ROPE.dim, NO_ROPE.softmax_factor, NO_ROPE.attention_factor) == (0, 1.0, 1.0)
    assert NO_ROPE.angles(torch.arange(3)).shape == (3, 0)
    assert repr(NO_ROPE) == "NO_ROPE" and isinstance(NO_ROPE, Rope)
    for other in (copy.deepcopy(NO_ROPE), pickle.loads(pickle.dumps(NO_ROPE))):
        assert other is NO_ROPE
    assert NoRotary() == NO_ROPE != Rotary(2)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.uint16, torch.int32], ids=str)
def test_the_length_of_a_call_is_counted_in_wide_integers(dtype):
    """The largest position of a dtype plus one does not fit it."""
    largest = torch.tensor([0, torch.iinfo(dtype).max], dtype=dtype)
    x = torch.ones(1, 1, 2, 4)
    for scaling in (NTK(2.0, 16), LongRope([1, 1], [1, 9], original_max_position=16, factor=2.0)):
        rope = Rotary(4, scaling=scaling)
        assert torch.equal(rope.rotate(x, largest), rope.rotate(x, largest.to(torch.int64)))


@pytest.mark.parametrize("position", [-1, 1.5, -300, 1 << 20])
def test_the_row_of_a_position_beyond_tables_is_computed(position):
    rope = Rotary(4)
    cos, sin = rope.row(position)
    angles = rope.angles(torch.tensor([position]))[0]
    torch.testing.assert_close(cos, torch.cat([angles, angles]).cos())
    torch.testing.assert_close(sin, torch.cat([-angles, angles]).sin())
