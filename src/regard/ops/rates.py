"""The rates of a machine that estimates of backends are made of.

The defaults below were measured on two cores of an AMD EPYC with torch 2.13; only their ratios
matter. `regard tune` measures those of this machine and writes them to a file, which is read here
when a rate is first used. With `REGARD_SPEED=default` in the environment that file is not read.
"""

import json
import os
import tempfile
import warnings
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch

FOLDER = "REGARD_CACHE"  # the environment variable that moves all that regard stores for a user
MARGIN = 100.0  # times: a measured rate further than this from the default is taken for an error
_MAX_BYTES = 1 << 16  # of a file of rates; a larger one is not read


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
        stream: bytes a second that `fused` reads from memory.
        fused: floating-point operations a second that `fused` does on many rows.
    """

    call: float = 4e-6
    products: float = 160e9
    elements: float = 4e9
    row_float: float = 7e9
    row_half: float = 2e9
    stream: float = 30e9
    fused: float = 350e9

    def objection(self) -> str | None:
        """Why these cannot be the rates of a machine, in a sentence; None if they can."""
        for rate in fields(self):
            value, usual = getattr(self, rate.name), getattr(DEFAULT, rate.name)
            if not usual / MARGIN <= value <= usual * MARGIN:
                return f"{rate.name}={value:.3g} is nowhere near the usual {usual:.3g}"
        return None


DEFAULT = Speed()


class Rates:
    """The rates in use: those of the tuned file if there is one, else the defaults.

    The file is read once, when a rate is first used, so that importing stays cheap and the number
    of threads is known. It is not read while a program is traced: a program that is compiled before
    any rate was used keeps the defaults, unless `SPEED.load()` was called. `version` counts how
    often the rates were set.

    Examples:
        >>> 0 < SPEED.call < 1
        True
    """

    version = 0

    def __getattr__(self, name: str) -> float:
        if name not in Speed.__dataclass_fields__:
            raise AttributeError(f"{type(self).__name__} has no rate {name!r}")
        if not torch.compiler.is_compiling():
            self.load()
            return float(vars(self)[name])
        return float(getattr(DEFAULT, name))

    def load(self) -> Speed:
        """Read the file now; return the rates in use."""
        self.use(DEFAULT)  # first: a warning that is an error is then raised only once
        self.use(read_speed() or DEFAULT)
        return self.now()

    def use(self, speed: Speed) -> None:
        """Use these rates from now on."""
        vars(self).update(asdict(speed), version=self.version + 1)

    def now(self) -> Speed:
        """The rates in use."""
        return Speed(**{rate.name: getattr(self, rate.name) for rate in fields(Speed)})


SPEED = Rates()


def speed_path() -> Path:
    """The file of this machine's rates, for this version of torch and number of threads."""
    return cache_folder() / f"speed-{torch.__version__}-{torch.get_num_threads()}.json"


def cache_folder() -> Path:
    """`$REGARD_CACHE`; else `$XDG_CACHE_HOME/regard`; else `~/.cache/regard`.

    Raises:
        RuntimeError: if neither is set and the user has no home.
    """
    given, base = os.environ.get(FOLDER), Path(os.environ.get("XDG_CACHE_HOME", ""))
    if given:
        return Path(given)
    return (base if base.is_absolute() else Path.home() / ".cache") / "regard"


def read_speed() -> Speed | None:
    """The tuned rates; None if there is no file, or, with a warning, if it is invalid.

    A rate that the file does not have is the default.
    """
    if os.environ.get("REGARD_SPEED") == "default":
        return None
    try:
        path = speed_path()
        if not path.is_file():  # a pipe, say, might never end
            return None
        with path.open("rb") as file:
            text = file.read(_MAX_BYTES + 1)
        speed, objection = _parsed(text)
    except (OSError, RuntimeError, OverflowError) as error:  # no home folder, deeply nested JSON
        speed, objection, path = None, str(error), Path("the file of rates")
    if objection is not None:
        warnings.warn(f"{path} is ignored: {objection}; `regard tune` writes it anew", stacklevel=2)
        return None
    return speed


def _parsed(text: bytes) -> tuple[Speed | None, str | None]:
    """Rates, or why they are invalid."""
    if len(text) > _MAX_BYTES:
        return None, "it is too large"
    try:
        held = json.loads(text)
    except ValueError:
        return None, "it is not JSON"
    if not isinstance(held, dict):
        return None, "it does not hold rates by name"
    found = {}
    for name in Speed.__dataclass_fields__.keys() & held.keys():
        if type(held[name]) not in (int, float):
            return None, f"{name} is not a number"
        found[name] = float(held[name])
    speed = Speed(**found)
    objection = speed.objection()
    return (None, objection) if objection else (speed, None)


def write_speed(speed: Speed) -> Path:
    """Write rates for later processes; the file is replaced whole, or not at all.

    Raises:
        ValueError: if they cannot be the rates of a machine.
        OSError: if the folder cannot be written.
    """
    objection = speed.objection()
    if objection is not None:
        raise ValueError(
            f"these rates are not written: {objection}; measure again on a quiet machine"
        )
    path = speed_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.stem}-", suffix=".part")
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(asdict(speed), file, indent=2)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return path


def forget_speed() -> Path | None:
    """Remove the file and use the defaults; returns the path of the file if there was one."""
    path = speed_path()
    SPEED.use(DEFAULT)
    if not path.exists():
        return None
    path.unlink()
    return path
