"""A round's plan on a device: what every token mixer takes."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class StreamTasks:
    """Work lists of the GPU kernels (`layout.tasks`), at the capacity of a bucket; int32.

    counts [12]: how many of each exist, by the places below.
    row_nodes [T]: node of each row, -1 for padding. row_taps [T, 3]: the three positions
    before each row's, coded as RoundPlan.chain_rows.
    chunk_*, scans, resumed: see `layout.tasks`. passed_states: room for what the scans pass
    on.
    tile_* and read_tile_*: see `write_tiles`, for all rows and for the read rows.
    tile_ends [A, 2]: `ends` of `write_tiles`; read_tile_ends alike.
    tile_pages [A, 2]: first entry and number of the tile's pages in `pages`; read_tile_pages alike.
    split: grains after which a tile's keys are cut, 0: nowhere. tile_parts, tile_sums: see
    `write_parts`, read_tile_parts and read_tile_sums alike; sums: room for what parts add up to.
    """

    counts: Tensor
    row_nodes: Tensor
    row_taps: Tensor
    chunk_rows: Tensor
    chunk_skips: Tensor
    chunk_slots: Tensor
    chunk_sources: Tensor
    scans: Tensor
    resumed: Tensor
    tile_queries: Tensor
    tile_nodes: Tensor
    tile_ends: Tensor
    tile_pages: Tensor
    read_tile_queries: Tensor
    read_tile_nodes: Tensor
    read_tile_ends: Tensor
    read_tile_pages: Tensor
    tile_parts: Tensor
    tile_sums: Tensor
    read_tile_parts: Tensor
    read_tile_sums: Tensor
    passed_states: int
    split: int
    sums: int


CHUNKS, TILES, READ_TILES, WRITTEN_PAGES, RESUMED, SCANS, PARTS, READ_PARTS = range(8)
"""Places in `StreamTasks.counts`."""


@dataclass(frozen=True)
class StreamTensors:
    """A `RoundPlan` on a device: same names and shapes; `level_ends` stays on the host.

    tasks: work lists for the GPU kernels; the references need none.
    """

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
    tasks: StreamTasks | None = None
