"""The rates that backends are chosen by: stored, read, measured quickly, bounded, forgotten."""

import json
import os
import subprocess
import sys
import warnings
from dataclasses import asdict, fields, replace

import pytest
import torch

import regard.ops.quick_rates as quick_module
import regard.ops.rates as speed_module
from regard import Causal, Span, attend, prepare
from regard.bench.tuning import MEASURED, Tuning, measure_speed
from regard.ops.rates import SPEED, Rates, forget_speed, read_speed, speed_path, write_speed
from regard.ops.speed import DEFAULT, MARGIN, Speed

TUNED = Speed(call=5e-6, products=1e11, elements=3e9, row_float=6e9, row_half=1e9)


@pytest.fixture(autouse=True)
def _cache(monkeypatch, tmp_path):
    """A cache of this test's own, nothing measured, and the same rates afterwards."""
    assert os.environ["REGARD_SPEED"] == "default"  # what every other test runs with
    monkeypatch.delenv("REGARD_SPEED")
    monkeypatch.delenv("REGARD_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(quick_module, "quick_speed", lambda: (DEFAULT, False))
    before = dict(vars(SPEED))
    yield
    vars(SPEED).clear()
    vars(SPEED).update(before)


def test_what_was_written_is_read():
    assert read_speed() is None
    path = write_speed(TUNED)
    assert read_speed() == TUNED
    assert Rates().now() == TUNED
    start, machine = path.stem.rsplit("-", 1)
    assert start == f"speed-{torch.__version__}-{torch.get_num_threads()}"
    assert len(machine) == 8


def test_the_file_is_read_once_and_only_when_a_rate_is_needed(monkeypatch):
    asked = []
    monkeypatch.setattr(speed_module, "read_speed", lambda: asked.append(1))
    rates = Rates()
    assert asked == []
    assert rates.call == DEFAULT.call
    assert rates.products == DEFAULT.products
    assert asked == [1]


def test_what_is_no_rate_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no rate 'speed_of_light'"):
        _ = Rates().speed_of_light


def test_an_environment_variable_selects_the_default_rates(monkeypatch):
    write_speed(TUNED)
    monkeypatch.setenv("REGARD_SPEED", "default")
    assert Rates().now() == DEFAULT


def test_every_number_of_threads_has_a_file_of_its_own():
    first = write_speed(TUNED)
    torch.set_num_threads(2)
    assert speed_path() != first
    assert read_speed() is None


@pytest.mark.parametrize("name", speed_module.NARROWING)
def test_narrower_vectors_have_a_file_of_their_own(monkeypatch, name):
    first = write_speed(TUNED)
    monkeypatch.setenv(name, "another")
    assert speed_path() != first
    assert read_speed() is None


def test_processors_that_share_a_home_have_files_of_their_own(monkeypatch):
    first = write_speed(TUNED)
    monkeypatch.setattr(speed_module, "processor", lambda: ("another",))
    assert speed_path() != first
    assert read_speed() is None


@pytest.fixture
def measured(monkeypatch):
    """How often the machine was measured, and what comes of it: the rates, and steadiness."""
    result = [FOUND, True]
    times = []
    monkeypatch.setattr(quick_module, "quick_speed", lambda: (times.append(1), tuple(result))[1])
    return times, result


FOUND = replace(DEFAULT, call=3e-6)


def test_the_first_process_measures_and_later_ones_read(measured):
    times, _ = measured
    assert Rates().call == 3e-6
    assert Rates().now() == FOUND
    assert len(times) == 1
    assert speed_path("quick").is_file() and not speed_path().exists()
    write_speed(TUNED)  # what `regard tune` found wins
    assert Rates().now() == TUNED
    assert forget_speed() == speed_path()
    assert not speed_path("quick").exists()


def test_what_a_busy_machine_gave_is_used_and_not_stored(measured):
    times, result = measured
    result[1] = False
    assert Rates().now() == Rates().now() == FOUND
    assert len(times) == 2
    assert not speed_path("quick").exists()


def test_a_damaged_file_of_quick_rates_is_measured_anew_without_a_warning(measured):
    write_speed(TUNED, "quick").write_bytes(b"{")
    assert Rates().now() == FOUND
    assert json.loads(speed_path("quick").read_text()) == asdict(FOUND)


def test_where_nothing_can_be_written_every_process_measures(measured, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path / "file"))
    assert Rates().now() == Rates().now() == FOUND
    assert len(measured[0]) == 2


