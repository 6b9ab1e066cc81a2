"""What benchmarks measure is what they say they measure."""

import re
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.agents import bytes_kept, loops, spread, steps
from benchmarks.engine import ABLATED, ABLATIONS, sides_of
from benchmarks.engines import ablations
from benchmarks.engines.agents import ASKS, GROWS
from benchmarks.engines.clock import closed_loop
from benchmarks.engines.ours import Ours, start
from benchmarks.kernel_costs import KERNELS, OPERATIONS
from benchmarks.kernels import recorded, rows_of, timed
from benchmarks.requests import request
from benchmarks.shapes import SHAPES, WORKLOADS
from flide_engine.kernels import Kernels
from flide_engine.models.qwen3_5 import Qwen35Config

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def keeping(weights: Path) -> Iterator[Ours]:
    """Our engine with checkpoints."""
    config = {"dtype": "bfloat16", "keep_checkpoints": True}
    made = start("test", "default", str(weights), config, pool_gib=0.25)
    yield made
    made.engine.close()


def test_a_step_costs_what_is_new(keeping: Ours) -> None:
    """Agents resume from the last grain of what they were primed with, and leave distinct bytes."""
    before = keeping.engine.counters()
    found = keeping.step(history=2400, agents=3, times=1)
    after = keeping.engine.counters()
    assert len(found["ms"]) == 1
    resumed = (2400 - GROWS) // 64 * 64
    assert after.reused - before.reused == 2 * 3 * resumed
    new = 3 * (2400 - resumed + ASKS)
    assert after.computed - before.computed == 2 * (3 * (2400 - GROWS + ASKS) + new)
    assert after.rounds - before.rounds <= 2 * (1 + 3)

    state = Qwen35Config.of(SHAPES["test"]).state_shape()
    unit = state.unit_bytes(2)
    whole = 5 * GROWS * unit / 64 + 5 * state.slot_units(2) * unit
    assert keeping.kept(history=1280, steps=5)["bytes_a_step"] == pytest.approx(whole / 5, rel=0.02)


def test_a_loop_answers_every_step(keeping: Ours) -> None:
    """As many spans as steps; histories go on growing."""
    before = keeping.engine.counters().asked
    found = keeping.loop(history=640, agents=3, steps=4)
    assert (found["steps"], len(found["ms"])) == (12, 12)
    primed = 3 * (640 + ASKS)
    stepped = 3 * sum(640 + i * GROWS + ASKS for i in range(1, 5))
    assert keeping.engine.counters().asked - before == primed + stepped


class Answers:
    """A worker in this process."""

    name, mode = "ours", "default"

    def __init__(self, engine: Ours) -> None:
        self._engine = engine

    def do(self, what: str, **arguments: object) -> dict[str, object]:
        found: dict[str, object] = getattr(self._engine, what)(**arguments)
        return found


