"""torch's own kernel: what it returns of parts, and when it needs no dense mask."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from covering import few
from regard import (
    EVERYTHING,
    Alibi,
    Causal,
    Dense,
    Part,
    SlidingWindow,
    Span,
    attend,
    attend_partial,
    explain,
    prepare,
)
from regard.ops.backends import sdpa


def definition(q, k, v, keep, bias=0.0):
    """Output and log-sum-exp in float64, by the formula; 0 and -inf in fully masked rows."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = (q @ k.mT * q.shape[3] ** -0.5 + bias).masked_fill(~keep, -torch.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ v, scores.logsumexp(-1)


ALL = torch.ones(7, 11, dtype=torch.bool)
CAUSAL = ALL.tril(4)
SEEN = CAUSAL & (torch.arange(11) > 6)  # the first three queries may attend to no key


@pytest.mark.parametrize("backend", ["sdpa", "blocked"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("v_dim", [5, 8])
def test_a_partial_result_is_the_definition(backend, dtype, v_dim):
    """Causal from the first key on, from a later query on, windows, rows that see nothing, biases;
    what no query sees may be infinite."""
    q, k, v = (
        torch.randn(2, h, n, d).to(dtype) for h, n, d in ((4, 7, 8), (2, 11, 8), (2, 11, v_dim))
    )
    bias = torch.randn(4, 7, 11).to(dtype)
    first, later = Span(0, 7, 0, 11), Span(4, 11, 0, 11)
    for mask, span, keep in (
        (EVERYTHING, first, ALL),
        (Causal(), first, ALL.tril()),
        (Causal(), later, CAUSAL),
        (Causal() & SlidingWindow(3), later, CAUSAL & ~ALL.tril(1)),
        (Causal() & Dense(SEEN), later, SEEN),
    ):
        hidden = ~keep.any(0)[:, None]
        for added in (None, bias):
            options = {"mask": mask, "span": span, "score_bias": added, "backend": backend}
            spoiled = k.masked_fill(hidden, torch.inf), v.masked_fill(hidden, torch.nan)
            found = attend_partial(q, *spoiled, **options)
            wanted = definition(q, k, v, keep, 0.0 if added is None else added.double())
            rounding = 40 * torch.finfo(dtype).eps
            for got, want in zip(found, wanted, strict=True):
                assert got.dtype == dtype
                torch.testing.assert_close(got.double(), want, rtol=rounding, atol=rounding)


def test_no_keys_are_a_partial_result():
    """torch's kernel would end the interpreter: it divides by the number of blocks of keys."""
    q, k = torch.randn(1, 2, 3, 8), torch.randn(1, 1, 5, 8)
    for backend in ("sdpa", "grouped", "blocked"):
        made = prepare(q, k, k, span=Span(0, 3, 0, 5), backend=backend, partial=True)
        out, lse = made.partial(q, [Part(9, 12, (k[:, :, :3],) * 2)])
        assert (out == 0).all()
        assert (lse == -torch.inf).all()


def test_it_says_where_it_gives_no_log_sum_exp():
    q = torch.randn(1, 2, 3, 4)
    for x, words in (
        (q.bfloat16(), "in torch.bfloat16: torch's kernel rounds its outputs to it"),
        (q.clone().requires_grad_(), "with a gradient"),
        (q.to("meta"), "on meta"),
    ):
        with pytest.raises(ValueError, match=f"sdpa gives no log-sum-exp {words}"):
            attend_partial(x, x, x, backend="sdpa")
    with pytest.raises(ValueError, match=r"sdpa gives no log-sum-exp in compiled .* torch.func"):
        torch.func.functionalize(lambda x: attend_partial(x, x, x, backend="sdpa").out)(q)


@pytest.mark.parametrize("mask", [EVERYTHING, Causal(), Causal() & SlidingWindow(3)], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_is_the_definition(mask, dtype):
    q, k, v = (torch.randn(2, heads, 7, 8).to(dtype) for heads in (4, 2, 2))
    found, wanted = (attend(q, k, v, mask=mask, backend=each) for each in ("sdpa", "eager"))
    rounding = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(found, wanted, rtol=rounding, atol=rounding)


def test_a_causal_mask_of_the_same_tokens_is_never_dense(monkeypatch):
    given = []
    kernel = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda *tensors, **options: given.append(options) or kernel(*tensors, **options),
    )
    q = torch.randn(1, 2, 5, 8)
    attend(q, q, q, mask=Causal(), backend="sdpa")
    attend(q, q, q, mask=Causal() & SlidingWindow(2), backend="sdpa")
    causal, window = given
    assert causal.get("is_causal") and causal.get("attn_mask") is None
    assert window["attn_mask"].shape[-2:] == (5, 5)


def test_values_may_be_wider_or_narrower_than_keys():
    q = torch.randn(1, 2, 5, 8)
    for width in (3, 16):
        v = torch.randn(1, 2, 5, width)
        found, wanted = (attend(q, q, v, backend=each) for each in ("sdpa", "eager"))
        torch.testing.assert_close(found, wanted)


def test_where_torch_raises_in_bfloat16_others_run(monkeypatch):
    monkeypatch.setattr(sdpa, "NO_BFLOAT16", True)
    q, exact = torch.randn(1, 2, 70, 16).bfloat16(), torch.randn(1, 2, 70, 16)
    said = explain(q, q, q, mask=Causal())
    assert "sdpa     objects: torch's scaled_dot_product_attention raises in bfloat16" in said
    for mask in (EVERYTHING, Causal(), Causal() & SlidingWindow(9)):
        out = attend(q, q, q, mask=mask)
        right = attend(q.double(), q.double(), q.double(), mask=mask)
        assert (out - right).abs().max() <= 1.5 * 2**-8 * q.abs().max()
    assert "sdpa     objects" not in explain(exact, exact, exact, mask=Causal())


NARROWED = """
import torch
from regard import Causal, attend
q = torch.randn(1, 2, 70, 16).bfloat16().requires_grad_()
attend(q, q, q, mask=Causal()).float().sum().backward()
assert q.grad.isfinite().all()
"""


@pytest.mark.parametrize("capability", few(["avx2", "default"], 2))
def test_bfloat16_runs_with_narrower_vectors(capability):
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability}
    done = subprocess.run(
        [sys.executable, "-c", NARROWED], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask", [Causal(), Causal() & SlidingWindow(3)])
def test_on_a_gpu_heads_are_grouped_only_where_its_kernel_takes_that(mask, dtype, monkeypatch):
    """FlashAttention takes grouped heads in half precision without a mask; for others torch would
    store all scores. The call says that it is on a GPU; its tensors are here."""
    q, k, v = torch.randn(2, 6, 7, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 8)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    call = replace(prepare(q, k, v, mask=mask, backend="sdpa").call, device=torch.device("cuda", 0))
    monkeypatch.setattr(type(call), "keep", lambda call: call.mask.dense(call.span))
    flags = []
    real = torch.nn.functional.scaled_dot_product_attention

    def noted(q, k, v, **options):
        flags.append((options.get("enable_gqa", False), k.shape[1]))
        return real(q, k, v, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    out = sdpa.run(call, q, k, v)
    plain = dtype == torch.bfloat16 and mask == Causal()
    assert flags == [(True, 2) if plain else (False, 6)]
    want = attend(q.double(), k.double(), v.double(), mask=mask, backend="eager")
    torch.testing.assert_close(out.double(), want, atol=2e-2, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_on_a_gpu_a_bias_is_read_in_the_dtype_of_the_queries(dtype):
    """torch's kernels for GPUs read any bias so: one of float32 would be rounded, or misread."""
    q = torch.zeros(1, 2, 3, 8, dtype=dtype)
    gpu = torch.device("cuda", 0)
    for bias, taken in (
        (torch.zeros(2, 3, 3, dtype=dtype), True),
        (torch.zeros(2, 3, 3), False),
        (Alibi.for_heads(2), False),
    ):
        call = prepare(q, q, q, score_bias=bias, backend="sdpa").call
        objection = sdpa.objection(replace(call, device=gpu))
        assert (objection is None) is taken
        assert taken or f"reads biases in {dtype} on cuda" in objection
    single = prepare(q.float(), q.float(), q.float(), score_bias=Alibi.for_heads(2)).call
    assert sdpa.objection(replace(single, device=gpu)) is None


def test_on_a_gpu_a_bias_is_given_in_the_dtype_of_the_queries(monkeypatch):
    q = torch.randn(1, 2, 3, 8).half()
    call = prepare(q, q, q, score_bias=torch.randn(2, 3, 3).half(), backend="sdpa").call
    call, given = replace(call, device=torch.device("cuda", 0)), []
    real = torch.nn.functional.scaled_dot_product_attention

    def noted(*streams, **options):
        given.append(options["attn_mask"].dtype)
        return real(*streams, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    sdpa.run(call, q, q, q)
    assert given == [torch.float16]
