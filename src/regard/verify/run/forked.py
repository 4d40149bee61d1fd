"""A question asked in a copy of this process, for calls that may end the interpreter.

What the subject breaks there (the heap, tables computed in another dtype) ends with the copy.
"""

import contextlib
import faulthandler
import json
import os
import signal
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, NoReturn

from regard.verify.law import Broken, Counterexample, NotApplicable, fail
from regard.verify.subject.subject import SubjectError

PATIENCE = 20  # seconds for one copy: less than a law's own limit, which would condemn
CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
Tell = Callable[[str], None]


def in_a_copy(control: Callable[[], None], ask: Callable[[Tell], None]) -> None:
    """Run `control`, then `ask`, in a fork of this process, and raise here what was raised there.

    Args:
        control: calls that are known to work. If the copy does not survive them, forking is at
            fault, and nothing is said of the subject.
        ask: the question. It is given a function that notes what is tried next.

    Raises:
        Broken: if `ask` raises it, or ends the interpreter.
        NotApplicable: if `ask` raises it, or processes cannot be copied here.
        SubjectError: if `ask` raises it.
    """
    reading, writing = os.pipe()
    try:
        child = os.fork()
    except (AttributeError, OSError) as error:
        os.close(reading)
        os.close(writing)
        raise NotApplicable("it is asked in a copy of the process: none can be made") from error
    if child == 0:
        os.close(reading)
        _answer(writing, control, ask)
    os.close(writing)
    try:
        with os.fdopen(reading, encoding="utf-8") as answers:
            events = [json.loads(line) for line in answers.read().split("\n")[:-1]]
    except BaseException:
        os.kill(child, signal.SIGKILL)
        raise
    finally:
        _, status = os.waitpid(child, 0)
    _judge(dict(events), os.waitstatus_to_exitcode(status))


def _answer(writing: int, control: Callable[[], None], ask: Callable[[Tell], None]) -> NoReturn:
    """The copy: it tells what it does, line by line, and ends without any cleaning up."""

    def tell(event: str, what: Any = "") -> None:
        os.write(writing, (json.dumps([event, what]) + "\n").encode())

    try:
        _silent()
        control()
        tell("ready")
        ask(lambda said: tell("tries", said))
        tell("passed")
    except Broken as error:
        tell("broken", asdict(error.example))
    except NotApplicable as error:
        tell("not applicable", str(error))
    except BaseException as error:
        tell("error", str(error) or type(error).__name__)
    finally:
        os._exit(0)


def _silent() -> None:
    """No last words on the terminal, no core file; and an end, even if the parent is gone."""
    faulthandler.disable()
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(PATIENCE)
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _judge(said: dict[str, Any], code: int) -> None:
    """`said` holds the last event of each kind, `code` how the copy ended."""
    if "broken" in said:
        raise Broken(Counterexample(**said["broken"]))
    if "not applicable" in said:
        raise NotApplicable(said["not applicable"])
    if "passed" in said:
        return
    if "ready" not in said or (code < 0 and -code not in CRASHES):
        raise NotApplicable("a copy of this process could not be asked")
    if "error" in said:
        raise SubjectError(f"{said['tries']}: {said['error']}")
    end = f"signal {-code}" if code < 0 else f"exit code {code}"
    fail(said["tries"], "", "an output or an error", f"the end of the interpreter, {end}",
         "compiled code is given memory that it does not expect")  # fmt: skip
