"""What a processor does in a second, by its instructions or as `regard tune` measured it.

A processor belongs to a class by the instructions that it has. The constants of the classes were
fitted by `benchmarks/fitting.py`: `AVX2` to random calls on an AMD EPYC without longer vectors, and
scaled to the speed of the others, since a processor may have rates of two classes; `AVX512` to
random calls on an AMD EPYC (Zen 5); `AMX` to the decoding steps and prefills of
`benchmarks/suite.py`, on an Intel Xeon. `ZEN4` has the rate of `fused` at which most random
calls of few queries on an AMD EPYC (Zen 4) run on the fastest backend. Only ratios of rates matter.

The same process on the same kind of machine uses the same rates, whatever else runs: nothing is
measured here. With `REGARD_SPEED=default` in the environment the rates are `DEFAULT` on every
machine and with every number of threads.
"""

import functools
import hashlib
import json
import os
import platform
import statistics
import warnings
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import torch

from regard.cache_folder import cache_folder, check_can_store
from regard.whole_file import write_whole

_MAX_BYTES = 1 << 16  # of a file of rates; no more of it is read
NARROWING = (  # environment variables that leave instructions out
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "NUMBA_CPU_NAME",
    "NUMBA_CPU_FEATURES",
)
FARTHEST = 8.0  # times: a machine is at most so much faster or slower than the constants
APART = 3.0  # times: by which one rate may differ from the constants more than the median rate does


@dataclass(frozen=True)
class Speed:
    """Rates of one machine.

    Attributes:
        call: seconds to start one operator.
        products: floating-point operations a second in large float32 matrix products.
        elements: elements a second streamed by plain elementwise work, in float32.
        row_float: elements of keys and values a second when torch's SDPA streams them for one
            block of queries, in float32.
        row_half: the same in half precision, where one-row products are converted first.
        rows_half: the same for a block of several half-precision queries.
        products_half: floating-point operations a second in torch's SDPA of many half-precision
            queries.
        scores: scores a second whose softmax torch's SDPA computes.
        stream: bytes a second that `fused` reads from memory.
        fused: floating-point operations a second that `fused` does on many rows.
        tiled: floating-point operations a second that `tiled` does in products.
    """

    call: float
    products: float
    elements: float
    row_float: float
    row_half: float
    rows_half: float
    products_half: float
    scores: float
    stream: float
    fused: float
    tiled: float

    def objection(self, typical: "Speed") -> str | None:
        """Why these cannot be the rates of a machine whose class has the `typical` ones, in a
        sentence; None if they can.

        A rate may be `FARTHEST` times the typical one, and its ratio to it `APART` times the median
        of these ratios: backends are chosen by ratios of rates.
        """
        faster = {}
        for name, usual in asdict(typical).items():
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                return f"{name}={value:.3g} is no rate"
            faster[name] = usual / value if name == "call" else value / usual
        middle = statistics.median(faster.values())
        for name, times in faster.items():
            value = getattr(self, name)
            given = f"{name}={value:.3g} is {times:.2g} times as fast as usual for such a processor"
            if not 1 / FARTHEST <= times <= FARTHEST:
                return given
            if not 1 / APART <= times / middle <= APART:
                return f"{given}, and its other rates are about {middle:.2g} times as fast"
        return None

    def faster(self, times: float, **others: float) -> "Speed":
        """Rates that are so many times as fast; `others` names rates with times of their own."""
        rates = {name: rate * others.get(name, times) for name, rate in asdict(self).items()}
        return Speed(**{**rates, "call": self.call / others.get("call", times)})

    def of_threads(self, threads: int) -> "Speed":
        """The rates of so many threads, if these are of one: products grow with the threads,
        reading up to `_FEEDING` threads."""
        reading = min(threads, _FEEDING)
        grown = {
            name: rate * (reading if name in _READING else threads)
            for name, rate in asdict(self).items()
            if name != "call"
        }
        return replace(self, **grown)


_READING = ("elements", "row_float", "row_half", "rows_half", "stream")
_FEEDING = 16  # threads that read as much as a processor's memory gives
_BY_PRODUCTS = ("products", "products_half")  # MKL and oneDNN choose their instructions
_BY_KERNELS = ("stream", "fused", "tiled")  # numba compiles these
_WIDE = {"avx512f", "avx512"}  # names of the instructions on vectors of 512 bits
_ZEN4 = " family 25 "  # of AMD, if it has these: Zen 3 is of the same family

