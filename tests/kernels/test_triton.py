"""Triton kernels against their references, at odd sizes, with outputs full of NaN.

On a GPU they run compiled (mark `gpu`); elsewhere in Triton's interpreter, in float32, at small
sizes, when TRITON_INTERPRET=1 is set.
"""

import os
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from flide_engine.device_plan import Capacity, Tables
from flide_engine.executor import to_device
from flide_engine.kernels.attention import attention
from flide_engine.kernels.attention_ref import AttentionShape, attention_ref
from flide_engine.kernels.delta_net import LARGE, SMALL, DeltaNetTuning, delta_net
from flide_engine.kernels.delta_net_ref import DeltaNetShape, DeltaNetWeights, delta_net_ref
from flide_engine.kernels.pointwise import add_rms_norm, swiglu
from flide_engine.kernels.pointwise_ref import add_rms_norm_ref, swiglu_ref
from flide_engine.layout.plan import Anchor, RoundPlan
from flide_engine.layout.stream import Job, lay_out
from flide_engine.layout.tree import build_forest
from flide_engine.readout import Asked

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = (
    [pytest.mark.skipif(not INTERPRETED, reason="needs a GPU or TRITON_INTERPRET=1")]
    if not torch.cuda.is_available()
    else [pytest.mark.gpu]
)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32] if INTERPRETED else [torch.float32, torch.bfloat16]
RELATIVE_ERROR = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
SLOTS, PAGES = 12, 40


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Norm of the difference over the norm of the reference; NaN never passes."""
    return float((got.double() - want.double()).norm() / want.double().norm())


def trees(kind: str) -> list[Job]:
    """Rounds of different shapes; shorter in the interpreter, with the same places in a grain."""
    rng = np.random.default_rng(0)

    def prompts(trunk: int, branches: list[int]) -> list[np.ndarray]:
        shared = rng.integers(0, 50, trunk)
        return [
            np.concatenate([shared, [100 + i], rng.integers(0, 50, n - 1)]).astype(np.int32)
            for i, n in enumerate(branches)
        ]

    if kind == "alone":
        return [Job(build_forest(prompts(0, [70])))]
    if kind == "forked":
        trunk, branches = (66, [1, 5, 64]) if INTERPRETED else (130, [1, 5, 64, 66])
        return [Job(build_forest(prompts(trunk, branches)))]
    if kind == "long":
        return [Job(build_forest(prompts(390 if INTERPRETED else 1030, [3, 70])))]
    if kind == "company":
        return [
            Job(build_forest(prompts(63, [2, 3]))),
            Job(build_forest(prompts(64, [1, 60]))),
            Job(build_forest(prompts(0, [9]))),
        ]
    anchor = Anchor(128, 3, np.array([7, 5], np.int32))
    return [
        Job(build_forest(prompts(200, [4, 9]), 128), anchor),
        Job(build_forest(prompts(20, [3]))),
    ]


KINDS = ["alone", "forked", "company", "resumed"]


def both_streams(kind: str, split: int = 0) -> tuple[RoundPlan, Tables]:
    """A plan, and the same plan in a bucket with padding. split: grains of a part of the keys."""
    layout = lay_out(trees(kind))
    pages = np.arange(10, 10 + layout.num_pages, dtype=np.int32)
    slots = np.arange(5, 5 + layout.num_slots, dtype=np.int32)
    plan, _ = layout.bind(pages, slots)
    rows = plan.num_rows + 11
    tables = Tables(Capacity.of(rows, 8, 64, 3, split), DEVICE)
    assert tables.fill(plan, Asked.every_vector(len(plan.read_rows)))
    tables.upload()
    return plan, tables


def random(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    """Random numbers on the device."""
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))) * scale
    return made.to(DEVICE, dtype)


def apart(tensor: torch.Tensor) -> torch.Tensor:
    """A copy whose entries lie apart, as those of one layer do in a pool, with NaN between them."""
    around = torch.full((len(tensor), 3, *tensor.shape[1:]), torch.nan, dtype=tensor.dtype)
    around = around.to(tensor.device)
    around[:, 1] = tensor
    return around[:, 1]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("hk", "hv"), [(2, 2), (1, 2)])
@pytest.mark.parametrize("kind", [*KINDS, "long"])
def test_delta_net(kind: str, hk: int, hv: int, dtype: torch.dtype) -> None:
    """Outputs of all rows, states and convolution rows of all stores."""
    plan, tables = both_streams(kind)
    shape = (
        DeltaNetShape(hk, hv, 32, 32, 1e-6)
        if INTERPRETED
        else DeltaNetShape(hk, hv, 128, 128, 1e-6)
    )
    c = shape.conv_channels
    weights = DeltaNetWeights(
        conv=random(c, 4, dtype=dtype, scale=0.5),
        A_log=random(hv, dtype=torch.float32) - 1,
        dt_bias=random(hv, dtype=dtype),
        norm=random(shape.value_dim, dtype=torch.float32),
    )
    projected = random(tables.capacity.rows, c + hv * shape.value_dim + 2 * hv, dtype=dtype)
    state = random(SLOTS, hv, shape.key_dim, shape.value_dim, dtype=torch.float32)
    conv = random(SLOTS, 3, c, dtype=dtype)
    states, convs = [state, apart(state)], [conv, apart(conv)]
    for tensor in (states[1], convs[1]):
        tensor[plan.store_slots.tolist()] = torch.nan
    rows = plan.num_rows
    want = delta_net_ref(
        projected[:rows], weights, shape, states[0], convs[0], to_device(plan, DEVICE)
    )
    got = delta_net(
        projected,
        weights,
        shape,
        states[1],
        convs[1],
        tables.stream,
        DeltaNetTuning(7, 4, stages=2),
    )
    assert relative_error(got[:rows], want) < RELATIVE_ERROR[dtype]
    assert relative_error(states[1], states[0]) < RELATIVE_ERROR[dtype]
    assert torch.equal(convs[0], convs[1])


@pytest.mark.parametrize("kind", ["forked", "long"])
def test_no_tuning_changes_a_bit(kind: str) -> None:
    """Outputs and states, whatever the launches look like."""
    plan, tables = both_streams(kind)
    width = 32 if INTERPRETED else 128
    shape, dtype = DeltaNetShape(2, 2, width, width, 1e-6), DTYPES[-1]
    c = shape.conv_channels
    weights = DeltaNetWeights(
        conv=random(c, 4, dtype=dtype, scale=0.5), A_log=random(2, dtype=torch.float32) - 1,
        dt_bias=random(2, dtype=dtype), norm=random(width, dtype=torch.float32),
    )  # fmt: skip
    projected = random(tables.capacity.rows, c + 2 * width + 4, dtype=dtype)
    found = []
    # the interpreter runs programs one by one, those without work as well
    tunings = [replace(SMALL, programs=5), replace(LARGE, programs=9)]
    for tuning in tunings if INTERPRETED else (SMALL, LARGE):
        state = torch.zeros(SLOTS, 2, width, width, device=DEVICE)
        conv = torch.zeros(SLOTS, 3, c, device=DEVICE, dtype=dtype)
        out = delta_net(projected, weights, shape, state, conv, tables.stream, tuning)
        found.append((out[: plan.num_rows], state))
    for out, state in found[1:]:
        assert torch.equal(out, found[0][0])
        assert torch.equal(state, found[0][1])


class AttentionCase:
    """Random inputs of one attention layer over a plan."""

    def __init__(
        self, plan: RoundPlan, padded: int, window: int | None, dtype: torch.dtype
    ) -> None:
        self.plan, self.dtype = plan, dtype
        self.shape = AttentionShape(6, 2, 32 if INTERPRETED else 256, 1e-6, window)
        hd, half = self.shape.head_dim, self.shape.head_dim // 8
        self.q_gate = random(padded, 12 * hd, dtype=dtype)
        self.k_v = random(padded, 4 * hd, dtype=dtype)
        self.norms = tuple(random(hd, dtype=dtype, scale=0.1) for _ in range(2))
        angle = random(padded, half, dtype=torch.float32)
        self.turns = angle.cos(), angle.sin()
        self.pages = [random(PAGES + i, 64, 2, hd, dtype=dtype)[:PAGES] for i in range(2)]

    def wanted(self, only_reads: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """(outputs by the reference, the pages after it)."""
        rows, exact = self.plan.num_rows, to_device(self.plan, DEVICE)
        pages = [p.clone() for p in self.pages]
        count = len(self.plan.read_rows) if only_reads else rows
        out = attention_ref(
            self.q_gate[:count], self.k_v[:rows], *self.norms, *(t[:rows] for t in self.turns),
            exact.read_rows if only_reads else None, *pages, self.shape, exact,
        )  # fmt: skip
        return out, pages

    def found(
        self, tables: Tables, only_reads: bool, programs: int = 5
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """(outputs of the kernel, the pages after it); written pages and memory held NaN before."""
        pages = [apart(p) for p in self.pages]
        for page in pages:
            page[self.plan.write_pages.tolist()] = torch.nan
        reads = tables.stream.read_rows if only_reads else None
        q_gate = self.q_gate[: len(reads)] if reads is not None else self.q_gate
        out = attention(
            q_gate, self.k_v, *self.norms, *self.turns, reads, *pages, self.shape, tables.stream,
            programs=programs,
        )  # fmt: skip
        return out[: len(self.plan.read_rows) if only_reads else self.plan.num_rows], pages


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("only_reads", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_attention(kind: str, only_reads: bool, window: int | None, dtype: torch.dtype) -> None:
    """All rows and read rows only, with and without a window; pages written in passing."""
    plan, tables = both_streams(kind)
    case = AttentionCase(plan, tables.capacity.rows, window, dtype)
    want, pages = case.wanted(only_reads)
    got, written = case.found(tables, only_reads)
    assert relative_error(got, want) < RELATIVE_ERROR[dtype]
    for a, b in zip(pages, written, strict=True):
        assert relative_error(b, a) < RELATIVE_ERROR[dtype]


@pytest.mark.parametrize("kind", ["company", "resumed"])
def test_what_is_not_finite_in_one_request_stays_there(kind: str) -> None:
    """Keys and values of the first row, which is the first tree's: no other tree sees them."""
    plan, tables = both_streams(kind)
    case = AttentionCase(plan, tables.capacity.rows, None, DTYPES[-1])
    case.k_v[0] = torch.nan
    roots = np.arange(plan.num_nodes)
    for n, parent in enumerate(plan.parents.tolist()):
        roots[n] = roots[parent] if parent >= 0 else n
    others = np.repeat(roots != 0, np.diff(plan.cu_seqlens))
    want, got = case.wanted(False)[0], case.found(tables, False)[0]
    assert others.any()
    assert torch.isfinite(want[others]).all()
    assert torch.isfinite(got[others]).all()
    assert torch.isnan(got[0]).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("kind", "only_reads", "window", "split"),
    [("forked", True, None, 1), ("resumed", True, None, 1), ("resumed", False, 40, 2)],
)
def test_attention_in_parts(
    kind: str, only_reads: bool, window: int | None, split: int, dtype: torch.dtype
) -> None:
    """Keys cut at every one or two grains; as many programs as there are, the bits are the same."""
    plan, tables = both_streams(kind, split)
    case = AttentionCase(plan, tables.capacity.rows, window, dtype)
    want, _ = case.wanted(only_reads)
    got, _ = case.found(tables, only_reads)
    assert relative_error(got, want) < RELATIVE_ERROR[dtype]
    if kind == "resumed":
        assert torch.equal(got, case.found(tables, only_reads, programs=1)[0])
    parts = int(tables.stream.tasks.counts[7 if only_reads else 6])  # type: ignore[union-attr]
    assert parts > int(tables.stream.tasks.counts[2 if only_reads else 1])  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [72, 256])
