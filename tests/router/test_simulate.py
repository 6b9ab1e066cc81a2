"""The simulation: its own accounts balance, and what it says of the policies, on small fleets."""

import gzip
import json
import random
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from router import simulate
from router.sim_fleet import CostModel, Job, Replica, Totals
from router.sim_loop import Fault, Result, Scenario, Simulation, per_window
from router.sim_policies import Ours
from router.sim_workload import OPENING_BYTES, Documents, Shape, State, tokens_of

SMALL = Scenario(6, 120, 2, seconds=100, ramp_s=10, think_s=2.0, documents_per_s=2, careless=0.02)


@pytest.fixture(scope="module")
def shapes() -> list[Shape]:
    """Twelve steps of 1 to 3 kB behind the opening, from two sources."""
    rng = np.random.default_rng(0)
    found = []
    for i in range(12):
        ends = OPENING_BYTES + np.cumsum([6000, *rng.integers(1000, 3000, 12)])
        common = OPENING_BYTES + (5000 if i % 3 == 0 else 100)
        found.append(Shape(f"source {i % 3 == 0}", common, tuple(map(int, ends)), (200,) * 13))
    return found


def ran(policy: str, scenario: Scenario, shapes: list[Shape]) -> tuple[Simulation, Result]:
    """A simulation after its run."""
    simulation = Simulation(scenario, partial(simulate.make, policy, None), shapes)
    return simulation, simulation.run()


def test_without_the_benchmarks_rows_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As where the package is installed: printed, with the reason, and written nowhere."""
    for name in ("benchmarks", "benchmarks.results_file"):
        monkeypatch.setitem(sys.modules, name, None)
    rows = [{"work": "time", "value": 1.5}]
    monkeypatch.setattr(simulate, "timed", lambda: rows)
    monkeypatch.setattr(simulate, "load_shapes", lambda data: [])
    monkeypatch.setattr(sys, "argv", ["simulate", "time"])
    simulate.main()
    told = capsys.readouterr()
    assert json.loads(told.out) == rows
    assert "benchmarks" in told.err


def over(result: Result) -> float:
    """Tokens computed over tokens needed."""
    return result.totals.computed / result.totals.needed


@pytest.mark.parametrize("policy", simulate.POLICIES)
def test_every_request_is_answered_once(policy: str, shapes: list[Shape]) -> None:
    """Under each policy; nothing is computed for free, and all work is some replica's."""
    simulation, result = ran(policy, SMALL, shapes)
    assert result.asked == result.answered + result.waiting
    assert result.answered > 2000 if policy != "prefix affinity" else result.answered > 0
    assert over(result) >= 1.0
    assert len(result.latencies) == result.answered
    assert min(result.latencies) >= SMALL.cost.ms(1) - 0.01
    assert sum(map(sum, result.windows)) > 0
    assert all(r.alive for r in simulation.replicas)


def test_ours_is_near_the_oracle_and_far_from_round_robin(shapes: list[Shape]) -> None:
    """In tokens; and no replica has much more work than another, which affinity alone gives."""
    results = {p: ran(p, SMALL, shapes)[1] for p in ("oracle", "ours", "round robin")}
    assert over(results["ours"]) < 1.15 * over(results["oracle"])
    assert over(results["round robin"]) > 1.5 * over(results["ours"])
    _, affinity = ran("prefix affinity", SMALL, shapes)
    assert per_window(affinity)[0][1] > 2 * per_window(results["ours"])[0][1]


@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.parametrize("policy", ["ours", "consistent hash", "oracle"])
def test_every_step_is_answered_when_replicas_die(
    policy: str, share: float, shapes: list[Shape]
) -> None:
    """One, or half of them, with what they run and hold; also under load."""
    faults = tuple(Fault(at, False, share) for at in (20.0, 40.0))
    scenario = Scenario(
        6, 240, 3, seconds=60, ramp_s=10, think_s=0.5, cost=CostModel(scale=4.0), faults=faults
    )
    simulation, result = ran(policy, scenario, shapes)
    assert sum(not r.alive for r in simulation.replicas) == (2 if share == 0.0 else 5)
    assert result.retried > 0
    assert result.asked == result.answered + result.waiting
    assert max(result.when) > 59.0


def test_a_join_takes_load_and_few_agents_move(shapes: list[Shape]) -> None:
    """Two replicas join six: they get their share of the work, and a quarter of agents move."""
    calm = Scenario(6, 240, 2, seconds=100, ramp_s=10, think_s=2.0)
    scenario = Scenario(
        6, 240, 2, seconds=100, ramp_s=10, think_s=2.0, faults=(Fault(60.0, True, 1 / 3),)
    )
    simulation, result = ran("ours", scenario, shapes)
    _, before = ran("ours", calm, shapes)
    assert len(simulation.replicas) == 8
    late = result.windows[1]
    assert min(late[6:]) > 0.4 * sum(late) / 8
    assert 0.1 * 240 < result.moved - before.moved < 0.5 * 240


def test_a_run_is_repeatable(shapes: list[Shape]) -> None:
    """The clock is virtual and the seed fixed: two runs give the same answers at the same times."""
    (_, one), (_, two) = (ran("ours", SMALL, shapes) for _ in range(2))
    assert one.latencies == two.latencies
    assert one.totals == two.totals


