"""Checking a law in a fork of this process, for calls that may crash the interpreter.

What the subject damages there (the heap, tables computed in another dtype) ends with the fork.
"""

import contextlib
import faulthandler
import json
import os
import signal
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, NoReturn

from regard_verify.blame import line_of, own_error, said
from regard_verify.law import (
    Broken,
    Counterexample,
    NotApplicable,
    OwnError,
    Undecided,
    fail,
)
from regard_verify.subject.subject import SubjectError

TIMEOUT = 20  # seconds of processor time for one fork: less than the limit of a law
PATIENCE = 10  # so many times more in wall-clock seconds
TOO_LONG = (signal.SIGPROF, signal.SIGALRM)
CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
Announce = Callable[[str], None]  # called with what is tried next


def in_a_copy(control: Callable[[], None], attempt: Callable[[Announce], None]) -> None:
    """Run `control`, then `attempt`, in a fork of this process; raise here what is raised there.

    Args:
        control: calls that are known to work. If the fork does not survive them, forking is at
            fault, and the law does not apply.
        attempt: looks for a counter-example. It is given a function to announce what it tries.

    Raises:
        Broken: if `attempt` raises it, or ends the interpreter.
        NotApplicable: if `attempt` raises it, or processes cannot be forked here.
        OwnError: if `attempt` ends in an error of this suite.
        SubjectError: if `attempt` raises it.
        Undecided: if it takes too long.
    """
    reading, writing = os.pipe()
    try:
        child = os.fork()
    except (AttributeError, OSError) as error:
        os.close(reading)
        os.close(writing)
        raise NotApplicable(
            "it is checked in a fork of the process, and none can be made"
        ) from error
    if child == 0:
        os.close(reading)
        _run_and_exit(writing, control, attempt)
    os.close(writing)
    try:
        with os.fdopen(reading, encoding="utf-8") as answers:
            events = [json.loads(line) for line in answers.read().split("\n")[:-1]]
    except BaseException:
        os.kill(child, signal.SIGKILL)
        raise
    finally:
        _, status = os.waitpid(child, 0)
    _raise_result(dict(events), os.waitstatus_to_exitcode(status))


def _run_and_exit(
    writing: int, control: Callable[[], None], attempt: Callable[[Announce], None]
) -> NoReturn:
    """In the fork: write events line by line, and exit without cleaning up."""

    def write(event: str, what: Any = "") -> None:
        os.write(writing, (json.dumps([event, what]) + "\n").encode())

    try:
        _silent()
        control()
        write("ready")
        attempt(lambda label: write("tries", label))
        write("passed")
    except Broken as error:
        write("broken", asdict(error.example))
    except NotApplicable as error:
        write("not applicable", str(error))
    except BaseException as error:
        of_subject = isinstance(error, SubjectError)
        raised = error.__cause__ if of_subject else error
        mine = own_error(raised) if raised is not None else ""
        text = str(error) if of_subject else said(error)
        write("own error" if mine else "error", mine or [text, line_of(error)])
    finally:
        os._exit(0)


def _silent() -> None:
    """No output on the terminal, no core file; and an end in time, even without the parent."""
    faulthandler.disable()
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    for number in TOO_LONG:
        signal.signal(number, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, TIMEOUT)
    signal.alarm(PATIENCE * TIMEOUT)
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _raise_result(events: dict[str, Any], code: int) -> None:
    """Raise what the fork found; `events` has the last event of each kind, `code` is its exit."""
    if "broken" in events:
        raise Broken(Counterexample(**events["broken"]))
    if "not applicable" in events:
        raise NotApplicable(events["not applicable"])
    if "passed" in events:
        return
    if -code in TOO_LONG:
        raise Undecided(f"it did not come back within {TIMEOUT} s of processor time, in a fork")
    if "ready" not in events or (code < 0 and -code not in CRASHES):
        raise NotApplicable("the law could not be checked in a fork of this process")
    if "own error" in events:
        raise OwnError(events["own error"])
    if "error" in events:
        text, line = events["error"]
        error = SubjectError(f"{events['tries']}: {text}")
        error.line = line
        raise error
    end = f"signal {-code}" if code < 0 else f"exit code {code}"
    fail(events["tries"], "", "an output or an error", f"the end of the interpreter, {end}",
         "compiled code is given memory of another size or dtype than it expects")  # fmt: skip
