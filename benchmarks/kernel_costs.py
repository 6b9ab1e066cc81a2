"""What a kernel must move and compute at least, from the shapes of a round: its floor.

Bytes are those of tensors read and written once; flops are those of the products, twice the
multiplications. Only rows that are tokens count, so a bucket's padding is part of what a kernel
loses. Operations are those of `Kernels`, whatever launches they take; kernels are single launches,
whose floor includes what they hand to each other.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from flide_engine.kernels.stream import StreamTensors
from flide_engine.layout.plan import RoundPlan

CHUNK = 64


@dataclass(frozen=True)
class Cost:
    """bytes, flops."""

    bytes: float
    flops: float = 0.0

    def floor_us(self, byte_rate: float, flop_rate: float) -> float:
        """Microseconds at the card's rates, bytes/s and flops/s: the longer of the two."""
        return 1e6 * max(self.bytes / byte_rate, self.flops / flop_rate)


@dataclass(frozen=True)
class Round:
    """A plan as costs see it.

    rows, reads: tokens and read rows. captured: rows of the stream with its padding. seen: keys
    that all rows see, and that read rows see. pages, writes: distinct pages read, pages written.
    chunks: of all nodes. runs: chunks whose state is passed on. starts: nodes that read a state.
    stores: states stored.
    """

    rows: int
    reads: int
    captured: int
    seen: tuple[int, int]
    pages: int
    writes: int
    chunks: int
    runs: int
    starts: int
    stores: int

    @classmethod
    def of(cls, plan: RoundPlan, stream: StreamTensors) -> "Round":
        """Of a plan in the stream that runs it."""
        ends = plan.positions[: plan.num_rows].astype(np.int64) + 1
        chunks = -(-(plan.starts % CHUNK + np.diff(plan.cu_seqlens)) // CHUNK)
        last = plan.starts // CHUNK * CHUNK + chunks * CHUNK
        stored = np.zeros(plan.num_nodes, bool)
        for node, position in zip(plan.store_nodes, plan.store_positions, strict=True):
            stored[node] |= position == last[node]
        return cls(
            rows=plan.num_rows,
            reads=len(plan.read_rows),
            captured=len(stream.tokens),
            seen=(int(ends.sum()), int(ends[plan.read_rows].sum())),
            pages=len(np.unique(plan.pages)),
            writes=len(plan.write_pages),
            chunks=int(chunks.sum()),
            runs=int((chunks - 1 + stored).sum()),
            starts=int((plan.initial_slots >= 0).sum()),
            stores=len(plan.store_nodes),
        )

    def useful(self, rows: int) -> int:
        """Of a tensor of so many rows, those that are tokens or reads."""
        return self.rows if rows == self.captured else min(rows, self.reads)


Arguments = Mapping[str, Any]


def linear(args: Arguments, at: Round) -> Cost:
    """x [T, K] @ weight [M, K]^T."""
    rows, (m, k), size = at.useful(len(args["x"])), args["weight"].shape, args["x"].itemsize
    return Cost(size * (rows * k + m * k + rows * m), 2.0 * rows * k * m)


def add_rms_norm(args: Arguments, at: Round) -> Cost:
    """x and delta in, the sum and the norm out."""
    x = args["x"]
    tensors = 2 if args.get("delta") is None else 4
    return Cost(tensors * at.useful(len(x)) * x.shape[1] * x.itemsize)


def swiglu(args: Arguments, at: Round) -> Cost:
    """[T, 2 I] in, [T, I] out."""
    x = args["gate_up"]
    return Cost(1.5 * at.useful(len(x)) * x.shape[1] * x.itemsize)


def _attention_sizes(args: Arguments, at: Round) -> tuple[int, int, int, int]:
    """(queries, elements of all heads' queries of a row, of its keys, keys seen)."""
    shape, q_gate = args["shape"], args["q_gate"]
    every = len(q_gate) == at.captured
    return (
        at.useful(len(q_gate)),
        shape.heads * shape.head_dim,
        shape.kv_heads * shape.head_dim,
        at.seen[0 if every else 1],
    )


def attention(args: Arguments, at: Round) -> Cost:
    """Queries, gates, keys and values in, distinct pages in and out, outputs out."""
    queries, q, kv, seen = _attention_sizes(args, at)
    size = args["q_gate"].itemsize
    moved = 3 * queries * q + 2 * kv * (at.rows + CHUNK * (at.pages + at.writes))
    return Cost(size * moved, 4.0 * q * seen)


def project_kernel(args: Arguments, at: Round) -> Cost:
    """Norms and rotation: queries, keys and values in and out, pages out."""
    queries, q, kv, _ = _attention_sizes(args, at)
    moved = 2 * queries * q + 2 * kv * (2 * at.rows + CHUNK * at.writes)
    return Cost(args["q_gate"].itemsize * moved)


def attention_kernel(args: Arguments, at: Round) -> Cost:
    """Queries, gates, keys, values and pages in, outputs out."""
    queries, q, kv, seen = _attention_sizes(args, at)
    moved = 3 * queries * q + 2 * kv * (at.rows + CHUNK * at.pages)
    return Cost(args["q_gate"].itemsize * moved, 4.0 * q * seen)


def delta_net(args: Arguments, at: Round) -> Cost:
    """The projected rows in, outputs out, states that are resumed from in and stored ones out."""
    s, projected = args["shape"], args["projected"]
    size, out = projected.itemsize, s.value_heads * s.value_dim
    states = (at.starts + at.stores) * (
        4 * out * s.key_dim + 3 * size * s.conv_channels  # the rule's in float32
    )
    moved = size * at.rows * (projected.shape[1] + out) + states
    parts = prepare(args, at), state_kernel(args, at), output_kernel(args, at)
    return Cost(moved, sum(part.flops for part in parts))


def conv_kernel(args: Arguments, at: Round) -> Cost:
    """Queries, keys and values in and out."""
    return Cost(2 * args["projected"].itemsize * at.rows * args["shape"].conv_channels)


def prep_kernel(args: Arguments, at: Round) -> Cost:
    """Keys, values and gates in; decayed keys, w, u and decays of each chunk and value head out."""
    s, size = args["shape"], args["projected"].itemsize
    key, value = s.key_heads * s.key_dim, s.value_heads * s.value_dim
    heads = at.chunks * s.value_heads
    moved = size * at.rows * (key + value + 2 * s.value_heads)
    moved += heads * CHUNK * (size * (2 * s.key_dim + s.value_dim) + 4)
    products = 2 * CHUNK**2 * (2 * s.key_dim + s.value_dim) + 2 * CHUNK**3 / 3
    return Cost(moved, heads * products)


def state_kernel(args: Arguments, at: Round) -> Cost:
    """Decayed keys, w and u in; the state after each chunk out, stored ones in float32."""
    s, size = args["shape"], args["projected"].itemsize
    state = s.value_heads * s.key_dim * s.value_dim
    moved = at.runs * size * (s.value_heads * CHUNK * (2 * s.key_dim + s.value_dim) + state)
    moved += 4 * state * (at.starts + at.stores)
    return Cost(moved, 4.0 * CHUNK * at.runs * state)


def output_kernel(args: Arguments, at: Round) -> Cost:
    """w, u, queries, keys, gates and each chunk's state in; outputs out."""
    s, size = args["shape"], args["projected"].itemsize
    state = s.value_heads * s.key_dim * s.value_dim
    rows = at.rows * (2 * s.key_heads * s.key_dim + 2 * s.value_heads * s.value_dim)
    chunk = s.value_heads * CHUNK * (s.key_dim + s.value_dim)
    products = 4 * CHUNK * state + 2 * CHUNK**2 * s.value_heads * (s.key_dim + s.value_dim)
    return Cost(size * (rows + at.chunks * chunk + at.runs * state), float(at.chunks * products))


def prepare(args: Arguments, at: Round) -> Cost:
    """Queries, keys and values before the convolution and gates in; what prep_kernel leaves out,
    queries after it and what each position takes of the others' values as well.
    """
    s, size, given = args["shape"], args["projected"].itemsize, prep_kernel(args, at)
    queries = at.chunks * s.value_heads * CHUNK * (s.key_dim + CHUNK)
    moved = given.bytes + size * (at.rows * s.key_heads * s.key_dim + queries)
    return Cost(moved, given.flops + 2.0 * at.chunks * s.value_heads * CHUNK**2 * s.key_dim)


def outputs(args: Arguments, at: Round) -> Cost:
    """w, u, queries and what `prepare` made of them with the keys, gates and each chunk's state in;
    outputs out.
    """
    s, size = args["shape"], args["projected"].itemsize
    state = s.value_heads * s.key_dim * s.value_dim
    chunk = s.value_heads * CHUNK * (2 * s.key_dim + s.value_dim + CHUNK)
    products = 4 * CHUNK * state + 2 * CHUNK**2 * s.value_heads * s.value_dim
    moved = at.rows * 2 * s.value_heads * s.value_dim + at.chunks * chunk + at.runs * state
    return Cost(size * moved, float(at.chunks * products))


def label_logits(args: Arguments, at: Round) -> Cost:
    """Hidden vectors and head rows in, once each; logits out."""
    width, size = args["hidden"].shape[1], args["hidden"].itemsize
    real = args["reads"] >= 0
    pairs = int(real.sum())
    rows = len(args["reads"][real].unique()) + len(args["rows"][real].unique())
    return Cost(size * rows * width + 4 * pairs, 2.0 * pairs * width)


OPERATIONS: dict[str, Callable[[Arguments, Round], Cost]] = {
    "linear": linear,
    "add_rms_norm": add_rms_norm,
    "swiglu": swiglu,
    "attention": attention,
    "delta_net": delta_net,
    "label_logits": label_logits,
}
"""By name in `Kernels`."""

KERNELS: dict[str, Callable[[Arguments, Round], Cost]] = {
    "_matmul_kernel": linear,
    "_add_rms_norm_kernel": add_rms_norm,
    "_swiglu_kernel": swiglu,
    "_project_kernel": project_kernel,
    "attention_kernel": attention_kernel,
    "attend": attention_kernel,
    "conv_kernel": conv_kernel,
    "prep_kernel": prep_kernel,
    "state_kernel": state_kernel,
    "output_kernel": output_kernel,
    "prepare": prepare,
    "chain": state_kernel,
    "outputs": outputs,
    "_label_logits_kernel": label_logits,
}
"""By the name of the launch."""
