"""The rates that estimates of backends are made of: constants of a class of processors, or those
that `regard tune` measured and stored.

The same process on the same kind of machine uses the same rates, whatever else runs: nothing is
measured here. With `REGARD_SPEED=default` in the environment the rates are `DEFAULT` on every
machine and with every number of threads. Only ratios of rates matter.
"""

import hashlib
import json
import os
import warnings
from dataclasses import asdict, fields
from pathlib import Path

import torch

from regard.cache_folder import cache_folder, check_can_store
from regard.ops.speed import DEFAULT, NARROWING, Speed, processor, typical
from regard.whole_file import write_whole

_MAX_BYTES = 1 << 16  # of a file of rates; a larger one is not read


class Rates:
    """The rates in use: stored ones if there are any, else the constants.

    They are those of torch's present number of threads, and are read when a rate is first used, so
    that importing stays cheap; a program that is compiled uses the same ones. `version` is what a
    choice depends on beside its call. Whoever chooses reads it first: that makes the rates in use
    those of the present number of threads.

    Examples:
        >>> 0 < SPEED.call < 1
        True
    """

    threads = 0  # that the rates in use are for; none are in use yet
    uses = 0  # how often rates were given or read anew

    @property
    def version(self) -> int:
        return _current_version()

    def __getattr__(self, name: str) -> float:
        if name not in Speed.__dataclass_fields__:
            raise AttributeError(f"{type(self).__name__} has no rate {name!r}")
        _current_version()
        return float(vars(self)[name])

    def load(self) -> Speed:
        """Read the files anew; return the rates in use."""
        _known.clear()
        vars(self).update(threads=0, uses=self.uses + 1)
        return self.now()

    def use(self, speed: Speed) -> None:
        """Use these rates from now on, for torch's present number of threads."""
        threads = torch.get_num_threads()
        _known[threads] = speed
        vars(self).update(asdict(speed), threads=threads, uses=self.uses + 1)

    def now(self) -> Speed:
        """The rates in use."""
        _current_version()
        return Speed(**{rate.name: getattr(self, rate.name) for rate in fields(Speed)})


SPEED = Rates()
_known: dict[int, Speed] = {}  # by the number of threads


def _current_version() -> int:
    """The version of the rates, once these are those of the present number of threads."""
    threads = torch.get_num_threads()
    if SPEED.threads != threads:
        if threads not in _known:
            _known[threads] = usual(threads)  # first: a warning that is an error is raised once
            _known[threads] = read_speed(threads) or usual(threads)
        vars(SPEED).update(asdict(_known[threads]), threads=threads)
    return SPEED.uses << 16 | threads


# The compiler runs this while it traces and takes the result for a constant, as
# `torch.compiler.assume_constant_result` says, which would import the compiler.
_current_version._dynamo_marked_constant = True  # type: ignore[attr-defined]


def usual(threads: int) -> Speed:
    """The constants of this processor, for so many threads."""
    return DEFAULT if _asked_for_defaults() else typical(threads)


def _asked_for_defaults() -> bool:
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
    if _asked_for_defaults():
        return None
    path = Path("the file of rates")
    try:
        path = speed_path(threads)
        if not path.is_file():  # a pipe, say, might never end
            return None
        with path.open("rb") as file:
            speed, objection = _parsed(file.read(_MAX_BYTES + 1), typical(threads))
    except (OSError, RuntimeError, OverflowError) as error:  # no home folder, deeply nested JSON
        speed, objection = None, str(error)
    if objection is not None:
        warnings.warn(
            f"{path} is ignored, and the usual rates of such a processor are used: {objection}; "
            "`regard tune` writes it anew, `regard tune --forget` removes it",
            stacklevel=2,
        )
    return speed


def _parsed(text: bytes, usual: Speed) -> tuple[Speed | None, str | None]:
    """Rates, or why they are not those of a machine whose usual ones are given."""
    if len(text) > _MAX_BYTES:
        return None, "it is too large"
    try:
        held = json.loads(text)
    except ValueError:
        return None, "it is not JSON"
    if not isinstance(held, dict):
        return None, "it does not hold rates by name"
    found = {}
    for name in Speed.__dataclass_fields__:
        if type(held.get(name)) not in (int, float):
            return None, f"{name} is not a number"
        found[name] = float(held[name])
    speed = Speed(**found)
    objection = speed.objection(usual)
    return (None, objection) if objection else (speed, None)


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
    SPEED.use(usual(torch.get_num_threads()))
    if not path.exists():
        return None
    path.unlink()
    return path
