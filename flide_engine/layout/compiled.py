"""Loops compiled by numba: what a round waits for, where array operations cost too many calls."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

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


@compiled
def copy_into(target: NDArray[np.int32], source: NDArray[np.int32]) -> None:
    """As target[: len(source)] = source, for vectors; that takes ten times as long to compile."""
    for i in range(len(source)):
        target[i] = source[i]
