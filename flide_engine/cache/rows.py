"""Copies between rows of memories on any devices, neighbours in one go.

Between a GPU and pinned memory, and on one device, they are only queued on the current stream.
"""

from collections.abc import Iterator

import numpy as np
from torch import Tensor

from flide_engine.cache.arena import Ints


def move_rows(target: Tensor, targets: Ints, source: Tensor, sources: Ints) -> None:
    """Rows `sources` of source [M, bytes] to rows `targets` of target [N, bytes], as wide as the
    narrower.
    """
    width = min(target.shape[1], source.shape[1])
    for at, count in _runs(targets, sources):
        a, b = int(targets[at]), int(sources[at])
        target[a : a + count, :width].copy_(source[b : b + count, :width], non_blocking=True)


def spread(data: Tensor, rows: Tensor, numbers: Ints) -> None:
    """data [bytes] over some rows of [N, bytes], in order; the last may be filled in part."""
    _between(data, rows, numbers, out=False)


def collect(data: Tensor, rows: Tensor, numbers: Ints) -> None:
    """The opposite of `spread`, into data [bytes]."""
    _between(data, rows, numbers, out=True)


def _between(data: Tensor, rows: Tensor, numbers: Ints, out: bool) -> None:
    width, flat = rows.shape[1], rows.view(-1)
    for at, count in _runs(numbers, numbers):
        part = data[at * width : (at + count) * width]
        first = int(numbers[at]) * width
        there = flat[first : first + len(part)]
        source, target = (there, part) if out else (part, there)
        target.copy_(source, non_blocking=True)


def _runs(a: Ints, b: Ints) -> Iterator[tuple[int, int]]:
    """(first, count) of stretches in which both numbers go up one by one."""
    breaks = np.flatnonzero((np.diff(a) != 1) | (np.diff(b) != 1)) + 1
    starts = [0, *breaks.tolist()] if len(a) else []
    return zip(starts, np.diff([*starts, len(a)]).tolist(), strict=True)
