"""Waiting for what other threads and processes do, however slow the machine is."""

import time
from collections.abc import Callable

PATIENCE_S = 120.0
"""How long a test waits for what takes moments; it bounds a fault, and is no expectation."""


def until(
    condition: Callable[[], bool], what: str = "it never came", pause_s: float = 0.01
) -> None:
    """Returns once a condition holds; looks are counted, so that a stall of this thread costs none.

    Raises AssertionError, with `what`, after some `PATIENCE_S` in vain; where looks take long
    themselves, after five times that.
    """
    began = time.monotonic()
    for _ in range(int(PATIENCE_S / pause_s)):
        if condition():
            return
        if time.monotonic() - began > 5 * PATIENCE_S:
            break
        time.sleep(pause_s)
    raise AssertionError(what)
