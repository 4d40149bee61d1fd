"""The records of a logger.

pytest's own plugin is off: six times a test it attaches itself to each of torch's forty loggers,
which takes a millisecond.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import BufferingHandler

MANY = 1_000_000  # records, more than any test logs: a full handler would forget them


@contextmanager
def records_of(name: str) -> Iterator[list[logging.LogRecord]]:
    """Every record of this logger and of those below it, even if another test disabled logging."""
    logger, handler = logging.getLogger(name), BufferingHandler(MANY)
    level, disabled = logger.level, logging.root.manager.disable
    logging.disable(logging.NOTSET)
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        yield handler.buffer
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
        logging.disable(disabled)
