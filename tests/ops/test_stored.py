"""Attention to what is stored: tensors, codes, codes of rotated values, and pages."""

import random

import pytest
import torch

from paged import coded, in_pages, part_of
from regard import Part, prepare
from regard.cache.codes import QuantizedStream, quantize
from regard.cache.paging.reading import PagedStream
from regard.cache.parts import Streams, storage_of
from regard.cache.rotation import blocks_of, hadamard
from regard.ops.backends import BACKENDS
from regard.ops.partial import Partial
from regard.ops.stored import partial_of, run_of
from session import LONG

KEYS = 21


def drawn(width, v_width, dtype, *, joined=False, queries=2):
    torch.manual_seed(4)
    q = torch.randn(2, 4, queries, width).to(dtype)
    k, v = torch.randn(2, 2, KEYS, width).to(dtype), torch.randn(2, 2, KEYS, v_width).to(dtype)
    return (q, k, k[..., :v_width]) if joined else (q, k, v)


def as_codes(x, bits, blocks):
    codes, scales = quantize(hadamard(x.float(), blocks), bits, 16)
    return QuantizedStream(codes, scales, bits, 16, x.shape[-1], x.dtype, blocks)


def expected(call, q, part):
    """The definition, on the values that the codes stand for, in float64."""
    k, v = (x.double() for x in call.keys_and_values(part.as_tensors()))
    return prepare(q.double(), k, v, scale=call.scale, backend="eager").partial(
        q.double(), (Part(0, KEYS, (k, v)),)
    )


CASES = {  # widths, bits and rotations of keys and of values
    "both rotated": (32, 32, (4, 4), ((32,), (32,))),
    "keys rotated": (32, 48, (4, 8), ((32,), ())),
    "values rotated": (32, 48, (8, 4), ((), (32, 16))),
    "blocks": (48, 48, (6, 4), (blocks_of(48), blocks_of(48))),
    "not rotated": (32, 32, (8, 8), ((), ())),
}


COMPILED = CASES if LONG else ("both rotated", "blocks")  # a second each: the kernel is compiled
EACH = [*((name, backend) for backend in ("grouped", "eager") for name in CASES)]


@pytest.mark.parametrize(("case", "backend"), [*EACH, *((name, "fused") for name in COMPILED)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_queries_are_rotated_as_the_keys_and_outputs_back(case, backend, dtype):
    width, v_width, bits, blocks = CASES[case]
    q, k, v = drawn(width, v_width, dtype)
    streams = [as_codes(x, *each) for x, *each in zip((k, v), bits, blocks, strict=True)]
    part = Part(0, KEYS, Streams(streams))
    agrees(backend, q, k, v, part, min(bits))


@pytest.mark.parametrize("backend", ["grouped", "fused", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_of_one_stream_the_first_columns_are_rotated_in_keys_and_values(backend, dtype):
    q, k, v = drawn(48, 32, dtype, joined=True)
    part = Part(0, KEYS, Streams([as_codes(k, 4, (32,))]))
    agrees(backend, q, k, v, part, 4)


@pytest.mark.parametrize("backend", ["grouped", "fused", "eager"])
@pytest.mark.parametrize("by_channel", [False, True])
def test_pages_of_rotated_codes(backend, by_channel):
    q, k, v = drawn(32, 32, torch.float32)
    paged = in_pages((k, v), random.Random(8), page_size=16)
    rotations = () if by_channel else (32,), (32,)
    agrees(backend, q, k, v, part_of(coded(paged, (4, 4), rotations, by_channel=by_channel)), 4)


@pytest.mark.parametrize("backend", ["grouped", "fused", "eager"])
def test_pages_of_joined_codes_with_scales_by_channel(backend):
    q, k, v = drawn(48, 32, torch.float32, joined=True)
    paged = coded(in_pages((k,), random.Random(8), page_size=16), (6,), ((),), by_channel=True)
    agrees(backend, q, k, v, part_of(paged), 6)


def agrees(backend, q, k, v, part, bits):
    with torch.no_grad():
        try:
            call = prepare(q, k, v, backend=backend).stored_as(storage_of([part])).call
        except ValueError as error:
            pytest.skip(str(error))
        wanted, work = expected(call, q, part), BACKENDS[backend]
        out = run_of(work, call, q, part)
        assert out.dtype == q.dtype
        # codes are not rounded to bfloat16, as the values they stand for are: one rounding of each
        # key, 2 ** -9 of scores up to 4, and of each value
        atol, rtol = (2e-6, 1e-5) if q.dtype == torch.float32 else (0.04, 0.02)
        torch.testing.assert_close(out.double(), wanted.out, atol=atol, rtol=rtol)
        found = partial_of(work, call, q, part)
        assert isinstance(found, Partial)
        torch.testing.assert_close(found.out.double(), wanted.out, atol=atol, rtol=rtol)
        torch.testing.assert_close(found.lse.double(), wanted.lse, atol=atol, rtol=rtol)


def test_a_backend_gets_what_it_reads():
    """Its classes of streams, where its function says so; queries in float32 where these are
    rotated. Others are tensors."""
    q, k, v = drawn(32, 32, torch.bfloat16)
    call, got = prepare(q, k, v).call, []

    def run(call, q, k, v):
        got.append((type(k), type(v), q.dtype, call.dtype))
        return q.new_zeros(2, 4, 2, 32)

    every = dict.fromkeys((PagedStream, QuantizedStream), lambda streams: True)
    backend = BACKENDS["eager"]._replace(run=run, reads=every)
    half, wide = torch.bfloat16, torch.float32
    paged = in_pages((k, v), random.Random(8), page_size=16)
    run_of(backend, call, q, part_of(paged))
    run_of(backend, call, q, part_of(coded(paged, (4, 4), ((32,), (32,)))))
    plain = Streams([as_codes(x, 8, ()) for x in (k, v)])
    run_of(backend, call, q, Part(0, KEYS, plain))
    out = run_of(backend, call, q, Part(0, KEYS, Streams([as_codes(k, 4, (32,))] * 2)))
    assert got == [
        (PagedStream, PagedStream, half, half),
        (PagedStream, PagedStream, wide, wide),
        (QuantizedStream, QuantizedStream, half, half),
        (QuantizedStream, QuantizedStream, wide, wide),
    ]
    assert out.dtype == half
    got.clear()
    run_of(backend, call, q, Part(0, KEYS, (k, v)))
    never = dict.fromkeys(every, lambda streams: False)
    run_of(backend._replace(reads=never), call, q, part_of(paged))
    run_of(backend._replace(reads={}), call, q, Part(0, KEYS, plain))
    assert got == 3 * [(torch.Tensor, torch.Tensor, half, half)]
