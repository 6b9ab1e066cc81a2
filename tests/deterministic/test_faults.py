"""The harness finds planted faults, makes the case small, and says where the bits part."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from benchmarks.bits.histories import Ask, Histories
from benchmarks.shapes import LABELS
from flide_engine.checkpoints import Checkpoints
from flide_engine.config import GRAIN
from flide_engine.kernels.invariant_matmul_ref import invariant_matmul_ref
from flide_engine.layout.plan import Anchor
from flide_engine.work import RequestWork
from tests.deterministic.engines import fixed_order
from tests.deterministic.fixed_order import FIXED_ORDER
from tests.deterministic.machine import Machine

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="its engine is a CPU's")
SEARCH = settings(
    max_examples=50, stateful_step_count=5, derandomize=True, database=None,
    phases=[Phase.generate, Phase.shrink], print_blob=False,
)  # fmt: skip
WHERE = re.compile(r"from (layer \d+, \w+), position (\d+) \(row (\d+) of the round\) on")


def uneven(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A product that splits K in two for fewer rows than a grain, as a library may."""
    parts = [slice(None)] if len(x) >= GRAIN else [slice(16), slice(16, None)]
    return sum(invariant_matmul_ref(x[:, part], weight[:, part]) for part in parts)  # type: ignore[return-value]


def wrong_slot(anchor: Anchor, other: Anchor) -> Anchor:
    """A checkpoint with another's recurrent state."""
    return replace(anchor, slot=other.slot)


def stale_page(anchor: Anchor, other: Anchor) -> Anchor:
    """A checkpoint with another's first keys and values."""
    return replace(anchor, pages=np.concatenate([other.pages[:1], anchor.pages[1:]]))


def plant(patch: pytest.MonkeyPatch, spoil: Callable[[Anchor, Anchor], Anchor]) -> None:
    """Requests resume from a checkpoint that is mixed up with another one."""
    plan = Checkpoints.plan

    def spoilt(self: Checkpoints, work: RequestWork, limit: int) -> None:
        plan(self, work, limit)
        mine = work.resume.checkpoint if work.resume is not None and not work.at else None
        for other in self.index if mine is not None else ():
            if other is not mine:
                taken = Anchor(other.position, other.slot, self.index.pages_of(other))
                assert work.resume is not None
                work.resume = replace(work.resume, anchor=spoil(work.resume.anchor, taken))
                return

    patch.setattr(Checkpoints, "plan", spoilt)


@pytest.fixture
def histories(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Histories]:
    """Over an engine with the fault that the test is given."""
    fault = request.param
    kernels = FIXED_ORDER
    if fault is uneven:
        kernels = replace(FIXED_ORDER, linear=uneven)
    else:
        plant(monkeypatch, fault)
    made = Histories(fixed_order(monkeypatch, tmp_path, kernels), LABELS, 240_000, most=30)
    yield made
    made.close()


def smallest(histories: Histories) -> tuple[str, list[str]]:
    """(report, steps) of the case that hypothesis ends with."""

    class Faulty(Machine):
        first, restarts = 70, False

    Faulty.histories = histories
    with pytest.raises(AssertionError) as raised:
        run_state_machine_as_test(Faulty, settings=SEARCH)
    steps = re.findall(r"^state\.(\w+)\(", "\n".join(raised.value.__notes__), re.M)
    return str(raised.value), [step for step in steps if step != "teardown"]


@pytest.mark.parametrize(
    ("histories", "half"),
    [(wrong_slot, "layer 0, mixer"), (stale_page, "layer 1, mixer")],
    indirect=["histories"],
)
def test_a_mixed_up_checkpoint_is_told_by_layer_and_row(histories: Histories, half: str) -> None:
    """The first layer that reads what is wrong, in the first row after the checkpoint."""
    for seed, name in enumerate("ab"):
        histories.grow(name, 150, seed)
        histories.ask([Ask(name, "one", 1, seed)])
    assert not histories.watched.differing
    histories.ask([Ask("b", "some", 2, 2), Ask("a", "some", 3, 3)])
    watched = histories.watched
    assert len(watched.differing) == 5
    assert watched.wrong["branches"] == watched.wrong["from the device"] == 5
    for different in watched.differing:
        where = WHERE.search(str(different))
        assert where, different
        assert where[1] == half
        assert int(where[2]) == 128
    assert watched.wrong["trunk"] == 0


@pytest.mark.parametrize("histories", [uneven], indirect=True)
def test_an_uneven_product_is_found_and_made_small(histories: Histories) -> None:
    """One or two requests do; the report names layer and row."""
    report, steps = smallest(histories)
    where = WHERE.search(report)
    assert where, report
    assert where[1] in {"layer 0, mixer", "layer 3, mixer"}
    assert set(steps) <= {"ask", "ask_in_company"}
    assert len(steps) <= 2


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("histories", [wrong_slot, stale_page], indirect=True)
def test_a_mixed_up_checkpoint_is_found_and_made_small(histories: Histories) -> None:
    """Two states are asked about, and one of them again."""
    report, steps = smallest(histories)
    assert WHERE.search(report), report
    assert len(steps) <= 4, steps