# Of one thread.
AVX2 = Speed(
    call=5.9e-6, products=7.8e10, elements=1.2e9, row_float=2.1e9, row_half=7.0e8, rows_half=5.4e9,
    products_half=7.7e10, scores=2.2e9, stream=1.5e10, fused=6.0e10, tiled=1.5e11,
)  # fmt: skip
AVX512 = Speed(
    call=6.3e-6, products=6.3e10, elements=2.3e9, row_float=1.4e9, row_half=6.2e8, rows_half=2.9e9,
    products_half=4.5e10, scores=2.2e9, stream=1.3e10, fused=9.0e10, tiled=1.5e11,
)  # fmt: skip
ZEN4 = replace(AVX512, fused=5.8e10)  # it runs an instruction on 512 bits in two halves
AMX = Speed(
    call=5e-6, products=1.5e11, elements=2.0e9, row_float=2.6e9, row_half=4.2e9, rows_half=3.6e9,
    products_half=8.5e11, scores=3e9, stream=1.15e10, fused=1.1e11, tiled=9.5e11,
)  # fmt: skip
DEFAULT = AVX512.of_threads(2)


def typical(threads: int) -> Speed:
    """The constants of this processor for so many threads. Torch's kernels, products and compiled
    kernels have a class each, since environment variables narrow them separately. A processor of
    another kind than x86 has the constants of `AVX2`."""
    facts = " ".join(processor()).lower().replace("\t:", "")  # Linux writes "cpu family\t: 25"
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper()
    widest = (ZEN4 if _ZEN4 in facts else AVX512) if _WIDE & {*facts.split()} else AVX2
    if "amx_bf16" in facts and ("AVX" not in limit or "AMX" in limit) and "SSE" not in limit:
        widest = AMX
    of_torch = widest if torch.backends.cpu.get_cpu_capability() == "AVX512" else AVX2
    of_kernels = widest if compiles_wide() else AVX2
    parts = {name: getattr(widest, name) for name in _BY_PRODUCTS}
    parts |= {name: getattr(of_kernels, name) for name in _BY_KERNELS}
    return replace(of_torch, **parts).of_threads(threads)


def compiles_wide() -> bool:
    """Whether numba compiles `fused` for vectors of 512 bits; asked without importing numba."""
    features = os.environ.get("NUMBA_CPU_FEATURES")
    if features is not None:
        return "+avx512f" in features.split(",")
    generic = os.environ.get("NUMBA_CPU_NAME", "").lower() == "generic"
    return not generic and bool(set(" ".join(processor()).lower().split()) & _WIDE)


@functools.cache
def processor() -> tuple[str, ...]:
    """The system's description of the processor, with the names of its vector instructions."""
    known = "vendor_id", "cpu family", "model", "stepping", "cache size", "flags", "CPU", "Features"
    facts = [platform.machine(), str(os.cpu_count()), os.environ.get("PROCESSOR_IDENTIFIER", "")]
    with suppress(OSError):
        first = Path("/proc/cpuinfo").read_text(errors="replace").split("\n\n")[0]
        facts += [line for line in first.splitlines() if line.startswith(known)]
    if len(facts) == 3:  # another system than Linux
        facts.append(torch.backends.cpu.get_cpu_capability())
    return tuple(facts)


