"""torch's FlashAttention, called directly: packing, limits and objections, without a GPU.

The kernel is replaced by one of plain operators, which reads its arguments as torch documents them.
On a GPU `tests/gpu` compares the real one with the definition.
"""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from cases import draw_case
from contract import compare
from regard import (
    Alibi,
    Causal,
    Chunked,
    Documents,
    Padding,
    SlidingWindow,
    Span,
    attend,
    attend_partial,
    prepare,
)
from regard.ops.backends import flash, sdpa
from regard.ops.choose import choose

LEFT = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1], [1] * 9])
IDS = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2])


def kernel(q, k, v, ends_q, ends_k, max_q, max_k, dropout, causal, debug, *, scale,
           window_size_left=None, window_size_right=None):  # fmt: skip
    """`aten._flash_attention_forward`: `[B, L, H, D]`, or `[T, H, D]` with cumulative lengths."""
    assert not dropout and not causal and not debug
    limits = window_size_left, window_size_right
    if ends_q is None:
        assert (max_q, max_k) == (q.shape[1], k.shape[1])
        found = [_row(*each, scale, *limits) for each in zip(q, k, v, strict=True)]
        return torch.stack([out for out, _ in found]), torch.stack([lse for _, lse in found])
    assert ends_q is ends_k
    assert ends_q.dtype == torch.int32
    out, lse = torch.zeros_like(q), torch.zeros(q.shape[1], len(q))
    for begin, end in pairwise(ends_q.tolist()):
        assert end - begin <= max_q == max_k
        at = slice(begin, end)
        out[at], lse[:, at] = _row(q[at], k[at], v[at], scale, *limits)
    return out, lse


def _row(q, k, v, scale, left, right):
    queries, keys, group = len(q), len(k), q.shape[1] // k.shape[1]
    q, k, v = (x.transpose(0, 1).double() for x in (q, k, v))
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    distance = torch.arange(keys) - torch.arange(queries)[:, None] - (keys - queries)
    seen = torch.ones_like(distance, dtype=torch.bool)
    if left is not None and left >= 0:
        seen &= distance >= -left
    if right is not None and right >= 0:
        seen &= distance <= right
    scores = (q @ k.mT * scale).masked_fill(~seen, -torch.inf)
    lse = scores.logsumexp(-1)
    out = scores.softmax(-1).nan_to_num(0.0) @ v
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)  # of fully masked rows
    return out.transpose(0, 1), lse.float()


@pytest.fixture
def anywhere(monkeypatch):
    """The backend on a CPU, in any dtype, with the kernel of plain operators."""
    plain = lambda call: None  # noqa: E731
    monkeypatch.setattr(flash, "_shape_objection", plain)
    monkeypatch.setattr(flash, "_device_objection", plain)
    monkeypatch.setattr(
        torch.ops.aten,
        "_flash_attention_forward",
        lambda *args, **options: tuple(
            x.to(args[0].dtype) if x.dim() == args[0].dim() else x for x in kernel(*args, **options)
        ),
        raising=False,
    )


def test_random_calls_are_the_definition(anywhere, unchecked):
    accepted = 0
    for seed in range(80_000, 80_900):
        case = draw_case(seed, torch.float32)
        call = prepare(case.q, case.k, case.v, **case.given).call
        if call.needs_grad or flash.objection(call) is not None:
            continue
        compare(attend(case.q, case.k, case.v, **case.given, backend="flash"), case, what="flash")
        accepted += 1
    assert accepted > 30


@pytest.mark.parametrize("mask", [Causal() & Padding(LEFT), Causal() & Documents(IDS), Causal()])
def test_partial_results_are_those_of_the_definition(mask, anywhere, unchecked):
    q, k, v = torch.randn(2, 4, 9, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 5)
    found, want = (attend_partial(q, k, v, mask=mask, backend=name) for name in ("flash", "eager"))
    torch.testing.assert_close(found.out, want.out)
    torch.testing.assert_close(found.lse, want.lse)