def test_the_defaults_that_were_asked_for_are_not_measured(measured, monkeypatch):
    monkeypatch.setenv("REGARD_SPEED", "default")
    assert Rates().now() == DEFAULT
    assert measured[0] == []


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
def test_nothing_is_measured_inside_of_modes_and_transforms(measured, within):
    rates = Rates()
    assert within(lambda: rates.call) == DEFAULT.call
    assert measured[0] == []
    assert rates.call == FOUND.call


def test_nothing_is_measured_where_one_backend_can_run(measured):
    vars(SPEED).clear()
    q = torch.randn(1, 2, 300, 8)
    sinks = torch.zeros(2)
    attend(q[:, :, :0], q, q)  # no queries: the definition alone
    assert measured[0] == []
    attend(q, q, q, sinks=sinks)
    assert measured[0] == [1]


def test_a_relative_cache_folder_does_not_count(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", "elsewhere")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert speed_path().parent == tmp_path / ".cache" / "regard"


def test_rates_that_a_file_lacks_are_those_of_the_source():
    path = write_speed(TUNED)
    path.write_text(json.dumps({"call": 5e-6, "of another version": [1]}))
    assert read_speed() == replace(DEFAULT, call=5e-6)


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
    with pytest.warns(UserWarning, match="is ignored: .*regard tune"):
        assert Rates().now() == DEFAULT


def test_a_warning_made_an_error_is_raised_once():
    write_speed(TUNED).write_bytes(b"{")
    rates = Rates()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning):
            _ = rates.call
        assert rates.call == DEFAULT.call


def test_what_is_no_file_is_not_read():
    path = speed_path()
    path.mkdir(parents=True)
    assert read_speed() is None
    path.rmdir()
    os.mkfifo(path)  # reading one would never end
    assert read_speed() is None


def test_no_home_is_no_error(monkeypatch):
    def homeless(kind):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(speed_module, "speed_path", homeless)
    with pytest.warns(UserWarning, match="home"):
        assert read_speed() is None


def test_writing_is_whole_or_not_at_all(monkeypatch):
    path = write_speed(TUNED)

    def torn(values, file, indent):
        file.write('{"call": ')
        raise OSError("no space left")

    monkeypatch.setattr(speed_module.json, "dump", torn)
    with pytest.raises(OSError, match="no space"):
        write_speed(DEFAULT)
    assert read_speed() == TUNED
    assert [each.name for each in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan"), 2 * MARGIN, 0.5 / MARGIN])
@pytest.mark.parametrize("name", [rate.name for rate in fields(Speed)])
def test_rates_are_bounded(name, factor):
    wrong = replace(DEFAULT, **{name: getattr(DEFAULT, name) * factor})
    with pytest.raises(ValueError, match=f"not written: {name}"):
        write_speed(wrong)
    assert not speed_path().exists()


def test_forgetting():
    path = write_speed(TUNED)
    SPEED.load()
    assert SPEED.now() == TUNED
    assert forget_speed() == path
    assert not path.exists()
    assert SPEED.now() == DEFAULT
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
assert vars(SPEED) == {}, vars(SPEED)  # a tracer does not read files
layer(x)
assert SPEED.call == 5e-6, vars(SPEED)
compiled(x)
assert counter.frame_count == 1, counter.frame_count
"""


def test_a_tracer_never_reads_the_file_and_rates_that_come_later_compile_nothing_anew():
    torch.set_num_threads(2)
    write_speed(TUNED)
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILED],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_every_rate_is_measured():
    assert MEASURED.keys() <= asdict(DEFAULT).keys()
    tuning = measure_speed(rounds=3, size=0.01)
    assert all(value > 0 for value in asdict(tuning.speed).values())
    assert tuning.spread.keys() == MEASURED.keys()


def test_a_busy_machine_is_not_tuned():
    quiet = dict.fromkeys(MEASURED, 1.1)
    assert Tuning(TUNED, quiet).objection() is None
    assert "busy: call varied 9.0-fold" in Tuning(TUNED, {**quiet, "call": 9.0}).objection()
    assert "nowhere near" in Tuning(replace(TUNED, call=1.0), quiet).objection()
