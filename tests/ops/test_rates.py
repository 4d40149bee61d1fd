"""The rates that backends are chosen by: constants of the processor, or stored ones that fit it."""

import json
import os
import re
import subprocess
import sys
import warnings
from dataclasses import asdict, fields, replace

import pytest
import torch

import regard.ops.rates as rates_module
from full_disk import files_of_at_most
from own_rates import own_rates
from regard import Causal, Span, prepare
from regard.ops.rates import SPEED, forget_speed, read_speed, speed_path, write_speed
from regard.ops.speed import APART, DEFAULT, FARTHEST, Speed, typical

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
        write_speed(DEFAULT)
    assert stored() == TUNED
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_forgetting():
    path = write_speed(TUNED)
    assert SPEED.now() == TUNED
    assert forget_speed() == path
    assert not path.exists()
    assert SPEED.now() == typical(1)
    assert forget_speed() is None


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
from regard.ops.rates import SPEED

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
