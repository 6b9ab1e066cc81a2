"""How far the merged launch of the delta net has come: numbers that its programs count up."""

import triton
import triton.language as tl

GROUP: tl.constexpr = tl.constexpr(8)
"""Chunks after which a chain looks for more, and tells how far it has come."""

ARRIVED: tl.constexpr = tl.constexpr(0)
LISTED: tl.constexpr = tl.constexpr(32)
CHAINS: tl.constexpr = tl.constexpr(64)
MARKS: tl.constexpr = tl.constexpr(96)
"""Places in `progress`, a line of memory each: programs that have come; chunks and entries of the
list, and chains, that have been claimed. From MARKS on [G, HV] chunks of each group that are
prepared, then [K, HV, parts] chunks that each chain has passed on."""


@triton.jit
def marks_of(chunks, scans, HV: tl.constexpr, PARTS: tl.constexpr):
    """Numbers in `progress`."""
    return (chunks + GROUP - 1) // GROUP * HV + scans * (HV * PARTS) + MARKS


def marks(chunks: int, scans: int, heads: int, parts: int) -> int:
    """Room for the numbers of at most so many chunks and scans, whichever way they are run."""
    groups = -(-chunks // int(GROUP.value))
    return int(MARKS.value) + groups * heads + scans * heads * parts
