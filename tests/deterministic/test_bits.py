"""Label logits are bit for bit those of the prompt alone, whatever else happens to an engine.

The same machine of hypothesis drives the references in a fixed order, where a forward pass takes
milliseconds, Triton's kernels in their interpreter (a second), and the captured graphs of a GPU.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from benchmarks.bits.histories import Ask, Histories
from benchmarks.bits.watch import Watched
from benchmarks.shapes import LABELS
from flide_engine.errors import RoundTooLarge
from tests.deterministic.engines import (
    Interpreted,
    Made,
    fixed_order,
    interpreted,
    interpreted_kernels,
    on_the_card,
)
from tests.deterministic.machine import Machine

VOCABULARY = 240_000
ON_A_GPU = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None
EXAMPLES = settings(suppress_health_check=list(HealthCheck), print_blob=False)

references = pytest.mark.skipif(ON_A_GPU, reason="the card has its own")
interpreter = pytest.mark.skipif(not INTERPRETED, reason="needs Triton and TRITON_INTERPRET=1")
card = pytest.mark.skipif(not ON_A_GPU, reason="needs a GPU")


@contextmanager
def asked(made: Made, longest: int, **sizes: Any) -> Iterator[type[Machine]]:
    """A machine over an engine. longest: tokens of a question. sizes: of the machine."""
    histories = Histories(made, LABELS, VOCABULARY, longest)
    try:
        yield type("Asked", (Machine,), {"histories": histories, **sizes})
    finally:
        histories.close()


def run(machine: type[Machine], examples: int, steps: int) -> Watched:
    """What the machine's engine has been seen to do. Raises what hypothesis has found."""
    size = settings(EXAMPLES, max_examples=examples, stateful_step_count=steps)
    run_state_machine_as_test(machine, settings=size)
    return machine.histories.watched


@references
def test_nothing_that_happens_changes_a_bit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """References on a CPU, with restarts from disk."""
    with asked(fixed_order(monkeypatch, tmp_path), 30, first=70) as machine:
        assert run(machine, examples=8, steps=10).compared > 50


@pytest.mark.slow
@pytest.mark.timeout(1800)
@references
def test_nothing_that_happens_for_long_changes_a_bit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The same, longer."""
    with asked(fixed_order(monkeypatch, tmp_path), 30) as machine:
        assert run(machine, examples=60, steps=25).compared > 1000


@references
@interpreter
def test_kernels_in_the_interpreter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Company, a shared trunk, a resumed state, other buckets."""
    kernels = interpreted_kernels()
    histories = Histories(interpreted(monkeypatch, tmp_path, kernels), LABELS[:2], VOCABULARY, 5)
    histories.grow("a", 70, 0)
    histories.begin_like("b", "a", 68, 1, 1)
    histories.ask([Ask("a", "one", 1, 0), Ask("b", "one", 1, 1)])
    histories.to_host()
    histories.grow("a", 5, 2)
    histories.ask([Ask("a", "some", 2, 3)], fault=RoundTooLarge(0, 0, 0, 0))
    watched = histories.watched
    histories.close()
    assert not watched.differing, watched.differing[0]
    assert watched.by_path["shared trunk"] == 2
    assert watched.by_path["from host memory"] == 2
    assert watched.compared == 4


@pytest.mark.slow
@pytest.mark.timeout(1800)
@references
@interpreter
def test_whatever_happens_in_the_interpreter(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The machine over Triton's kernels; its states stay short."""
    made = interpreted(monkeypatch, tmp_path, interpreted_kernels())
    sizes = {"first": 66, "longest": 4, "most": 90, "limits": (None,), "restarts": False}
    with asked(made, 4, **sizes) as machine:
        assert run(machine, examples=2, steps=5).compared > 4


@pytest.mark.slow
@pytest.mark.timeout(1800)
@references
@interpreter
def test_a_wrong_kernel_is_told_in_the_interpreter(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A product whose rows depend on how many there are, by layer."""

    def uneven(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = x @ weight.T
        return y * (1 + 2**-6) if len(x) > Interpreted.lengths[0] and len(weight) > 64 else y

    kernels = replace(interpreted_kernels(), linear=uneven)
    histories = Histories(interpreted(monkeypatch, tmp_path, kernels), LABELS[:2], VOCABULARY, 5)
    histories.grow("a", 80, 0)
    histories.ask([Ask("a", "short", 1, 0)])
    histories.close()
    (first, *_) = histories.watched.differing
    assert first.where.startswith("layer 0, mixer, position"), first


@pytest.mark.gpu
@pytest.mark.timeout(900)
@card
def test_nothing_that_happens_changes_a_bit_on_the_card(tmp_path: Path) -> None:
    """Captured graphs, heads as wide as a real model's; a restart is a test of its own."""
    sizes = {"first": 200, "longest": 2000, "most": 3000, "limits": (None, 256, 1024)}
    with asked(on_the_card(tmp_path), 90, restarts=False, **sizes) as machine:
        assert run(machine, examples=40, steps=20).compared > 300


@pytest.mark.gpu
@pytest.mark.timeout(900)
@card
def test_a_restart_changes_no_bit_on_the_card(tmp_path: Path) -> None:
    """States from files, beside what was computed before."""
    histories = Histories(on_the_card(tmp_path), LABELS, VOCABULARY, 90)
    for seed, name in enumerate("abc"):
        histories.grow(name, 5000 if name == "c" else 700, seed)
    for _ in range(2):
        histories.ask([Ask(name, "some", 6, seed) for seed, name in enumerate("abc")])
        histories.restart()
        histories.grow("a", 100, 7)
    histories.ask([Ask(name, "tree", 6, seed) for seed, name in enumerate("abc")])
    watched = histories.watched
    histories.close()
    assert not watched.differing, watched.differing[0]
    assert watched.by_path["after a restart"] > 20
    assert watched.by_path["longer than a round"] > 10
