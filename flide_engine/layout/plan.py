"""`RoundPlan`: everything a forward pass needs to know about one round, as int32 arrays.

The reference kernels and the GPU kernels take the same plan. Launch shapes follow from lengths
only; the tree lives in these arrays.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]


def joined(arrays: Sequence[Ints]) -> Ints:
    """int32 vectors one after the other; a lone one as it is. Faster than `np.concatenate`, which
    also gives up the interpreter's lock for each long one of them. Raises TypeError where they are
    not of int32.
    """
    if len(arrays) == 1:
        return arrays[0]
    flat = np.frombuffer(bytearray().join(arrays), np.int32)  # type: ignore[arg-type]
    if len(flat) != sum(map(len, arrays)):
        raise TypeError("arrays to join are not of int32")
    return flat


CHAIN_COLUMNS = 66
"""Columns of `chain_rows`: positions F-3 .. F+62, the most that may lie before a node."""

NOWHERE = -1
"""A row before the start of the prompt: zeros."""


@dataclass(frozen=True)
class RoundPlan:
    """One round: the flat stream, its nodes by level, and the lookups of the token mixers.

    T rows, the first `num_rows` of which are tokens and the rest padding; N nodes; L levels; W
    written pages; M stores; R reads. A node is a run of rows: `cu_seqlens[n] .. cu_seqlens[n+1]`.
    Its first own token has chain position `starts[n]`, and F = starts // 64 * 64 is the grain it
    starts from.

    tokens [T]: token ids; padding rows hold 0.
    positions [T]: rotary positions.
    cu_seqlens [N+1], starts [N]: see above.
    parents [N]: node index of the parent, or -1.
    level_ends [L]: nodes of level l are level_ends[l-1] .. level_ends[l]. A node reads only
        recurrent states stored at lower levels or before the round.
    initial_slots [N]: slot of the state at F, or -1 for zeros.
    chain_rows [N, 66]: stream rows of chain positions F-3 .. starts-1, in columns 0 ..
        starts-F+2. A value <= -2 is a row of a convolution slot, -2 - (3 * slot + row) with the
        oldest row first; -1 is a row of zeros, or no row.
    page_lists [N]: which page list holds the keys and values of positions 0 .. F-1.
    page_list_ends [K]: page list k is pages[page_list_ends[k-1] : page_list_ends[k]], one page a
        grain.
    pages [*]: pool pages of all lists, one list after the other.
    write_pages [W], write_rows [W, 64]: pages written in this round, and the stream rows of their
        grain.
    store_nodes [M], store_positions [M], store_slots [M]: the node stores the recurrent state and
        the convolution rows as they are after store_positions tokens: a multiple of 64, past the
        node's start, at most its end.
    store_rows [M, 3]: rows of positions store_positions-3 .. -1, coded as in chain_rows.
    read_rows [R]: rows whose final hidden vector is read, in the order the reads were asked for.
    """

    num_rows: int
    tokens: Ints
    positions: Ints
    cu_seqlens: Ints
    starts: Ints
    parents: Ints
    level_ends: Ints
    initial_slots: Ints
    chain_rows: Ints
    page_lists: Ints
    page_list_ends: Ints
    pages: Ints
    write_pages: Ints
    write_rows: Ints
    store_nodes: Ints
    store_positions: Ints
    store_slots: Ints
    store_rows: Ints
    read_rows: Ints

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len(self.starts)


@dataclass(frozen=True)
class Anchor:
    """A checkpoint that a forest resumes from: `position` tokens, a multiple of 64, are in the
    pool.

    slot: recurrent and convolution state after `position` tokens. pages: [position / 64] int32.
    """

    position: int
    slot: int
    pages: Ints


class Mark(NamedTuple):
    """A checkpoint to take: the chain that ends in `node`, at `position` (see
    RoundPlan.store_positions).
    """

    node: int
    position: int
