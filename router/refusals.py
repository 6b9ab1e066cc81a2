"""Refusals in Serve's log. Standard library only, but for the error tree."""

import logging

from flide_engine.errors import FlideError

SERVE = logging.getLogger("ray.serve")

FAILED = "Request failed."
"""What Serve 2.60 says of a call that raised, with its traceback."""


class _InALine(logging.Filter):
    """What Serve logs as a failed call, with a traceback, is one line where the error is of the
    tree: it says what is wrong, and where it was found helps nobody.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        if record.msg != FAILED or not record.exc_info:
            return True
        error = record.exc_info[1]
        if error is not None and not isinstance(error, FlideError):
            error = error.__context__  # a plain caller's error stands for one of ours
        if isinstance(error, FlideError):
            record.msg, record.args = "not answered: %s: %s", (type(error).__name__, error.for_logs)
            record.levelno, record.levelname = logging.INFO, "INFO"
            record.exc_info = record.exc_text = None
        return record.levelno >= SERVE.getEffectiveLevel()


def in_a_line() -> None:
    """From now on refusals of this process have no traceback in Serve's log."""
    if not any(isinstance(found, _InALine) for found in SERVE.filters):
        SERVE.addFilter(_InALine())
