"""Products in Triton's interpreter that add up in one order.

It multiplies tiles by NumPy's library, which on some processors takes another order for the rows at
the end of a tile than for others; a kernel's bits would depend on where a row lies.
"""

from typing import Any

import numpy as np
import pytest


def in_one_order(patch: pytest.MonkeyPatch) -> None:
    """As long as the patch lasts."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        total = np.zeros_like(d.data)
        for k in range(a.data.shape[-1]):
            total += a.data[..., k, None] * b.data[..., k, None, :]
        return TensorHandle(total + d.data, d.dtype.scalar)

    patch.setattr(InterpreterBuilder, "create_dot", create_dot)