def processor_name() -> str:
    """The model of this machine's processor, as its system names it."""
    names = (line.partition(": ")[2] for line in processor() if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


@functools.cache
def is_made_by(maker: str) -> bool:
    """Whether the processor names this maker, "AuthenticAMD" or "GenuineIntel"."""
    return maker in " ".join(processor())


class Rates:
    """The rates in use, of torch's present number of threads: stored ones, else the constants.

    They are read when a rate is first used, so that importing stays cheap; a program that is
    compiled uses the same ones. `version` is what a choice depends on beside its call. Whoever
    chooses reads it first: that makes the rates in use those of the present number of threads.

    Examples:
        >>> 0 < SPEED.call < 1
        True
    """

    threads = 0  # that the rates in use are for; none are in use yet
    uses = 0  # how often rates were given or read anew

    @property
    def version(self) -> int:
        return current_version()

    def __getattr__(self, name: str) -> float:
        if name not in Speed.__dataclass_fields__:
            raise AttributeError(f"{type(self).__name__} has no rate {name!r}")
        current_version()
        return float(vars(self)[name])

    def load(self) -> Speed:
        """Read the files anew; return the rates in use."""
        _known.clear()
        vars(self).update(threads=0, uses=self.uses + 1)
        return self.now()

    def use(self, speed: Speed) -> None:
        """Use these rates from now on, for torch's present number of threads."""
        _known[torch.get_num_threads()] = speed
        vars(self).update(threads=0, uses=self.uses + 1)
        current_version()

    def now(self) -> Speed:
        """The rates in use."""
        current_version()
        return _known[self.threads]


SPEED = Rates()
_known: dict[int, Speed] = {}  # by the number of threads


def current_version() -> int:
    """The version of the rates, once these are those of the present number of threads."""
    threads = torch.get_num_threads()
    if SPEED.threads != threads:
        if threads not in _known:
            _known[threads] = _usual(threads)  # first: a warning that is an error is raised once
            _known[threads] = read_speed(threads) or _usual(threads)
        vars(SPEED).update(asdict(_known[threads]), threads=threads)
    return SPEED.uses << 16 | threads


# The compiler runs this while it traces and takes the result for a constant, as
# `torch.compiler.assume_constant_result` says, which would import the compiler.
current_version._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _usual(threads: int) -> Speed:
    """The constants that are used where no rates are stored."""
    return DEFAULT if _are_default() else typical(threads)


def _are_default() -> bool:
    return os.environ.get("REGARD_SPEED") == "default"


def speed_path(threads: int | None = None) -> Path:
    """The file of this machine's rates that `regard tune` writes, for this version of torch and
    the present number of threads. Rates by other names, of another version of regard, are in
    another file."""
    narrowed = [os.environ.get(name) for name in NARROWING]
    facts = (*processor(), *narrowed, *(rate.name for rate in fields(Speed)))
    machine = hashlib.sha256(repr(facts).encode()).hexdigest()[:8]
    threads = torch.get_num_threads() if threads is None else threads
    return cache_folder() / f"speed-{torch.__version__}-{threads}-{machine}.json"


def read_speed(threads: int) -> Speed | None:
    """The stored rates for so many threads; None if there is no file or, with a warning, if this
    machine cannot have such rates."""
    if _are_default():
        return None
    path = Path("the file of rates")
    try:
        path = speed_path(threads)
        if not path.is_file():  # a pipe, say, might never end
            return None
        with path.open("rb") as file:
            stored = json.loads(file.read(_MAX_BYTES))
        speed = Speed(**{rate.name: float(stored[rate.name]) for rate in fields(Speed)})
        objection = speed.objection(typical(threads))
    except (OSError, RuntimeError, ArithmeticError, ValueError, TypeError, LookupError) as error:
        objection = str(error) if isinstance(error, OSError | RuntimeError) else repr(error)
    if objection is None:
        return speed
    warnings.warn(
        f"{path} is ignored, and the usual rates of such a processor are used: {objection}; "
        "`regard tune` writes it anew, `regard tune --forget` removes it",
        stacklevel=2,
    )
    return None


def write_speed(speed: Speed) -> Path:
    """Write rates for later processes; the file is replaced whole, or not at all.

    Raises:
        ValueError: if this machine cannot have such rates.
        OSError: if the folder cannot be written; the error names the way out.
    """
    objection = speed.objection(typical(torch.get_num_threads()))
    if objection is not None:
        raise ValueError(
            f"these rates are not written: {objection}; measure again on a quiet machine"
        )
    check_can_store("rates")
    path = speed_path()
    write_whole(path, json.dumps(asdict(speed), indent=2).encode())
    return path


def forget_speed() -> Path | None:
    """Remove the file; returns its path if there was one. The constants are used from now on."""
    path = speed_path()
    SPEED.use(_usual(torch.get_num_threads()))
    exists = path.exists()
    path.unlink(missing_ok=True)
    return path if exists else None
