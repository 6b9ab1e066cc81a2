"""A round's plan on a device: what every token mixer takes."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class StreamTensors:
    """A `RoundPlan` on a device: same names and shapes; `level_ends` stays on the host."""

    tokens: Tensor
    positions: Tensor
    cu_seqlens: Tensor
    starts: Tensor
    level_ends: tuple[int, ...]
    initial_slots: Tensor
    chain_rows: Tensor
    page_lists: Tensor
    page_list_ends: Tensor
    pages: Tensor
    write_pages: Tensor
    write_rows: Tensor
    store_nodes: Tensor
    store_positions: Tensor
    store_slots: Tensor
    store_rows: Tensor
    read_rows: Tensor
