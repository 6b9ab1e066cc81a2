"""From a round's hidden vectors to what families asked for, in float32, checked to be finite."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from flide_engine.errors import NonFiniteOutput
from flide_engine.families.base import Read

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]


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

    def value(self, read: int, logits: Floats, hidden: Floats | None) -> Floats:
        """A read's logits [k] out of all `logits` [K], or its vector out of `hidden` [R, H]."""
        first = int(self.ends[read - 1]) if read else 0
        stop = int(self.ends[read])
        if stop > first:
            return logits[first:stop]
        assert hidden is not None, "vectors were asked for"
        vector: Floats = hidden[read]
        return vector


def check_finite(reads: Sequence[Read], values: Sequence[Floats]) -> None:
    """Raises NonFiniteOutput naming the first read whose value is not finite."""
    # a sum is finite only if all of it is; one that overflows is looked at in full
    if values and np.isfinite(sum(float(value.sum()) for value in values)):
        return
    for read, value in zip(reads, values, strict=True):
        if not np.isfinite(value).all():
            raise NonFiniteOutput(read.about)
