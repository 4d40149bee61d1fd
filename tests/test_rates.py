"""The rates that backends are chosen by: constants of a processor by its instructions, or stored
ones that fit it."""

import json
import os
import re
import subprocess
import sys
import warnings
from dataclasses import asdict, fields, replace

import pytest
import torch

import regard.rates as rates_module
from covering import few
from full_disk import files_of_at_most
from kernel_checks import run_python
from own_rates import own_rates
from regard import Causal, Span, prepare
from regard.rates import (
    AMX,
    APART,
    AVX2,
    AVX512,
    DEFAULT,
    FARTHEST,
    SPEED,
    ZEN4,
    Speed,
    compiles_wide,
    forget_speed,
    read_speed,
    speed_path,
    typical,
    write_speed,
)

__all__ = ["own_rates"]
pytestmark = pytest.mark.usefixtures("own_rates")


def faster(times, speed=None):
    """Rates of a machine so many times as fast as the usual one, or as another."""
    found = speed or typical(torch.get_num_threads())
    rates = {name: rate * times for name, rate in asdict(found).items()}
    return Speed(**{**rates, "call": found.call / times})


TUNED = faster(1.5)


def stored():
    return read_speed(torch.get_num_threads())


def test_rates_that_were_written_are_read_by_the_next_process():
    assert stored() is None
    path = write_speed(TUNED)
    assert stored() == TUNED == SPEED.now()
    start, machine = path.stem.rsplit("-", 1)
    assert start == f"speed-{torch.__version__}-{torch.get_num_threads()}"
    assert len(machine) == 8


def test_the_file_is_read_once_and_only_when_a_rate_is_needed(monkeypatch):
    asked = []
    monkeypatch.setattr(rates_module, "read_speed", asked.append)
    assert asked == []
    assert (SPEED.call, SPEED.products) == (typical(1).call, typical(1).products)
    assert asked == [1]


def test_without_a_file_nothing_is_measured_and_nothing_is_written(own_rates, monkeypatch):
    monkeypatch.setattr("time.perf_counter", lambda: pytest.fail("a clock was read"))
    assert SPEED.now() == typical(1)
    q = torch.zeros(1, 4, 2, 8)
    prepare(q, q, q, mask=Causal())
    assert list(own_rates.iterdir()) == []


def test_a_name_of_no_rate_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no rate 'speed_of_light'"):
        _ = SPEED.speed_of_light


def test_an_environment_variable_selects_the_same_rates_on_every_machine(monkeypatch):
    write_speed(TUNED)
    monkeypatch.setenv("REGARD_SPEED", "default")
    assert SPEED.now() == DEFAULT
    torch.set_num_threads(2)
    assert SPEED.now() == DEFAULT


def test_every_number_of_threads_has_a_file_of_its_own():
    first = write_speed(TUNED)
    torch.set_num_threads(2)
    assert speed_path() != first
    assert stored() is None


def test_the_rates_are_those_of_the_present_number_of_threads():
    """Whichever number of threads the process had first."""
    write_speed(TUNED)
    for threads, expected in ((1, TUNED), (2, typical(2)), (1, TUNED), (3, typical(3))):
        torch.set_num_threads(threads)
        assert SPEED.version & 0xFFFF == threads
        assert SPEED.products == expected.products
        assert SPEED.now() == expected
    SPEED.use(DEFAULT)  # for three threads alone
    torch.set_num_threads(1)
    assert SPEED.now() == TUNED
    torch.set_num_threads(3)
    assert SPEED.now() == DEFAULT


@pytest.mark.parametrize("name", rates_module.NARROWING)
def test_narrower_vectors_have_a_file_of_their_own(monkeypatch, name):
    first = write_speed(TUNED)
    monkeypatch.setenv(name, "another")
    assert speed_path() != first
    assert stored() is None


def test_processors_that_share_a_home_have_files_of_their_own(monkeypatch):
    first = write_speed(TUNED)
    monkeypatch.setattr(rates_module, "processor", lambda: ("another",))
    assert speed_path() != first
    assert stored() is None


def under_fake_tensors(run):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return run()


def under_a_dispatch_mode(run):
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False):
        return run()


def under_vmap(run):
    found = []
    torch.func.vmap(lambda x: (found.append(run()), x)[1])(torch.zeros(2))
    return found[0]


@pytest.mark.parametrize("within", [under_fake_tensors, under_a_dispatch_mode, under_vmap])
def test_the_same_rates_hold_inside_of_modes_and_transforms(within):
    write_speed(TUNED)
    assert within(lambda: SPEED.call) == TUNED.call


