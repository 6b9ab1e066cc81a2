"""Row-wise pieces of a decoder layer in Triton: float32 inside, one rounding at the end."""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _add_rms_norm_kernel(
    x, delta, weight, total, normed, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    value = tl.load(x + row * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(delta + row * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + row * WIDTH + at, rounded, mask=inside)
        value = rounded.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, 0) / WIDTH + eps)
    w = 1.0 + tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(
        normed + row * WIDTH + at, (value * scale * w).to(normed.dtype.element_ty), mask=inside
    )


def add_rms_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """`add_rms_norm_ref` in one launch; x and delta are contiguous."""
    rows, width = x.shape
    normed = x.new_empty(rows, width)
    total = x if delta is None else x.new_empty(rows, width)
    if rows:
        block = triton.next_power_of_2(width)
        _add_rms_norm_kernel[(rows,)](
            x, x if delta is None else delta, weight, total, normed, eps,
            WIDTH=width, BLOCK=block, ADD=delta is not None, num_warps=4 if block <= 2048 else 8,
        )  # fmt: skip
    return total, normed


@triton.jit
def _swiglu_kernel(gate_up, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < WIDTH
    gate = tl.load(gate_up + row * 2 * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * WIDTH + WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * WIDTH + at, value.to(out.dtype.element_ty), mask=inside)


def swiglu(gate_up: Tensor) -> Tensor:
    """`swiglu_ref` in one launch; gate_up is contiguous."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    if rows:
        block = min(1024, triton.next_power_of_2(width))
        _swiglu_kernel[(rows, triton.cdiv(width, block))](
            gate_up, out, WIDTH=width, BLOCK=block, num_warps=4
        )
    return out
