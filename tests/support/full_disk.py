"""A disk that is full: files of this process end after so many bytes."""

import resource
import signal
import sys
from contextlib import contextmanager


@contextmanager
def files_of_at_most(nbytes):
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # else the process ends
    limits, bytecode = resource.getrlimit(resource.RLIMIT_FSIZE), sys.dont_write_bytecode
    sys.dont_write_bytecode = True  # Python 3.11 leaves files of it that end early
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
        sys.dont_write_bytecode = bytecode