def test_keys_that_only_some_queries_see_have_no_part_in_others(anywhere, unchecked):
    """The first two queries precede every key of a part."""
    q, k = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 3, 8)
    given = {"mask": Causal(), "span": Span(0, 5, 2, 5)}
    found, want = (attend_partial(q, k, k, **given, backend=name) for name in ("flash", "eager"))
    assert found.lse[0, 0, :2].tolist() == [-torch.inf] * 2
    torch.testing.assert_close(found.out, want.out)


class Gpu:
    """A call as if on a GPU with the kernel."""

    def __init__(self, monkeypatch):
        for module in (flash, sdpa):
            monkeypatch.setattr(module, "has_flash", lambda device: True)

    def call(self, dtype=torch.bfloat16, dim=64, length=9, **options):
        q, k = (torch.zeros(1, heads, length, dim, dtype=dtype) for heads in (4, 2))
        call = prepare(q, k, k, **options, backend="eager").call
        return replace(call, device=torch.device("cuda", 0))


def test_objections(monkeypatch):
    assert "for CUDA, got cpu" in flash.objection(
        prepare(*(torch.zeros(1, 2, 3, 8, dtype=torch.float16),) * 3).call
    )
    q = torch.zeros(1, 2, 3, 8, dtype=torch.float16)
    old = replace(prepare(q, q, q).call, device=torch.device("cuda", 0))
    assert "NVIDIA GPU since the A100" in flash.objection(old)
    call = Gpu(monkeypatch).call
    assert flash.objection(call()) is None
    assert flash.objection(call(mask=Causal() & SlidingWindow(4))) is None
    assert "float16 and bfloat16" in flash.objection(call(torch.float32))
    assert "head dims of 8, 16" in flash.objection(call(dim=60))
    assert "head dims of 8, 16" in flash.objection(call(dim=264))
    assert "softcap" in flash.objection(call(softcap=3.0))
    assert "score_bias" in flash.objection(call(score_bias=Alibi.for_heads(4)))
    assert "scale=-1.0" in flash.objection(call(scale=-1.0))
    assert "dropout" in flash.objection(call(dropout=0.5))
    assert "windows that end" in flash.objection(call(mask=Causal() & Chunked(4)))
    with_gradients = call(sinks=torch.zeros(4)).but(needs_grad=True)
    assert "no gradient of its log-sum-exp" in flash.objection(with_gradients)
    assert flash.objection(call().but(needs_grad=True)) is None


@pytest.mark.parametrize(
    ("length", "options", "name"),
    [
        (1, {}, "flash"),
        (4096, {"mask": Causal()}, "flash"),
        (4096, {"mask": Causal() & SlidingWindow(512)}, "flash"),
        (65536, {"mask": Causal()}, "sdpa"),
    ],
)
def test_automatic_choice(length, options, name, monkeypatch):
    """cuDNN's kernel, which `sdpa` calls, plans every new shape: that pays for long prompts and in
    training."""
    call = Gpu(monkeypatch).call(length=length, dim=128, **options)
    call = call.but(num_heads=32, num_kv_heads=8)
    assert choose(call) == name
    if options == {"mask": Causal()}:
        assert choose(call.but(needs_grad=True)) == "sdpa"


def test_a_step_of_a_padded_batch_avoids_a_plan(monkeypatch):
    padding = Padding(torch.arange(300)[None] >= torch.tensor([[0], [40]]))
    q, k = torch.zeros(2, 8, 1, 64, dtype=torch.half), torch.zeros(2, 2, 300, 64, dtype=torch.half)
    span = Span(299, 300, 0, 300)
    call = prepare(q, k, k, mask=Causal() & padding, span=span, backend="eager").call
    Gpu(monkeypatch)
    assert choose(replace(call, device=torch.device("cuda", 0))) == "grouped"
