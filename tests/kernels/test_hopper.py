"""The delta net in CUDA C++ against its reference, at odd sizes, with what it writes full of NaN.

On a Hopper GPU as it runs there (mark `gpu`); elsewhere compiled by g++, a block's threads as
fibers (`emulator.h`), which shows what is computed but neither races nor descriptors.
"""

from collections.abc import Mapping

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from flide_engine.executor import to_device
from flide_engine.kernels.delta_net_hopper import KERNELS, delta_net_hopper, macros, supports
from flide_engine.kernels.delta_net_ref import DeltaNetShape, DeltaNetWeights, delta_net_ref
from flide_engine.kernels.hopper.program import FOLDER, Launch
from flide_engine.layout.plan import RoundPlan
from tests.kernels.emulated import MARKS, ON_GPU, emulated
from tests.kernels.test_triton import (
    DEVICE,
    KINDS,
    SLOTS,
    apart,
    both_streams,
    random,
    relative_error,
)

pytestmark = MARKS
BFLOAT16 = torch.bfloat16
RELATIVE_ERROR = {"outputs": 6e-3, "states": 2e-4}
"""Of bfloat16 operands. On the card the Triton kernels differ as much from the reference."""


class Case:
    """Random inputs of one layer over a plan."""

    def __init__(
        self, kind: str, hk: int = 1, hv: int = 2, bias: torch.dtype = BFLOAT16, far: int = 1
    ) -> None:
        """far: multiple of the rows' length by which they lie apart."""
        self.plan, self.tables = both_streams(kind)
        self.shape = DeltaNetShape(hk, hv, 128, 128, 1e-6)
        c = self.shape.conv_channels
        self.weights = DeltaNetWeights(
            conv=random(c, 4, dtype=BFLOAT16, scale=0.5),
            A_log=random(hv, dtype=torch.float32) - 1,
            dt_bias=random(hv, dtype=bias),
            norm=random(128, dtype=torch.float32),
        )
        width = c + hv * 128 + 2 * hv
        rows = self.tables.capacity.rows
        self.projected = random(rows, (width + 8 - width % 8) * far, dtype=BFLOAT16)[:, :width]
        self.state = random(SLOTS, hv, 128, 128, dtype=torch.float32)
        self.conv = random(SLOTS, 3, c, dtype=BFLOAT16)

    def kernels(self) -> Mapping[str, Launch] | None:
        """Those of the GPU, or emulated."""
        if ON_GPU:
            return None
        given = macros(self.shape, self.weights.dt_bias.dtype)
        return emulated("delta_net.cu", tuple(KERNELS), given)

    def wanted(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Outputs, states and convolution rows by the reference."""
        state, conv, rows = self.state.clone(), self.conv.clone(), self.plan.num_rows
        stream = to_device(self.plan, DEVICE)
        given = self.projected[:rows], self.weights, self.shape
        return delta_net_ref(*given, state, conv, stream), state, conv

    def got(self, processors: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The same by the kernels, into NaN, with as many blocks as so many processors take."""
        state, conv = apart(self.state), apart(self.conv)
        for tensor in (state, conv):
            tensor[self.plan.store_slots.tolist()] = torch.nan
        out = delta_net_hopper(
            self.projected, self.weights, self.shape, state, conv, self.tables.stream,
            self.kernels(), processors,
        )  # fmt: skip
        return out[: self.plan.num_rows], state, conv


@pytest.mark.parametrize(("hk", "hv"), [(2, 2), (1, 2)])
@pytest.mark.parametrize("kind", [*KINDS, "long"])
def test_delta_net(kind: str, hk: int, hv: int) -> None:
    """Outputs of all rows, states and convolution rows of all stores."""
    case = Case(kind, hk, hv)
    want, got = case.wanted(), case.got()
    assert relative_error(got[0], want[0]) < RELATIVE_ERROR["outputs"]
    assert relative_error(got[1], want[1]) < RELATIVE_ERROR["states"]
    assert torch.equal(got[2], want[2])


def test_float32_bias_and_rows_far_apart() -> None:
    case = Case("forked", bias=torch.float32, far=3)
    assert relative_error(case.got()[0], case.wanted()[0]) < RELATIVE_ERROR["outputs"]


@pytest.mark.parametrize("kind", ["forked", "resumed"])
def test_no_number_of_blocks_changes_a_bit(kind: str) -> None:
    case = Case(kind, 2, 2)
    first = case.got(1)
    for processors in (2, 5):
        assert all(map(torch.equal, case.got(processors), first))


def same_path(plan: RoundPlan, row: int) -> np.ndarray:
    """Rows whose prompts contain a row's token."""
    node = int(np.searchsorted(plan.cu_seqlens, row, "right")) - 1
    below = {node}
    for other in range(node + 1, plan.num_nodes):
        if int(plan.parents[other]) in below:
            below.add(other)
    own = np.zeros(plan.num_rows, bool)
    for each in below:
        own[plan.cu_seqlens[each] : plan.cu_seqlens[each + 1]] = True
    return own


def test_what_is_not_finite_stays_in_its_prompts() -> None:
    """NaN in a branch's row reaches that branch, and nothing of its siblings and ancestors."""
    case = Case("forked")
    clean = case.got()
    row = int(case.plan.cu_seqlens[2])  # the first of a branch
    case.projected[row] = torch.nan
    broken = case.got()
    own = torch.from_numpy(same_path(case.plan, row)).to(DEVICE)
    assert torch.equal(broken[0][~own], clean[0][~own])
    assert broken[0][row].isnan().all()
    assert 0 < int(own.sum()) < case.plan.num_rows


def test_repeated_tokens_do_not_blow_up() -> None:
    """Equal keys with full strength and no decay: the worst case of the triangular inverse."""
    case = Case("alone", 1, 1)
    case.weights.A_log.fill_(-30.0)
    case.projected[:] = case.projected[0].clone()
    case.projected[:, -2:] = 20.0
    assert relative_error(case.got()[0], case.wanted()[0]) < 5e-2


def test_only_what_it_was_written_for() -> None:
    case = Case("alone")
    assert supports(case.projected, case.weights, case.shape)
    assert not supports(case.projected.float(), case.weights, case.shape)
    assert not supports(case.projected, case.weights, DeltaNetShape(1, 2, 64, 128, 1e-6))
    rows = case.projected.new_empty(8, case.projected.stride(0) + 1)
    assert not supports(rows[:, : case.projected.shape[1]], case.weights, case.shape)


def test_the_sources_travel_with_the_package() -> None:
    """What an installation needs beside the Python files is named in pyproject.toml."""
    import tomllib
    from pathlib import Path

    declared = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    patterns = declared["tool"]["setuptools"]["package-data"]["flide_engine.kernels.hopper"]
    named = {path for pattern in patterns for path in FOLDER.glob(pattern)}
    assert {p for p in FOLDER.iterdir() if p.suffix.startswith(".cu")} == named
