"""The probe of kernels: it holds for those we have, and fails for any that is wrong."""

import os
from dataclasses import replace
from typing import Any

import pytest
import torch

from flide_engine.kernels import REFERENCE, Kernels
from flide_engine.parity import Widths, probe

CPU = torch.device("cpu")
SMALL = Widths(32, 32)
NAMES = ["add_rms_norm", "swiglu", "label_logits", "attention", "delta_net"]


def failing(kernels: Kernels) -> list[str]:
    """Operations that the probe finds wrong."""
    found = probe(kernels, CPU, torch.float32, SMALL, padded=False)
    return [p.kernel for p in found if not p.holds]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("factor", [1.001, float("nan")])
def test_a_wrong_kernel_is_named(name: str, factor: float) -> None:
    """A thousandth too much, or NaN."""

    def wrong(*args: Any, **kwargs: Any) -> Any:
        out = getattr(REFERENCE, name)(*args, **kwargs)
        return (out[0], out[1] * factor) if isinstance(out, tuple) else out * factor

    assert failing(replace(REFERENCE, **{name: wrong})) == [name]


def test_a_state_that_is_not_written_is_found() -> None:
    """Outputs alone do not tell."""

    def forgetful(
        projected: Any, weights: Any, shape: Any, state: Any, conv: Any, *rest: Any
    ) -> Any:
        return REFERENCE.delta_net(projected, weights, shape, state.clone(), conv, *rest)

    assert failing(replace(REFERENCE, delta_net=forgetful)) == ["delta_net"]


@pytest.mark.slow
def test_triton_holds_in_its_interpreter() -> None:
    """As it does on a GPU, where `flide-serve doctor` asks."""
    pytest.importorskip("triton")
    if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs TRITON_INTERPRET=1, without a GPU")
    from flide_engine.kernels.triton_kernels import TRITON

    found = list(probe(TRITON, CPU, torch.float32, SMALL))
    assert [p.kernel for p in found] == NAMES
    assert all(p.holds for p in found), found


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_triton_holds_on_the_gpu(dtype: torch.dtype) -> None:
    """At the widths of real models."""
    from flide_engine.kernels.triton_kernels import TRITON

    found = list(probe(TRITON, torch.device("cuda"), dtype))
    assert all(p.holds for p in found), found
