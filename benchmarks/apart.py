"""Contestants in processes of their own, each stopped while the others have their turns.

In one process they share an allocator and pools of threads, and those of one wait, awake, while
another runs.
"""

import os
import signal
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any
from weakref import finalize

import torch


class Apart:
    """A function that a new process makes and calls, once for each call of this object.

    `make(*arguments)` returns the function, which takes no arguments; everything is pickled. Errors
    are raised here. `close()` ends the process.
    """

    def __init__(self, make: Callable[..., Callable[[], Any]], *arguments: Any) -> None:
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make, arguments))
        self._process.start()
        self.close = finalize(self, _end, self._process)  # a stopped process does not end by itself
        theirs.close()
        self._answer()

    def __call__(self) -> Any:
        self._signal(signal.SIGCONT)
        self._pipe.send(None)
        return self._answer()

    def _answer(self) -> Any:
        answer = self._pipe.recv()
        if isinstance(answer, Exception):
            self.close()
            raise answer
        self._signal(signal.SIGSTOP)
        return answer

    def _signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)


def _end(process: Any) -> None:
    process.kill()
    process.join()


def _serve(pipe: Connection, make: Callable[..., Callable[[], Any]], arguments: Any) -> None:
    try:
        with torch.no_grad():
            run = make(*arguments)
            pipe.send(None)
            while True:
                pipe.recv()
                pipe.send(run())
    except EOFError:  # the other process has ended
        return
    except Exception as error:
        pipe.send(error)