def test_a_relative_cache_folder_does_not_count(monkeypatch, tmp_path):
    monkeypatch.delenv("REGARD_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "elsewhere")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert speed_path().parent == tmp_path / ".cache" / "regard"


HOSTILE = {
    "empty": b"",
    "cut short": b'{"call": 5e-6',
    "not utf-8": b"\xff\xfe\xfa",
    "a list": b"[1, 2]",
    "a number": b"3",
    "nested": b"[" * 60_000,
    "a string": b'{"call": "fast"}',
    "true": b'{"call": true}',
    "null": b'{"call": null}',
    "a list for a rate": b'{"call": [4e-6]}',
    "nan": b'{"call": NaN}',
    "infinite": b'{"products": Infinity}',
    "negative": b'{"elements": -4e9}',
    "zero": b'{"row_half": 0}',
    "too fast": b'{"row_half": 1e300}',
    "a huge whole number": b'{"products": 1' + b"0" * 400 + b"}",
    "too many digits": b'{"products": ' + b"1" * 5000 + b"}",
    "too large": b" " * 100_000 + b"{}",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_a_file_that_cannot_be_right_is_ignored_with_a_warning(text):
    path = write_speed(TUNED)
    path.write_bytes(text)
    with pytest.warns(UserWarning, match=r"is ignored.*usual rates.*regard tune"):
        assert SPEED.now() == typical(1)


def of_a_busy_machine():
    """Rates that a process measured while packages were being installed: operators 34 times and
    reads 3 times as slow as they are."""
    usual = typical(1)
    return replace(usual, call=34 * usual.call, stream=usual.stream / 3)


def one_apart(name, times):
    usual = typical(1)
    return replace(usual, **{name: getattr(usual, name) * times})


REFUSED = {
    "of a busy machine": of_a_busy_machine(),
    "22 times slower": faster(1 / 22),
    "too fast as a whole": faster(1.1 * FARTHEST),
    **{
        f"{rate.name} {times:.2g} times": one_apart(rate.name, times)
        for rate in fields(Speed)
        for times in (1.1 * APART, 0.9 / APART)
    },
    **{f"{rate.name} nan": one_apart(rate.name, float("nan")) for rate in fields(Speed)},
}


@pytest.mark.parametrize("rates", REFUSED.values(), ids=REFUSED)
def test_rates_that_do_not_fit_the_processor_are_neither_written_nor_read(rates):
    with pytest.raises(ValueError, match=r"not written.*quiet machine"):
        write_speed(rates)
    assert not speed_path().exists()
    write_speed(TUNED).write_text(json.dumps(asdict(rates)))
    with pytest.warns(UserWarning, match=r"is ignored.*regard tune"):
        assert SPEED.now() == typical(1)


@pytest.mark.parametrize("times", [0.3, 1.0, 4.0])
def test_rates_of_a_faster_or_slower_machine_of_the_class_are_read(times):
    write_speed(faster(times))
    assert SPEED.now() == faster(times)
    uneven = replace(faster(times), stream=2 * faster(times).stream)
    write_speed(uneven)
    assert SPEED.load() == uneven


def test_a_warning_made_an_error_is_raised_once():
    write_speed(TUNED).write_bytes(b"{")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning):
            _ = SPEED.call
        assert SPEED.call == typical(1).call


def test_a_path_that_is_no_file_is_not_read():
    path = speed_path()
    path.mkdir(parents=True)
    assert stored() is None
    path.rmdir()
    os.mkfifo(path)  # reading one would never end
    assert stored() is None


def test_no_home_is_no_error(monkeypatch):
    def homeless(threads):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(rates_module, "speed_path", homeless)
    with pytest.warns(UserWarning, match="home"):
        assert stored() is None


def test_writing_is_whole_or_not_at_all():
    path = write_speed(TUNED)
    with files_of_at_most(8), pytest.raises(OSError, match=re.escape(str(path.parent))):
        write_speed(typical(1))
    assert stored() == TUNED
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_forgetting():
    path = write_speed(TUNED)
    assert SPEED.now() == TUNED
    assert forget_speed() == path
    assert not path.exists()
    assert SPEED.now() == typical(1)
    assert forget_speed() is None


def test_estimates_follow_the_rates_in_use():
    """At once, also where rates were read before, as a fit of rates to times does."""
    assert SPEED.fused == typical(1).fused
    for fused in (1e9, 3e9):
        SPEED.use(replace(typical(1), fused=fused))
        assert SPEED.fused == fused


def test_backends_are_chosen_by_the_rates_in_use():
    q, k = torch.zeros(1, 8, 1, 44), torch.zeros(1, 2, 4096, 44)

    def chosen():
        return prepare(q, k, k, mask=Causal(), span=Span(4095, 4096, 0, 4096)).name

    SPEED.use(replace(DEFAULT, row_float=DEFAULT.row_float / 4))
    assert chosen() == "grouped"
    SPEED.use(replace(DEFAULT, row_float=DEFAULT.row_float * 100))
    assert chosen() == "sdpa"


COMPILED = """
import torch
from torch._dynamo.testing import CompileCounter
from regard import Attention, Causal
from regard.rates import SPEED

counter = CompileCounter()
layer = Attention(32, 4, num_kv_heads=2, mask=Causal())
compiled = torch.compile(layer, backend=counter, fullgraph=True)
x = torch.randn(1, 8, 32)
compiled(x)
assert SPEED.threads == 2, vars(SPEED)
print(vars(SPEED)["call"])  # what the tracer chose by
layer(x)
compiled(x)
assert counter.frame_count == 1, counter.frame_count
"""


def test_a_compiled_program_is_chosen_by_the_same_rates(own_rates):
    torch.set_num_threads(2)
    tuned = faster(1.5, typical(2))
    write_speed(tuned)
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILED],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert float(done.stdout) == pytest.approx(tuned.call)


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
    for name in rates_module.NARROWING:
        monkeypatch.delenv(name, raising=False)

    def make(words, vectors, family=6):
        facts = ("x86_64", f"cpu family\t: {family}", "model\t\t: 25", f"flags\t: fpu {words}")
        monkeypatch.setattr(rates_module, "processor", lambda: facts)
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: vectors)

    return make


