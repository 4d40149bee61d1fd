"""The rates of a machine that estimates of backends are made of.

`regard tune` measures those of this machine and writes them to a file, which is read when a rate is
first used. Without that file the process measures quickly (`quick_rates.py`) and stores the result
for later ones. With `REGARD_SPEED=default` in the environment nothing is read or measured: the
defaults below, of two cores of an AMD EPYC with torch 2.13, are used. Only ratios of rates matter.
"""

import hashlib
import json
import os
import tempfile
import warnings
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path

import torch

from regard.ops.speed import DEFAULT, NARROWING, Speed, processor
from regard.tracing import is_immediate

FOLDER = "REGARD_CACHE"  # the environment variable that moves all that regard stores for a user
_MAX_BYTES = 1 << 16  # of a file of rates; a larger one is not read


class Rates:
    """The rates in use: the tuned ones if there are any, else those measured quickly.

    They are read or measured once, when a rate is first used, so that importing stays cheap and the
    number of threads is known; another thread meanwhile uses the defaults. Nothing is read or
    measured while a program is traced or a dispatch mode is active: a program that is compiled
    before any rate was used keeps the defaults, unless `SPEED.load()` was called. `version` counts
    how often the rates were set.

    Examples:
        >>> 0 < SPEED.call < 1
        True
    """

    version = 0

    def __getattr__(self, name: str) -> float:
        if name not in Speed.__dataclass_fields__:
            raise AttributeError(f"{type(self).__name__} has no rate {name!r}")
        if is_immediate():
            self.load()
            return float(vars(self)[name])
        return float(getattr(DEFAULT, name))

    def load(self) -> Speed:
        """Read or measure them now; return the rates in use."""
        self.use(DEFAULT)  # first: a warning that is an error is then raised only once
        self.use(read_speed() or _quick_speed() or DEFAULT)
        return self.now()

    def use(self, speed: Speed) -> None:
        """Use these rates from now on."""
        vars(self).update(asdict(speed), version=self.version + 1)

    def now(self) -> Speed:
        """The rates in use."""
        return Speed(**{rate.name: getattr(self, rate.name) for rate in fields(Speed)})


SPEED = Rates()


def speed_path(kind: str = "speed") -> Path:
    """The file of this machine's rates, for this version of torch and number of threads: those of
    `regard tune`, or with `kind="quick"` those that a process measured for later ones. Rates by
    other names, of another version of regard, are in another file."""
    narrowed = [os.environ.get(name) for name in NARROWING]
    facts = (*processor(), *narrowed, *(rate.name for rate in fields(Speed)))
    machine = hashlib.sha256(repr(facts).encode()).hexdigest()[:8]
    threads = torch.get_num_threads()
    return cache_folder() / f"{kind}-{torch.__version__}-{threads}-{machine}.json"


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
    speed, objection = _stored("speed")
    if objection is not None:
        warnings.warn(f"{objection}; `regard tune` writes it anew", stacklevel=2)
    return speed


def _quick_speed() -> Speed | None:
    """Rates that an earlier process measured quickly, or this one does now; None where neither may
    be. A file that is invalid or cannot be written is no reason for a warning."""
    if _asked_for_defaults() or not is_immediate():
        return None
    stored, _ = _stored("quick")
    if stored is not None:
        return stored
    from regard.ops.quick_rates import quick_speed

    speed, steady = quick_speed()
    if steady:
        with suppress(OSError, RuntimeError):  # a read-only disk, no home folder
            write_speed(speed, "quick")
    return speed


def _asked_for_defaults() -> bool:
    return os.environ.get("REGARD_SPEED") == "default"


def _stored(kind: str) -> tuple[Speed | None, str | None]:
    """The rates of a file, or why it is ignored; neither if there is no file."""
    if _asked_for_defaults():
        return None, None
    try:
        path = speed_path(kind)
        if not path.is_file():  # a pipe, say, might never end
            return None, None
        with path.open("rb") as file:
            text = file.read(_MAX_BYTES + 1)
        speed, objection = _parsed(text)
    except (OSError, RuntimeError, OverflowError) as error:  # no home folder, deeply nested JSON
        speed, objection, path = None, str(error), Path("the file of rates")
    return speed, None if objection is None else f"{path} is ignored: {objection}"


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


def write_speed(speed: Speed, kind: str = "speed") -> Path:
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
    path = speed_path(kind)
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
    """Remove the tuned file, and that of quick rates; returns the path of the former if there was
    one. The defaults are used from now on."""
    path = speed_path()
    SPEED.use(DEFAULT)
    speed_path("quick").unlink(missing_ok=True)
    if not path.exists():
        return None
    path.unlink()
    return path
