"""The class of a processor by its instructions, without measuring, and rates that fit it."""

from dataclasses import asdict, fields, replace

import pytest
import torch

import regard.ops.speed as speed_module
from kernel_checks import run_python
from regard.ops.speed import (
    AMX,
    APART,
    AVX2,
    AVX512,
    FARTHEST,
    Speed,
    kernel_lanes,
    typical,
)

INSTRUCTIONS = {
    "avx2": (AVX2, "DEFAULT"),
    "avx2 fma": (AVX2, "AVX2"),
    "avx2 avx512f": (AVX512, "AVX512"),
    "avx2 avx512f avx512_bf16": (AVX512, "AVX512"),
    "avx2 avx512f avx512_bf16 amx_tile amx_bf16": (AMX, "AVX512"),
    "asimd bf16 sve": (AVX2, "SVE256"),
}


@pytest.fixture
def processor(monkeypatch):
    """A processor with these instructions, and the vectors that torch uses on it."""
    for name in speed_module.NARROWING:
        monkeypatch.delenv(name, raising=False)

    def make(words, vectors):
        monkeypatch.setattr(speed_module, "processor", lambda: ("x86_64", f"flags\t: fpu {words}"))
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: vectors)

    return make


@pytest.mark.parametrize("words", INSTRUCTIONS)
@pytest.mark.parametrize("threads", [1, 3])
def test_the_constants_of_a_processor_follow_from_its_instructions(processor, words, threads):
    expected, vectors = INSTRUCTIONS[words]
    processor(words, vectors)
    assert typical(threads) == expected.of_threads(threads)


def test_narrowed_vectors_and_instructions_have_constants_of_their_own(processor, monkeypatch):
    processor("avx2 avx512f avx512_bf16", "AVX2")  # ATEN_CPU_CAPABILITY=avx2
    found = typical(1)
    assert (found.row_float, found.scores) == (AVX2.row_float, AVX2.scores)
    assert (found.products_half, found.tiled) == (AVX512.products_half, AVX512.tiled)
    assert (found.stream, found.fused) == (AVX512.stream, AVX512.fused)
    monkeypatch.setenv("NUMBA_CPU_FEATURES", "+avx2,+fma")
    assert (typical(1).stream, typical(1).products) == (AVX2.stream, AVX512.products)


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ("AVX512_CORE", AVX512),
        ("AVX512_CORE_BF16", AVX512),
        ("AVX512_CORE_AMX", AMX),
        ("AVX2", AVX512),
    ],
)
def test_products_that_are_limited_have_the_constants_of_the_limit(
    processor, monkeypatch, limit, expected
):
    processor("avx2 avx512f avx512_bf16 amx_tile amx_bf16", "AVX512")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    assert typical(1).products_half == expected.products_half


def test_more_threads_start_operators_as_fast_and_do_more():
    one, two, many = (asdict(AVX512.of_threads(threads)) for threads in (1, 2, 128))
    for name, rate in asdict(AVX512).items():
        assert one[name] == rate
        if name == "call":
            assert two[name] == many[name] == rate
        else:
            assert rate < two[name] < many[name] <= 128 * rate
    assert many["stream"] < 128 * one["stream"]  # the memory does not grow with the cores


@pytest.mark.parametrize("found", [AVX2, AVX512, AMX])
def test_the_constants_are_rates_of_their_class(found):
    assert found.objection(found) is None
    assert found.of_threads(2).objection(found.of_threads(2)) is None


@pytest.mark.parametrize("rate", [each.name for each in fields(Speed)])
@pytest.mark.parametrize("times", [1.1 * APART, 0.9 / APART, 0.0, -1.0, float("nan")])
def test_one_rate_that_does_not_fit_the_others_is_named(rate, times):
    wrong = replace(AMX, **{rate: times * getattr(AMX, rate)})
    assert wrong.objection(AMX).startswith(f"{rate}=")


@pytest.mark.parametrize("times", [1.1 * FARTHEST, 0.9 / FARTHEST])
def test_a_machine_that_is_far_from_its_class_in_all_is_refused(times):
    rates = {name: rate * times for name, rate in asdict(AMX).items()}
    wrong = Speed(**{**rates, "call": AMX.call / times})
    assert "as fast as usual" in wrong.objection(AMX)


@pytest.mark.parametrize(
    ("features", "lanes"),
    [("+avx2,+avx512f", 16), ("+avx2,-avx512f,+fma", 8), ("+sse4.2", 4), ("", 4)],
)
def test_the_width_of_a_vector(monkeypatch, features, lanes):
    monkeypatch.setenv("NUMBA_CPU_FEATURES", features)
    assert kernel_lanes() == lanes
    monkeypatch.delenv("NUMBA_CPU_FEATURES")
    words = features.replace("+", "").replace("-avx512f,", "").replace(",", " ")
    monkeypatch.setattr(speed_module, "processor", lambda: ("x86_64", f"flags\t: fpu {words}"))
    assert kernel_lanes() == lanes


@pytest.mark.parametrize("name", [None, "generic", "haswell"])
def test_the_width_is_the_one_that_numba_compiles_for(name):
    pytest.importorskip("numba")
    code = (
        "from regard.ops.kernels.intrinsics import machine_lanes\n"
        "from regard.ops.speed import kernel_lanes\n"
        "print(kernel_lanes(), machine_lanes())"
    )
    ours, numbas = run_python(code, **({} if name is None else {"NUMBA_CPU_NAME": name})).split()
    assert ours == numbas
