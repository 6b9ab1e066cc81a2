"""Tiles of gated fork attention on Hopper GPUs: what `fork_attention.py` does with whole chains, in
one launch of `hopper/attention.cu`.
"""

import ctypes
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from flide_engine.kernels.attention_ref import AttentionShape
from flide_engine.kernels.hopper.program import Launch, compiled, processors_of
from flide_engine.kernels.stream import READ_TILES, TILES, StreamTensors

LOG2_E = 1.4426950408889634
SHARED_BYTES = 227 * 1024
"""All that a block may have: places for keys and values take what queries leave."""

MOST_QUERIES = 32
"""Of a tile."""


class Sources(ctypes.Structure):
    """`Sources` of queries.cuh."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "keys", "values")),
        ("page", ctypes.c_int64),
    ]


class Lists(ctypes.Structure):
    """`Lists` of queries.cuh."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("queries", "nodes", "ends", "pages")),
        *((name, ctypes.c_void_p) for name in ("numbers", "chain_rows", "starts", "cu_seqlens")),
        *((name, ctypes.c_void_p) for name in ("row_nodes", "positions", "rows", "count")),
    ]


def supports(q_gate: Tensor, keys: Tensor, shape: AttentionShape, split: int) -> bool:
    """Whether the launch computes it: bfloat16, heads of 128 or 256, at most four query heads a key
    head, whole chains, rows and pages that are 16 bytes aligned.
    """
    return (
        q_gate.dtype == keys.dtype == torch.bfloat16
        and shape.head_dim in (128, 256)
        and shape.heads // shape.kv_heads <= 4
        and split == 0
        and q_gate.stride(0) % 8 == keys.stride(0) % 8 == 0
    )


def macros(shape: AttentionShape, tile: int) -> tuple[tuple[str, int], ...]:
    """What `attention.cu` has to be told. tile: queries of a tile."""
    heads = (("KV_HEADS", shape.kv_heads), ("GROUP", shape.heads // shape.kv_heads))
    sizes = (("WIDTH", shape.head_dim), ("TILE", tile), ("ATTEND_BYTES", SHARED_BYTES))
    return *heads, *sizes, ("WINDOW", shape.window or 0)


def threads(shape: AttentionShape, tile: int) -> int:
    """Of a block: a warpgroup for every 64 rows of queries, and one that copies."""
    heads = 1 << (shape.heads // shape.kv_heads - 1).bit_length()
    return 128 * (-(-tile * heads // 64) + 1)


def attend_hopper(
    q: Tensor,
    q_gate: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Tensor | None,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    shape: AttentionShape,
    stream: StreamTensors,
    kernels: Mapping[str, Launch] | None = None,
    processors: int | None = None,
) -> None:
    """Writes the gated attention of q [R, nh, hd] into out [R, nh * hd], for what `supports`.

    q, k, v [T, nkv, hd]: normed and rotated, and pages written. The rest: see `attention_ref`.
    Needs `stream.tasks`. kernels, processors: None: compiled for the GPU, and as many as it has.
    """
    tasks = stream.tasks
    assert tasks is not None, "the GPU kernels need the stream's work lists"
    assert supports(q_gate, keys, shape, tasks.split), "no kernel for these types, heads or rows"
    assert keys.stride() == values.stride(), "keys and values lie apart in different ways"
    assert keys[0].is_contiguous(), "a page's keys lie apart"
    assert all(x.is_contiguous() for x in (q, k, v, out)), "rows lie apart"
    lists: Sequence[Tensor] = (
        (tasks.tile_queries, tasks.tile_nodes, tasks.tile_ends, tasks.tile_pages)
        if rows is None
        else (
            tasks.read_tile_queries, tasks.read_tile_nodes, tasks.read_tile_ends,
            tasks.read_tile_pages,
        )
    )  # fmt: skip
    tile = lists[0].shape[1]
    assert tile <= MOST_QUERIES, f"a tile of {tile} queries, {MOST_QUERIES} are the most"
    if kernels is None:
        kernels = compiled("attention.cu", macros(shape, tile))
    pointer = ctypes.c_void_p
    given = (
        *lists, stream.pages, stream.chain_rows, stream.starts, stream.cu_seqlens, tasks.row_nodes,
        stream.positions,
    )  # fmt: skip
    count = tasks.counts[TILES if rows is None else READ_TILES :]
    arguments = [
        pointer(q_gate.data_ptr()), ctypes.c_int64(q_gate.stride(0)),
        Sources(*(x.data_ptr() for x in (q, k, v, keys, values)), keys.stride(0)),
        Lists(
            *(x.data_ptr() for x in given),
            rows.data_ptr() if rows is not None else None, count.data_ptr(),
        ),
        ctypes.c_float(shape.head_dim**-0.5 * LOG2_E), pointer(out.data_ptr()),
    ]  # fmt: skip
    blocks = processors or processors_of(q.device)
    kernels["attend"](blocks, threads(shape, tile), SHARED_BYTES, arguments)