def test_pointwise(width: int, dtype: torch.dtype) -> None:
    """Widths that are no powers of two, with and without a residual."""
    x, delta, weight = (
        random(5, width, dtype=dtype),
        random(5, width, dtype=dtype),
        random(width, dtype=dtype),
    )
    for add in (None, delta):
        for got, want in zip(
            add_rms_norm(x, add, weight, 1e-6), add_rms_norm_ref(x, add, weight, 1e-6), strict=True
        ):
            assert relative_error(got, want) < RELATIVE_ERROR[dtype]
    assert relative_error(swiglu(x), swiglu_ref(x)) < RELATIVE_ERROR[dtype]


def test_repeated_tokens_do_not_blow_up() -> None:
    """Equal keys with full strength and no decay: the worst case of the triangular inverse."""
    plan, tables = both_streams("alone")
    shape = (
        DeltaNetShape(1, 1, 32, 32, 1e-6) if INTERPRETED else DeltaNetShape(1, 1, 128, 128, 1e-6)
    )
    c = shape.conv_channels
    ones = torch.ones(shape.value_dim, device=DEVICE)
    weights = DeltaNetWeights(
        conv=random(c, 4, dtype=torch.float32), A_log=torch.full((1,), -30.0, device=DEVICE),
        dt_bias=torch.zeros(1, device=DEVICE), norm=ones,
    )  # fmt: skip
    row = random(1, c + shape.value_dim + 2, dtype=torch.float32)
    row[:, -2] = 20.0
    projected = row.repeat(tables.capacity.rows, 1)
    pools = [
        (
            torch.zeros(SLOTS, 1, shape.key_dim, shape.value_dim, device=DEVICE),
            torch.zeros(SLOTS, 3, c, device=DEVICE),
        )
        for _ in range(2)
    ]
    want = delta_net_ref(
        projected[: plan.num_rows], weights, shape, *pools[0], to_device(plan, DEVICE)
    )
    got = delta_net(projected, weights, shape, *pools[1], tables.stream, DeltaNetTuning(3, 4))
    assert relative_error(got[: plan.num_rows], want) < 1e-3
