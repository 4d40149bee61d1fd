"""Attention over tokens of several ranks: outputs, gradients, and messages."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import shard_calls
from cases import bound
from covering import few
from ranks import on_ranks
from regard import (
    Alibi,
    Causal,
    Dense,
    Documents,
    RelativeBias,
    SlidingWindow,
    Where,
    attend,
)
from regard.distributed.context.attending import attend_shards, learned_of
from regard.distributed.context.exchanging import Arriving
from regard.distributed.context.needed import bytes_sent, needs_of
from regard.distributed.ranks import Ranks, counted
from regard.distributed.shards import Shards
from session import LONG

SEEDS = 400 if LONG else 20


def agree(number, seeds, **options):
    """Outputs and all gradients are those of the definition, to the rounding of float64."""
    every = on_ranks(number, shard_calls.of_ranks, seeds, number, options)
    for index, seed in enumerate(seeds):
        case = shard_calls.draw(seed, number, **options)
        found = shard_calls.joined(case, [results[index] for results in every])
        expected, _, _ = shard_calls.definition(case)
        for what, (mine, its) in enumerate(zip(found, expected, strict=True)):
            assert (mine - its).abs().max() <= 1e-11 * (1 + its.abs().max()), (seed, what, case)


@pytest.mark.parametrize("number", few([2, 4, 3], 2))
def test_outputs_and_gradients_are_those_of_the_whole_sequence(number):
    agree(number, range(SEEDS))


@settings(max_examples=60 if LONG else 6, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([2, 3, 4]))
def test_any_call(seed, number):
    agree(number, [seed])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_outputs_are_within_the_contract(dtype):
    """Gradients: at most 3 times (half) or 5 times (float32) as wrong as those of one device."""
    seeds, times = range(16), 5 if dtype == torch.float32 else 3
    every = on_ranks(3, shard_calls.of_ranks, seeds, 3, {"dtype": dtype, "fused": True})
    for index, seed in enumerate(seeds):
        case = shard_calls.draw(seed, 3, dtype, fused=True)
        if case.expanded:  # the keys are rounded, too
            continue
        out, *grads = shard_calls.joined(case, [results[index] for results in every])
        (exact, *slopes), v, largest = shard_calls.definition(case)
        assert out.dtype == dtype
        error = (out.double() - exact).abs().max()
        assert error <= bound(dtype, v.abs().max().item(), largest), case
        plain = on_one(case)
        for mine, one, its in zip(grads, plain, slopes, strict=True):
            error, its_error = ((x.double() - its).abs().max() for x in (mine, one))
            floor = torch.finfo(dtype).eps * (1 + its.abs().max())  # differences of such numbers
            assert error <= times * max(its_error, floor), (seed, case)


def on_one(case):
    """The gradients of the whole sequence on one device, in the same dtype."""
    own, shared = ([x.detach().requires_grad_() for x in group] for group in case.leaves)
    q, k = own[:2]
    v = own[2] if len(own) > 2 else k[..., : case.slope.shape[3]]
    sinks = shared[0] if shared else None
    out = attend(q, k, v, mask=case.mask, scale=case.scale, sinks=sinks, backend="eager")
    out.backward(case.slope)
    return [x.grad for x in (*own, *shared)]


def inputs(length, dtype=torch.float64, heads=2, dim=4):
    torch.manual_seed(length)
    return [torch.randn(1, heads, length, dim, dtype=dtype) for _ in range(3)]


def _other_fields(mesh, exchange):
    """Masks that are made in the rank, and options of a call, against `attend`."""
    ranks, shards = Ranks(mesh), Shards(21, 3)
    q, k, v = inputs(21)
    mine = [shards.take(x, ranks.rank, 2) for x in (q, k, v)]
    opaque = Where(lambda b, h, q, k: (q + 2 * k + h) % 3 != 0)
    found = []
    for options in (
        {"mask": Causal() & opaque},
        {"mask": opaque, "backend": "eager"},
        {"scale": -0.5},
        {"precision": "fast"},
        {"mask": Causal(), "backend": "blocked"},
        {"score_bias": torch.tensor(0.5, dtype=torch.float64)},
    ):
        out = attend_shards(
            mine[0], mine[1:], ranks=ranks, shards=shards, exchange=exchange, **options
        )
        options.pop("backend", None)
        whole = attend(q, k, v, **options, backend="eager")
        found.append((out - shards.take(whole, ranks.rank, 2)).abs().max().item())
    return found


@pytest.mark.parametrize("exchange", ["ring", "gather"])
def test_opaque_masks_and_options(exchange):
    for errors in on_ranks(3, _other_fields, exchange):
        assert max(errors) <= 1e-12


def _sent(mesh, exchange):
    """Bytes by this library's count, by the group's own calls, and by the plan."""
    ranks, shards = Ranks(mesh), Shards(30, mesh.size())
    mask = Causal() & SlidingWindow(9)
    q, k, v = (shards.take(x, ranks.rank, 2).requires_grad_() for x in inputs(30, torch.bfloat16))
    passed, send = [], dist.ProcessGroup.send

    def counting(group, tensors, *args):
        passed.extend(x.nbytes for x in tensors)
        return send(group, tensors, *args)

    with pytest.MonkeyPatch.context() as patch, counted() as sent:
        patch.setattr(dist.ProcessGroup, "send", counting)
        out = attend_shards(q, (k, v), ranks=ranks, shards=shards, mask=mask, exchange=exchange)
        forward = sent.bytes, sum(passed)
        out.sum().backward()
    sizes = {"token_bytes": 2 * 2 * 4 * 2, "gradient_bytes": 2 * 2 * 4 * 4}
    plan = bytes_sent(needs_of(mask, shards), ranks.rank, **sizes, exchange=exchange)
    return forward, (sent.bytes, sum(passed)), plan


@pytest.mark.parametrize("exchange", ["ring", "gather"])
@pytest.mark.parametrize("number", [2, 4])
def test_bytes_are_those_of_the_plan(number, exchange):
    for forward, both, plan in on_ranks(number, _sent, exchange):
        assert plan.forward > 0 and plan.backward > 0
        assert forward == (plan.forward, plan.forward)
        assert both == (sum(plan), sum(plan))


def _nothing_needed(mesh):
    ranks, shards = Ranks(mesh), Shards(12, 2, "contiguous")
    mask = Documents(torch.tensor([0] * 6 + [1] * 6))
    q, k, v = (shards.take(x, ranks.rank, 2).requires_grad_() for x in inputs(12))
    with counted() as sent:
        out = attend_shards(q, (k, v), ranks=ranks, shards=shards, mask=mask)
        out.sum().backward()
    torch.testing.assert_close(out, attend(q, k, v))
    return sent.bytes


def test_nothing_is_sent_where_nothing_is_needed():
    assert on_ranks(2, _nothing_needed) == [0, 0]


def _order(mesh, exchange):
    """What happens in a forward pass, in order: messages that start, and that are waited for."""
    ranks, shards, events = Ranks(mesh), Shards(40, mesh.size()), []
    q, k, v = (shards.take(x, ranks.rank, 2) for x in inputs(40))
    start, wait = Ranks.exchange, Arriving.wait

    def starting(self, send, receive, step):
        events.append(f"start {len(receive)}")
        return start(self, send, receive, step)

    def waiting(self):
        events.append("wait")
        return wait(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ranks, "exchange", starting)
        patch.setattr(Arriving, "wait", waiting)
        attend_shards(q, (k, v), ranks=ranks, shards=shards, exchange=exchange)
    return events


def test_a_ring_starts_a_message_before_it_attends_to_the_last():
    ring = ["start 0", "wait", "start 1", "wait", "start 1", "wait"]
    assert on_ranks(3, _order, "ring") == [ring] * 3
    assert on_ranks(3, _order, "gather") == [["start 2", "wait"]] * 3


def _some_gradients(mesh, exchange):
    """Gradients of some of the arguments alone, and of none."""
    ranks, shards = Ranks(mesh), Shards(13, 2)
    q, k, v = inputs(13)
    expected = [x.detach().requires_grad_() for x in (q, k, v)]
    attend(*expected, mask=Causal(), backend="eager").sum().backward()
    for names in ((), (0,), (1,), (2,), (0, 2)):
        mine = [shards.take(x, ranks.rank, 2) for x in (q, k, v)]
        for name in names:
            mine[name].requires_grad_()
        out = attend_shards(
            mine[0], mine[1:], ranks=ranks, shards=shards, mask=Causal(), exchange=exchange
        )
        assert out.requires_grad == bool(names)
        if names:
            out.sum().backward()
        for name, x in enumerate(mine):
            assert (x.grad is not None) == (name in names)
            if x.grad is not None:
                torch.testing.assert_close(x.grad, shards.take(expected[name].grad, ranks.rank, 2))


@pytest.mark.parametrize("exchange", ["ring", "gather"])
def test_gradients_of_some_arguments(exchange):
    on_ranks(2, _some_gradients, exchange)


def _second(mesh):
    ranks, shards = Ranks(mesh), Shards(8, 2)
    q, k, v = (shards.take(x, ranks.rank, 2).requires_grad_() for x in inputs(8))
    out = attend_shards(q, (k, v), ranks=ranks, shards=shards, mask=Causal())
    (grad,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(ValueError, match="over ranks has no second derivative"):
        grad.sum().backward()


def test_there_is_no_second_derivative():
    on_ranks(2, _second)


def _with_positions(streams, parameters):
    x, positions = streams
    k = x * parameters[0] * positions.to(x.dtype)
    return k, x


def _integers(mesh, exchange):
    ranks, shards = Ranks(mesh), Shards(9, 2)
    q, x, _ = inputs(9)
    positions = torch.arange(9, dtype=torch.int32).view(1, 1, 9, 1)
    weight = torch.tensor([0.1], dtype=torch.float64, requires_grad=True)
    whole = [q.clone().requires_grad_(), x.clone().requires_grad_()]
    out = attend(whole[0], *_with_positions((whole[1], positions), [weight]), mask=Causal())
    out.sum().backward()
    expected, weight.grad = weight.grad, None
    mine = [shards.take(each, ranks.rank, 2).requires_grad_() for each in (q, x)]
    streams = mine[1], shards.take(positions, ranks.rank, 2)
    options = {"keys_of": _with_positions, "parameters": (weight,), "exchange": exchange}
    attend_shards(
        mine[0], streams, ranks=ranks, shards=shards, mask=Causal(), **options
    ).sum().backward()
    for found, each in zip(mine, whole, strict=True):
        torch.testing.assert_close(found.grad, shards.take(each.grad, ranks.rank, 2))
    torch.testing.assert_close(ranks.all_reduce(weight.grad, "sum"), expected)


@pytest.mark.parametrize("exchange", ["ring", "gather"])
def test_streams_of_integers(exchange):
    on_ranks(2, _integers, exchange)


def _empty(mesh):
    ranks = Ranks(mesh)
    for length, batch in ((0, 1), (2, 1), (5, 0)):
        shards = Shards(length, ranks.size)
        shape = batch, 2, shards.lengths[ranks.rank], 4
        q, k, v = (torch.ones(shape, requires_grad=True) for _ in range(3))
        for sinks in (None, torch.zeros(2, requires_grad=True)):
            out = attend_shards(q, (k, v), ranks=ranks, shards=shards, mask=Causal(), sinks=sinks)
            assert out.shape == shape and out.isfinite().all()
            out.sum().backward()
            assert sinks is None or sinks.grad.isfinite().all()


def test_ranks_without_tokens_and_empty_batches():
    on_ranks(4, _empty)


def _autocast(mesh):
    ranks, shards = Ranks(mesh), Shards(9, 2)
    q, x, _ = (each.float() for each in inputs(9))
    weight = torch.randn(4, 4, requires_grad=True)
    seen = []

    def keys_of(streams, parameters):
        k = streams[0] @ parameters[0]
        seen.append(k.dtype)
        return k.float(), streams[0]

    mine = [shards.take(each, ranks.rank, 2).requires_grad_() for each in (q, x)]
    with torch.autocast("cpu", torch.bfloat16):
        out = attend_shards(
            mine[0], mine[1:], ranks=ranks, shards=shards, keys_of=keys_of, parameters=(weight,)
        )
    out.sum().backward()
    assert out.dtype == torch.float32
    assert set(seen) == {torch.bfloat16}


def test_keys_are_made_under_the_same_autocast_in_both_passes():
    on_ranks(2, _autocast)


# ---- refusals, before anything is sent ----


class Hidden:
    """A rule for score biases that reads a tensor which it does not name."""

    weight = torch.ones((), requires_grad=True)

    def bias(self, span, *, device=None, dtype):
        return self.weight.expand(1, 1, span.num_queries, span.num_keys).to(dtype)


def hidden_keys(streams, parameters):
    return streams[0] * Hidden.weight, streams[0]


def _refusals(mesh):
    ranks, shards = Ranks(mesh), Shards(10, 2)
    q, k = torch.zeros(1, 4, 5, 8), torch.zeros(1, 2, 5, 8)
    half = {"q": q.bfloat16(), "streams": (k.bfloat16(),) * 2, "score_bias": torch.zeros(10, 10)}
    wrong = [
        ({"streams": (k.double(), k.double())}, "q, k and v have one dtype"),
        ({"streams": (k[..., :4], k)}, "q and k have one head dim"),
        ({"mask": Dense(torch.ones(5, 10, dtype=torch.bool))}, r"here \[10, 10\]"),
        ({"score_bias": Hidden()}, "reads tensors that need gradients"),
        ({"keys_of": hidden_keys}, "keys are rebuilt with a tensor that needs gradients"),
        ({"softcap": 2.0, "backend": "sdpa"}, "has no softcap"),
        ({**half, "backend": "sdpa"}, "sdpa gives no log-sum-exp"),
        ({"backend": "quick"}, "backend='quick' is not one of"),
    ]
    with counted() as sent:
        for changed, message in wrong:
            given = {"q": q, "streams": (k, k), "shards": shards, "mask": Causal(), **changed}
            with pytest.raises(ValueError, match=message):
                attend_shards(given.pop("q"), given.pop("streams"), ranks=ranks, **given)
        with pytest.raises(ValueError, match=r"neither torch.compile nor torch.func"):
            torch.func.grad(lambda q: attend_shards(q, (k, k), ranks=ranks, shards=shards).sum())(q)
    assert sent.bytes == 0


def test_what_is_refused_on_every_rank(unchecked):
    on_ranks(2, _refusals)


def test_the_parameters_of_a_rule():
    rule = RelativeBias(2)
    assert learned_of(rule) == (rule.relative_attention_bias.weight,)
    assert learned_of(Alibi([0.5])) == learned_of(None) == ()
    with torch.no_grad():
        assert learned_of(Hidden()) == ()
