"""Fork attention in CUDA C++ against its reference, with what it writes full of NaN.

On a Hopper GPU as it runs there (mark `gpu`); elsewhere compiled by g++ (`emulator.h`).
"""

from collections.abc import Mapping

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from flide_engine.device_plan import Capacity, Tables
from flide_engine.executor import to_device
from flide_engine.kernels.attention import attention
from flide_engine.kernels.attention_hopper import attend_hopper, macros, supports
from flide_engine.kernels.attention_ref import AttentionShape, attention_ref
from flide_engine.kernels.hopper.program import Launch
from flide_engine.kernels.pointwise_ref import rms_norm_ref, rope_ref
from flide_engine.readout import Asked
from tests.kernels.emulated import MARKS, ON_GPU, emulated
from tests.kernels.test_triton import DEVICE, KINDS, PAGES, apart, both_streams, random
from tests.kernels.test_triton import relative_error as error

pytestmark = MARKS
BFLOAT16 = torch.bfloat16
RELATIVE_ERROR = 4e-3
"""Of bfloat16 operands; emulated it is 1e-3."""


class Case:
    """Random inputs of one layer over a plan."""

    def __init__(
        self,
        kind: str,
        only_reads: bool = False,
        window: int | None = None,
        heads: tuple[int, int] = (6, 2),
        width: int = 256,
    ) -> None:
        self.plan, _ = both_streams(kind)
        self.only_reads = only_reads
        self.shape = AttentionShape(*heads, width, 1e-6, window)
        self.rows = self.plan.num_rows + 11
        self.q_gate = random(self.rows, 2 * heads[0] * width, dtype=BFLOAT16)
        self.k_v = random(self.rows, 2 * heads[1] * width, dtype=BFLOAT16)
        self.norms = tuple(random(width, dtype=BFLOAT16, scale=0.1) for _ in range(2))
        angle = random(self.rows, width // 8, dtype=torch.float32)
        self.turns = angle.cos(), angle.sin()
        self.pages = [
            random(PAGES + i, 64, heads[1], width, dtype=BFLOAT16)[:PAGES] for i in range(2)
        ]

    def tables(self, tile: int) -> Tables:
        """The plan in a bucket with padding, in tiles of so many queries."""
        tables = Tables(Capacity.of(self.rows, tile, 64, 3), DEVICE)
        assert tables.fill(self.plan, Asked.every_vector(len(self.plan.read_rows)))
        tables.upload()
        return tables

    def kernels(self, tile: int) -> Mapping[str, Launch] | None:
        """Those of the GPU, or emulated."""
        if ON_GPU:
            return None
        return emulated("attention.cu", ("attend",), macros(self.shape, tile))

    def wanted(self) -> torch.Tensor:
        """Outputs by the reference, which writes the pages."""
        rows, exact = self.plan.num_rows, to_device(self.plan, DEVICE)
        count = len(self.plan.read_rows) if self.only_reads else rows
        return attention_ref(
            self.q_gate[:count], self.k_v[:rows], *self.norms, *(t[:rows] for t in self.turns),
            exact.read_rows if self.only_reads else None, *self.pages, self.shape, exact,
        )  # fmt: skip

    def got(self, tile: int = 32, processors: int = 3) -> torch.Tensor:
        """The same by the kernel, into NaN; `wanted` has written the pages. Rows that are padding
        are NaN.
        """
        tables, rows, shape = self.tables(tile), self.plan.num_rows, self.shape
        reads = tables.stream.read_rows if self.only_reads else None
        q_gate = self.q_gate if reads is None else self.q_gate[: len(reads)]
        k, v = self.k_v.view(-1, 2, shape.kv_heads, shape.head_dim).unbind(1)
        k, v = rope_ref(rms_norm_ref(k, self.norms[1], 1e-6, 1.0), *self.turns), v.clone()
        k[rows:], v[rows:] = torch.nan, torch.nan
        q = q_gate.view(len(q_gate), shape.heads, 2, shape.head_dim)[:, :, 0]
        turns = self.turns if reads is None else tuple(t[reads.long()] for t in self.turns)
        q = rope_ref(rms_norm_ref(q, self.norms[0], 1e-6, 1.0), *turns).contiguous()
        out = torch.full((len(q_gate), q[0].numel()), torch.nan, dtype=BFLOAT16, device=DEVICE)
        attend_hopper(
            q, q_gate, k.contiguous(), v, reads, *map(apart, self.pages), out, shape,
            tables.stream, self.kernels(tile), processors,
        )  # fmt: skip
        count = len(self.plan.read_rows) if self.only_reads else rows
        assert out[count:].isnan().all(), "a row that nobody asked for has been written"
        return out[:count]


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("only_reads", [False, True])
@pytest.mark.parametrize("kind", [*KINDS, "long"])
def test_attention(kind: str, only_reads: bool, window: int | None) -> None:
    """All rows and read rows only, with and without a window; the same bits in tiles of 16."""
    case = Case(kind, only_reads, window)
    want, got = case.wanted(), case.got(32)
    assert error(got, want) < RELATIVE_ERROR
    assert torch.equal(case.got(16), got)


@pytest.mark.parametrize(("heads", "width"), [((2, 2), 256), ((4, 2), 128), ((8, 2), 256)])
def test_other_heads(heads: tuple[int, int], width: int) -> None:
    """One, two and four query heads a key head, narrow ones too."""
    case = Case("forked", heads=heads, width=width)
    want = case.wanted()
    for tile in (16, 32):
        assert error(case.got(tile), want) < RELATIVE_ERROR


@pytest.mark.parametrize("kind", ["forked", "resumed"])
def test_no_number_of_blocks_changes_a_bit(kind: str) -> None:
    case = Case(kind)
    case.wanted()
    first = case.got(16, 1)
    for processors in (2, 7, 40):
        assert torch.equal(case.got(16, processors), first)


@pytest.mark.parametrize("kind", ["company", "resumed"])
def test_what_is_not_finite_in_one_request_stays_there(kind: str) -> None:
    """Keys and values of the first row, which is the first tree's: no other tree sees them."""
    case = Case(kind)
    case.k_v[0] = torch.nan
    roots = np.arange(case.plan.num_nodes)
    for n, parent in enumerate(case.plan.parents.tolist()):
        roots[n] = roots[parent] if parent >= 0 else n
    others = np.repeat(roots != 0, np.diff(case.plan.cu_seqlens))
    case.wanted()
    got = case.got()
    assert others.any()
    assert torch.isfinite(got[others]).all()
    assert torch.isnan(got[0]).all()


def test_a_query_that_is_not_finite_changes_no_other() -> None:
    """The first, which rows of a product that do not exist are made of."""
    case = Case("forked")
    case.wanted()
    clean = case.got()
    case.q_gate[0] = torch.nan
    broken = case.got()
    assert torch.isnan(broken[0]).all()
    assert torch.equal(broken[1:], clean[1:])


def test_only_what_it_was_written_for() -> None:
    case = Case("alone")
    given = case.q_gate, case.pages[0], case.shape
    assert supports(*given, 0)
    assert not supports(*given, 32)
    assert not supports(case.q_gate.float(), *given[1:], 0)
    assert not supports(*given[:2], AttentionShape(6, 2, 64, 1e-6), 0)
    assert not supports(*given[:2], AttentionShape(10, 2, 256, 1e-6), 0)
    rows = case.q_gate.new_empty(8, case.q_gate.stride(0) + 1)
    assert not supports(rows[:, :-1], *given[1:], 0)


@pytest.mark.skipif(not ON_GPU, reason="needs a Hopper GPU")
@pytest.mark.parametrize("only_reads", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_both_launches(kind: str, only_reads: bool) -> None:
    """Norms, rotation and pages in Triton, then the kernel."""
    case = Case(kind, only_reads)
    want = case.wanted()
    for tile in (16, 32):
        tables = case.tables(tile)
        reads = tables.stream.read_rows if only_reads else None
        pages = [apart(page) for page in case.pages]
        for page in pages:
            page[case.plan.write_pages.tolist()] = torch.nan
        q_gate = case.q_gate if reads is None else case.q_gate[: len(reads)]
        got = attention(
            q_gate, case.k_v, *case.norms, *case.turns, reads, *pages, case.shape, tables.stream,
            hopper=True,
        )  # fmt: skip
        assert error(got[: len(want)], want) < 2e-2
