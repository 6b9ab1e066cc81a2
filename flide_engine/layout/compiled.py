"""Loops compiled by numba: what a round waits for, where array operations cost too many calls."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """The function in machine code, kept on disk between processes where a folder can be written.

    The first call with new argument types compiles, which takes seconds: engines make one at start.
    Calls keep the interpreter's lock: none takes a millisecond, and who gives it up where other
    threads are busy is given it back five milliseconds later.
    """
    try:
        made = numba.njit(cache=True)(function)
    except RuntimeError:  # numba finds no folder that it may write
        made = numba.njit(function)
    return cast(F, made)
