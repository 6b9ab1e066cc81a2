"""From a round's hidden vectors to what families asked for, in float32, checked to be finite."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from flide_engine.families.base import Read
from flide_engine.layout.compiled import compiled

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]


@compiled
def _all_finite(values: Floats) -> bool:
    """Whether all of a vector's are; what it adds up to, each times nothing, says so at once."""
    total = np.float32(0.0)
    for value in values:
        total += value * np.float32(0.0)
    return bool(total == 0.0)


@compiled
def for_each(rows: Ints, count: int) -> tuple[Ints, Ints, Ints]:
    """`reads`, `rows` and `ends` of `Asked` where `count` reads want the same head rows."""
    each = len(rows)
    reads, again = np.empty(each * count, np.int32), np.empty(each * count, np.int32)
    ends = np.empty(count, np.int32)
    for read in range(count):
        for i in range(each):
            reads[read * each + i], again[read * each + i] = read, rows[i]
        ends[read] = (read + 1) * each
    return reads, again, ends


@dataclass(frozen=True)
class Asked:
    """What is wanted of a round's R reads: products with head rows, and maybe the vectors.

    reads, rows [K]: hidden vector and head row of each product, read by read. ends [R]: products of
    read i are ends[i-1] .. ends[i]; none: its vector is wanted. vectors: whether any is.
    """

    reads: Ints
    rows: Ints
    ends: Ints
    vectors: bool

    @classmethod
    def of(cls, reads: Sequence[Read]) -> Self:
        """Of a round's reads, in their order."""
        same = reads[0].head_rows if reads else None
        if same is not None and all(read.head_rows is same for read in reads):
            return cls(*for_each(same, len(reads)), False)
        rows = [np.zeros(0, np.int32) if r.head_rows is None else r.head_rows for r in reads]
        counts = [len(r) for r in rows]
        return cls(
            np.repeat(np.arange(len(reads), dtype=np.int32), counts),
            np.concatenate(rows, dtype=np.int32) if rows else np.zeros(0, np.int32),
            np.cumsum(counts, dtype=np.int32),
            any(r.head_rows is None for r in reads),
        )

    @classmethod
    def every_vector(cls, reads: int) -> Self:
        """The hidden vectors of all reads."""
        none = np.zeros(0, np.int32)
        return cls(none, none, np.zeros(reads, np.int32), True)

    def values(self, logits: Floats, hidden: Floats | None) -> list[Floats]:
        """Of each read its logits [k] out of all `logits` [K], or its vector out of `hidden`
        [R, H].
        """
        found, first = [], 0
        for read, stop in enumerate(self.ends.tolist()):
            if stop > first:
                found.append(logits[first:stop])
            else:
                assert hidden is not None, "vectors were asked for"
                found.append(hidden[read])
            first = stop
        return found


def is_finite(logits: Floats, hidden: Floats | None) -> bool:
    """Whether all of a round's logits and vectors are."""
    return _all_finite(logits) and (hidden is None or bool(np.isfinite(hidden).all()))


def not_finite(reads: Sequence[Read], values: Sequence[Floats]) -> list[str]:
    """What the reads are about whose values are not."""
    pairs = zip(reads, values, strict=True)
    return [read.about for read, value in pairs if not np.isfinite(value).all()]