def test_keys_of_a_simulated_agent_are_like_real_ones(shapes: list[Shape]) -> None:
    """They agree on the opening and the source's common part, and each grows from its last."""
    one, same, other = State(1, shapes[0]), State(2, shapes[3]), State(3, shapes[1])
    first = one.key().entries()
    agreed = [
        sum(a == b for a, b in zip(first, s.key().entries(), strict=False)) for s in (same, other)
    ]
    assert agreed == [(OPENING_BYTES + 5000) // 256, OPENING_BYTES // 256]
    one.step += 1
    assert one.key().entries()[: len(first) - 1] == first[:-1]
    assert one.key().size == shapes[0].ends[1]


def job(state: State) -> Job:
    """A request for a state as it is."""
    return Job(state, state.key(), tokens_of(state.size), 200, 0, 0.0, True)


def test_a_replica_computes_what_it_lacks(shapes: list[Shape]) -> None:
    """All of a first state, the rest of a grain and what is new of a known one."""
    replica, totals = Replica("engine#0", 0, CostModel(), 1 << 20), Totals()
    state = State(1, shapes[0])
    replica.take(job(state), 0.0)
    whole = tokens_of(state.size)
    assert replica.wait_ms(0.0) == pytest.approx(CostModel().ms(whole + 200, whole))
    replica.start(0.0, totals)
    assert totals.computed == whole + 200
    replica.running = []
    state.step = 1
    assert replica.missing(job(state)) == tokens_of(state.size) - whole // 64 * 64 + 200
    stranger = State(2, shapes[3])
    shared = tokens_of(shapes[3].common) // 64 * 64
    assert replica.missing(job(stranger)) == tokens_of(stranger.size) - shared + 200


def test_a_replica_forgets_the_least_recently_used(shapes: list[Shape]) -> None:
    """Where its memory ends, tokens and state slots counted."""
    replica = Replica("engine#0", 0, CostModel(), 20_000)
    states = [State(i + 1, shapes[1]) for i in range(6)]
    for state in states:
        replica.take(job(state), 0.0)
        replica.start(0.0, Totals())
        replica.running = []
    assert states[0].number not in replica.held
    assert states[-1].number in replica.held
    assert sum(n + 1600 for n in replica.held.values()) <= 20_000


def test_rounds_cost_what_the_table_says() -> None:
    """Exactly at its points, between them on a line, beyond it as several rounds."""
    cost = CostModel(rounds=((512, 2.0), (2048, 5.0), (8192, 20.0)), history_ms=0.01)
    assert [cost.ms(n) for n in (1, 512, 2048, 8192, 16_384)] == [2.0, 2.0, 5.0, 20.0, 40.0]
    assert cost.ms(1280) == pytest.approx(3.5)
    assert cost.ms(512, 10_000) == pytest.approx(2.1)
    assert CostModel(scale=2.0).ms(512) == pytest.approx(4.2)


def test_documents_are_zipf_hot() -> None:
    """The first is asked about most, and always as the same state."""
    documents = Documents(100, 1.1, random.Random(0))
    drawn = [documents.draw() for _ in range(5000)]
    counts = np.bincount([state.number - (1 << 32) for state in drawn], minlength=100)
    assert counts.argmax() == 0
    assert counts[0] > 1.5 * counts[1] > counts[10]
    assert len({id(state) for state in drawn}) == len({state.number for state in drawn})


def test_shapes_come_from_the_workload_file(tmp_path: Path) -> None:
    """Bytes at each step behind the opening, what a source's texts begin with, question tokens."""
    question = {"instructions": "x" * 373, "criteria": None}
    rows = [
        {"source": "s", "steps": [{"append": t, "questions": [question]} for t in texts]}
        for texts in (["abcd", "ef"], ["abx"])
    ]
    with gzip.open(tmp_path / "agent_trajectories.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    first, second = simulate.load_shapes(tmp_path)
    assert first.ends == (OPENING_BYTES + 4, OPENING_BYTES + 6)
    assert first.common == second.common == OPENING_BYTES + 2
    assert first.questions == (100, 100)


def test_rows_say_what_was_run(shapes: list[Shape], tmp_path: Path) -> None:
    """A row holds the scenario and its measures, and the plot is drawn from rows."""
    rows = simulate.compared({"small": Scenario(3, 30, 1, seconds=75, ramp_s=10)}, shapes)
    assert [r["policy"] for r in rows] == list(simulate.POLICIES)
    assert all(r["failed"] == 0 and r["replicas"] == 3 for r in rows)
    assert rows[0]["computed_over_oracle"] == 1.0
    simulate.plot(rows, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000


def test_ours_sees_routers_apart(shapes: list[Shape]) -> None:
    """Each router process has a policy of its own; only stats and answers reach it."""
    simulation, _ = ran("ours", SMALL, shapes)
    chooser = simulation.chooser
    assert isinstance(chooser, Ours)
    assert len({id(p) for p in chooser.policies}) == SMALL.routers
    assert set(chooser.reasons) <= {"home", "foreign", "spilled", "no information"}
