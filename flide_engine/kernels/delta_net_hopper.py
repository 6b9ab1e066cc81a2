"""Gated delta net on Hopper GPUs: `delta_net_ref` in three launches of `hopper/delta_net.cu`.

What the launches hand to each other lies as the lanes of a warp hold it (`hopper/tiles.cuh`), so
other kernels cannot read it.
"""

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flide_engine.kernels.delta_net_ref import DeltaNetShape, DeltaNetWeights
from flide_engine.kernels.hopper.program import Launch, compiled, processors_of
from flide_engine.kernels.stream import CHUNKS, RESUMED, SCANS, StreamTensors

CHUNK, DIM = 64, 128
PARTS = 2
"""Blocks that share a head's values in the chain of states."""


@dataclass(frozen=True)
class Kernel:
    """How a kernel is launched: threads and shared bytes of a block, blocks a processor has room
    for.
    """

    threads: int
    shared_bytes: int
    at_once: int


KERNELS = {
    "prepare": Kernel(256, 76320, 3),
    "chain": Kernel(160, 205088, 1),
    "outputs": Kernel(128, 75536, 3),
}


class Chunks(ctypes.Structure):
    """`Chunks` of tiles.cuh."""

    _fields_ = [(name, ctypes.c_void_p) for name in ["kd", "w", "q", "u", "p", "total", "decay"]]


class Lists(ctypes.Structure):
    """`Lists` of tiles.cuh."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("rows", "skips", "slots", "sources")),
        *((name, ctypes.c_void_p) for name in ("row_taps", "scans", "resumed", "counts")),
        ("capacity", ctypes.c_int),
    ]


class Slots(ctypes.Structure):
    """`Slots` of tiles.cuh."""

    _fields_ = [
        ("state", ctypes.c_void_p),
        ("conv", ctypes.c_void_p),
        ("state_stride", ctypes.c_int64),
        ("conv_stride", ctypes.c_int64),
    ]


def supports(projected: Tensor, weights: DeltaNetWeights, shape: DeltaNetShape) -> bool:
    """Whether these launches compute it: bfloat16, heads of 128, rows that are 16 bytes aligned."""
    return (
        projected.dtype == weights.conv.dtype == torch.bfloat16
        and (shape.key_dim, shape.value_dim) == (DIM, DIM)
        and projected.stride(0) % 8 == 0
        and weights.A_log.dtype == weights.norm.dtype == torch.float32
        and weights.dt_bias.dtype in BIASES
    )


BIASES = {torch.bfloat16: "u16", torch.float32: "float"}


def macros(shape: DeltaNetShape, bias: torch.dtype) -> tuple[tuple[str, str | int], ...]:
    """What `delta_net.cu` has to be told."""
    heads = (("HK", shape.key_heads), ("HV", shape.value_heads), ("BIAS", BIASES[bias]))
    places = (("CHUNK_COUNT", CHUNKS), ("RESUMED_COUNT", RESUMED), ("SCAN_COUNT", SCANS))
    sizes = ((f"{name.upper()}_BYTES", kernel.shared_bytes) for name, kernel in KERNELS.items())
    return *heads, ("PARTS", PARTS), *places, *sizes


def delta_net_hopper(
    projected: Tensor,
    weights: DeltaNetWeights,
    shape: DeltaNetShape,
    recurrent_state: Tensor,
    conv_state: Tensor,
    stream: StreamTensors,
    kernels: Mapping[str, Launch] | None = None,
    processors: int | None = None,
) -> Tensor:
    """`delta_net_ref`, for what `supports`. Needs `stream.tasks`.

    kernels, processors: None: compiled for the GPU, and as many as it has.
    """
    tasks = stream.tasks
    assert tasks is not None, "the GPU kernels need the stream's work lists"
    assert supports(projected, weights, shape), "no kernel for these types, heads or rows"
    assert recurrent_state[0].is_contiguous(), "a slot's state lies apart"
    assert conv_state[0].is_contiguous(), "a slot's convolution rows lie apart"
    assert conv_state.stride(0) % 8 == 0, "slots' rows are copied 16 bytes at a time"
    if kernels is None:
        kernels = compiled("delta_net.cu", macros(shape, weights.dt_bias.dtype))
    processors = processors or processors_of(projected.device)
    hv, count, new = shape.value_heads, len(tasks.chunk_rows), projected.new_empty
    operands = new(4, count, hv, CHUNK * DIM)
    scores = new(count, hv, CHUNK * CHUNK)
    totals = new(count, hv, CHUNK + 1, dtype=torch.float32)
    passed = new(tasks.passed_states, hv, DIM * DIM)
    progress = new(1 + len(tasks.scans) * hv * PARTS, dtype=torch.int32)
    out = new(len(projected), hv * DIM)
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    slots = Slots(
        recurrent_state.data_ptr(), conv_state.data_ptr(),
        recurrent_state.stride(0), conv_state.stride(0),
    )  # fmt: skip
    given_lists = (
        tasks.chunk_rows, tasks.chunk_skips, tasks.chunk_slots, tasks.chunk_sources,
        tasks.row_taps, tasks.scans, tasks.resumed, tasks.counts,
    )  # fmt: skip
    lists = Lists(*(x.data_ptr() for x in given_lists), count)
    decay = totals.view(-1)[count * hv * CHUNK :]
    chunks = Chunks(*(x.data_ptr() for x in (*operands, scores, totals, decay)))
    row, z = number(projected.stride(0)), projected[:, shape.conv_channels :]
    states, marks = pointer(passed.data_ptr()), pointer(progress.data_ptr())
    arguments = {
        "prepare": [
            pointer(projected.data_ptr()), row, pointer(weights.conv.data_ptr()),
            pointer(weights.A_log.data_ptr()), pointer(weights.dt_bias.data_ptr()),
            slots, lists, chunks, states, marks,
        ],
        "chain": [slots, lists, chunks, states, marks],
        "outputs": [
            pointer(z.data_ptr()), row, pointer(weights.norm.data_ptr()),
            ctypes.c_float(shape.eps), lists, chunks, states, pointer(out.data_ptr()),
        ],
    }  # fmt: skip
    for name, given in arguments.items():
        kernel = KERNELS[name]
        blocks = processors * kernel.at_once
        if name == "prepare":  # each has one head
            blocks = max(blocks // hv, 1) * hv
        kernels[name](blocks, kernel.threads, kernel.shared_bytes, given)
    return out