def test_rows_of_agents(keeping: Ours, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every case has its row, history its slope."""
    monkeypatch.setattr("benchmarks.agents.HISTORIES", (1280, 1920))
    monkeypatch.setattr("benchmarks.agents.HISTORY", 3600)
    monkeypatch.setattr("benchmarks.agents.LOOP_STEPS", 2)
    workers = [Answers(keeping)]
    rows = bytes_kept(workers, "test", 2)  # type: ignore[arg-type]
    rows += steps(workers, "test", 1, 1) + loops(workers, "test", 1, 2)  # type: ignore[arg-type]
    assert [(r["work"], r["clients"], r["history"]) for r in rows] == [
        ("agent_bytes", 1, 3600), ("agent_step", 1, 1280), ("agent_step", 1, 1920),
        ("agent_step", 8, 3600), ("agent_history", 1, 1920), ("agent_loop", 2, 3600),
    ]  # fmt: skip
    assert rows[0]["bytes_a_step"] == pytest.approx(rows[0]["distinct_bytes"], rel=0.05)
    assert spread([3.0, 1.0, 2.0]) == {"p50_ms": 2.0, "p90_ms": 3.0, "p99_ms": 3.0}


def test_a_closed_loop_times_all_it_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock of its own: one client, ten seconds of which the first is warm-up. Answers in that
    time make the rate; what is asked in it makes the latencies, and the last one is the longest.
    """
    now, takes = [0.0], iter([0.5, 1.0, 2.0, 2.0, 30.0])

    def submit(asked: str) -> "Future[str]":
        now[0] += next(takes)
        done: Future[str] = Future()
        done.set_result(asked)
        return done

    clock = SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr("benchmarks.engines.clock.time", clock)
    found = closed_loop(submit, ["a"], 1, 10.0)
    assert found == {"rps": 0.3, "timed": 3, "p50_ms": 2000.0, "p99_ms": 30_000.0}
    takes = iter([100.0])
    now[0] = 0.0
    assert closed_loop(submit, ["a"], 1, 10.0)["p50_ms"] is None


def test_ablations(ours: Ours) -> None:
    """No fork computes every prompt whole; padded has the rows of a padded batch."""
    made = ablations.Ablations(ours)
    for mode, rows in {"no_fork": 4 * 510, "padded": 512 + 4 * 96}.items():
        before = ours.engine.counters().computed
        assert len(made.one("race_all", 1, mode)["ms"]) == 1
        computed = ours.engine.counters().computed - before
        assert computed >= 2 * rows, mode  # warm-up repeats the first request
        assert computed % rows == 0, mode
    assert made.closed("race_all", 2, 2.0, "no_fork")["rps"] > 0
    assert [ablations.rung(n) for n in (1, 2, 5, 26, 90, 420, 6200)] == [
        1, 2, 6, 32, 96, 512, 8192,
    ]  # fmt: skip
    alone = ablations.padded(request("race1", 0))
    assert [len(p) for p in alone.prompts] == [512]
    assert ABLATIONS == ablations.MODES
    assert set(ABLATED) <= set(WORKLOADS)


def test_ablations_are_columns_of_ours() -> None:
    """One process, a column a mode."""

    class Named:
        name, mode = "ablations", "default"

    sides = sides_of([Named()], ["race1", "di47"], 15)  # type: ignore[list-item]
    assert [(s.engine, s.mode, list(s.works)) for s in sides] == [
        ("ours", mode, ["race1"]) for mode in ABLATIONS
    ]


def test_operations_beside_their_floors(ours: Ours) -> None:
    """Every operation is recorded as often as the forward pass calls it, and costed."""
    every, at = recorded(ours, "race_all", ours.device)
    timed(every, 1)
    rows = rows_of(every, at, {"work": "race_all"}, (1e12, 1e14))
    calls = {f: sum(int(r["calls"]) for r in rows if r["op"] == f) for f in OPERATIONS}
    layers = SHAPES["test"]["num_hidden_layers"]
    assert calls == {
        "linear": 4 * layers + 1, "add_rms_norm": 2 * layers + 1, "swiglu": layers,
        "attention": 1, "delta_net": layers - 1, "label_logits": 1,
    }  # fmt: skip
    assert all(float(r["floor_us"]) > 0 and float(r["us"]) > 0 for r in rows)
    assert (at.rows, at.reads, at.captured) == (780, 4, 780)
    assert at.seen[0] == 420 * 421 // 2 + 4 * sum(range(421, 511))
    assert at.chunks == 7 + 4 * 2  # branches begin 36 tokens after a grain: 126 in two chunks
    gate_up = next(r for r in rows if r["variant"] == "780x64 192x64")
    flops, moved = 2 * 780 * 64 * 192, 2 * (780 * 64 + 192 * 64 + 780 * 192)
    assert gate_up["floor_us"] == pytest.approx(1e6 * max(flops / 1e14, moved / 1e12), rel=0.01)


def test_every_operation_and_kernel_has_a_floor() -> None:
    """By name; a new one needs its cost."""
    assert set(OPERATIONS) == set(Kernels.__dataclass_fields__)
    sources = [p.read_text() for p in (ROOT / "flide_engine/kernels").glob("*.py")]
    launched = {name for text in sources for name in re.findall(r"^    (\w+_kernel)\[", text, re.M)}
    launched |= {n for text in sources for n in re.findall(r"^        (\w+_kernel)\[", text, re.M)}
    hopper = (ROOT / "flide_engine/kernels/hopper").glob("*.cuh")
    entries = r'extern "C" __global__ void \S+(?:, \d\))?\s+(\w+)\('
    launched |= {name for path in hopper for name in re.findall(entries, path.read_text())}
    assert set(KERNELS) == launched


PARAMETERS = {
    "0.8B": (0.498, 0.254),
    "2B": (1.373, 0.509),
    "4B": (3.569, 0.636),
    "9B": (6.919, 1.017),
}


@pytest.mark.parametrize("shape", PARAMETERS)
def test_shapes_are_those_of_the_models(shape: str) -> None:
    """10^9 parameters of all linear layers, and of the embedding."""
    sizes = {n: np.prod(s) for n, s in Qwen35Config.of(SHAPES[shape]).tensor_shapes().items()}
    linears = sum(s for n, s in sizes.items() if "proj" in n)
    assert linears / 1e9 == pytest.approx(PARAMETERS[shape][0], abs=5e-4)
    assert sizes["embed_tokens.weight"] / 1e9 == pytest.approx(PARAMETERS[shape][1], abs=5e-4)
    assert ("lm_head.weight" in sizes) == (shape == "9B")
