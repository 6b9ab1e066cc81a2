"""Triton's interpreter, whose products are numpy's."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

Array = NDArray[Any]


def _product(a: Array, b: Array, dtype: Any = None) -> Array:
    """`np.matmul`, each number added up in order. A BLAS may add up a row by where it stands in its
    block: with some processors' kernels it does, and bits would tell of that.
    """
    total = np.zeros((*a.shape[:-1], b.shape[-1]), dtype or np.result_type(a, b))
    for i in range(a.shape[-1]):
        total += (a[..., i, None] * b[..., i, None, :]).astype(total.dtype)
    return total


class _Numpy:
    """numpy, as the interpreter is to see it."""

    matmul = staticmethod(_product)

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


def add_up_in_order(patch: pytest.MonkeyPatch) -> None:
    """Has bits in the interpreter depend on the kernel alone, and on no BLAS."""
    patch.setattr("triton.runtime.interpreter.np", _Numpy())
