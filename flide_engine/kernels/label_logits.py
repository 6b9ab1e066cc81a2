"""Logits of a few head rows at a few hidden vectors in Triton: a program a pair."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _label_logits_kernel(
    hidden, head, reads, rows, out, count, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    for i in range(tl.program_id(0), count, tl.num_programs(0)):
        read = tl.load(reads + i).to(tl.int64)
        if read >= 0:
            row = tl.load(rows + i).to(tl.int64)
            x = tl.load(hidden + read * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
            w = tl.load(head + row * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
            tl.store(out + i, tl.sum(x * w, 0))


def label_logits(
    hidden: Tensor, head: Tensor, reads: Tensor, rows: Tensor, programs: int = 528
) -> Tensor:
    """`label_logits_ref` in one launch; hidden and head are contiguous."""
    out = hidden.new_empty(len(reads), dtype=torch.float32)
    width = hidden.shape[1]
    _label_logits_kernel[(programs,)](
        hidden, head, reads, rows, out, len(reads),
        WIDTH=width, BLOCK=triton.next_power_of_2(width), num_warps=4,
    )  # fmt: skip
    return out