@pytest.mark.parametrize("words", INSTRUCTIONS)
@pytest.mark.parametrize("threads", [1, 3])
def test_the_constants_of_a_processor_follow_from_its_instructions(processor, words, threads):
    expected, vectors = INSTRUCTIONS[words]
    processor(words, vectors)
    assert typical(threads) == expected.of_threads(threads)


@pytest.mark.parametrize(("family", "expected"), [(25, ZEN4), (26, AVX512), (6, AVX512)])
def test_a_processor_that_halves_long_vectors_has_constants_of_its_own(
    processor, monkeypatch, family, expected
):
    processor("avx2 avx512f avx512_bf16", "AVX512", family)
    assert ZEN4.fused < AVX512.fused
    assert typical(2) == expected.of_threads(2)
    monkeypatch.setenv("NUMBA_CPU_FEATURES", "+avx2,+fma")
    assert typical(1).fused == AVX2.fused
    processor("avx2 fma", "AVX2", family)  # Zen 3
    assert typical(1) == AVX2


@pytest.mark.parametrize(("family", "expected"), [(25, ZEN4), (26, AVX512)])
def test_windows_names_the_family_in_words_of_its_own(processor, monkeypatch, family, expected):
    processor("", "AVX512")
    facts = ("AMD64", "16", f"AMD64 Family {family} Model 97 Stepping 2, AuthenticAMD", "AVX512")
    monkeypatch.setattr(rates_module, "processor", lambda: facts)
    assert typical(2) == expected.of_threads(2)


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
    ("features", "wide"),
    [("+avx2,+avx512f", True), ("+avx2,-avx512f,+fma", False), ("+sse4.2", False), ("", False)],
)
def test_the_width_of_a_vector(monkeypatch, features, wide):
    monkeypatch.setenv("NUMBA_CPU_FEATURES", features)
    assert compiles_wide() is wide
    monkeypatch.delenv("NUMBA_CPU_FEATURES")
    words = features.replace("+", "").replace("-avx512f,", "").replace(",", " ")
    monkeypatch.setattr(rates_module, "processor", lambda: ("x86_64", f"flags\t: fpu {words}"))
    assert compiles_wide() is wide


@pytest.mark.parametrize("name", few([None, "haswell", "generic"], 2))
def test_the_width_is_the_one_that_numba_compiles_for(name):
    pytest.importorskip("numba")
    code = (
        "from regard.ops.kernels.vectors import machine_lanes\n"
        "from regard.rates import compiles_wide\n"
        "print(compiles_wide(), machine_lanes() == 16)"
    )
    ours, numbas = run_python(code, **({} if name is None else {"NUMBA_CPU_NAME": name})).split()
    assert ours == numbas
