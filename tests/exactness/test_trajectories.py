"""Five real agent trajectories through the embedded model: each step's answers are those of the
same request asked alone of an engine that remembers nothing, wherever the state was meanwhile.
"""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flide_engine import DecisionResponse, Engine, EngineConfig
from tests.exactness.test_checkpoints import WORKLOADS, ask, same

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not WORKLOADS.is_dir(), reason="needs the shared workloads"),
]

ROWS = (3, 10, 33, 50, 60)
"""Of 75: programmers' and a customer service agent's."""

MOST_CHARS, MOST_STEPS = 14_000, 8
"""Where histories are cut."""

Step = tuple[str, dict[str, Any], DecisionResponse]
"""(trajectory, its request, the answers of an engine that remembers nothing)."""


@pytest.fixture(scope="module")
def steps() -> list[list[Step]]:
    """The steps of each trajectory, each with a yes/no question and a choice."""
    with gzip.open(WORKLOADS / "agent_trajectories.jsonl.gz", "rt") as lines:
        rows = [json.loads(line) for i, line in enumerate(lines) if i in ROWS]
    alone = Engine(EngineConfig(keep_checkpoints=False))
    found: list[list[Step]] = []
    try:
        for row in rows:
            state, trajectory = "", []
            for step in row["steps"][:MOST_STEPS]:
                state += step["append"]
                if len(state) > MOST_CHARS:
                    break
                asked = {q["type"]: q for q in step["questions"] if q["type"] != "score"}
                questions = [
                    {k: q[k] for k in ("type", "instructions", "criteria")} for q in asked.values()
                ]
                request = ask(state, *questions)
                trajectory.append((row["id"], request, alone.decide(request)))
            found.append(trajectory)
    finally:
        alone.close()
    assert all(len(trajectory) >= 4 for trajectory in found)
    return found


def in_turns(steps: list[list[Step]]) -> Iterator[Step]:
    """The first step of each trajectory, then the second of each, and so on."""
    for i in range(max(map(len, steps))):
        yield from (trajectory[i] for trajectory in steps if i < len(trajectory))


def replayed(engine: Engine, steps: list[list[Step]]) -> None:
    """Asks all of them in turns; every answer is the one asked alone."""
    for name, request, want in in_turns(steps):
        same(engine.submit(request, name=name).result(120), want)
        engine._loop.call(lambda: engine._checkpoints.copy_some(1 << 40))
        engine._loop.call(lambda: engine._tiers and engine._tiers.settle(copies=True, writes=True))


def cramped(**more: Any) -> EngineConfig:
    """A device pool that holds one or two of the five at a time."""
    return EngineConfig(
        max_prompt_tokens=6144, max_request_tokens=8192, max_round_tokens=1024,
        pool_bytes=20_000_000, **more,
    )  # fmt: skip


def test_from_the_device(steps: list[list[Step]]) -> None:
    """All five fit: a step computes what is new, also after a rollback and on a branch."""
    engine = Engine(EngineConfig())
    try:
        replayed(engine, steps)
        counters = engine.counters()
        last = sum(t[-1][2].usage.input_tokens for t in steps)
        questions = sum(len(t) for t in steps)
        # each trajectory once, and a step its questions, at most a grain, and unsettled words
        assert counters.computed < last + questions * (64 + 8 + 250)
        for trajectory in steps:
            name = trajectory[0][0]
            known = sorted({state.tokens for state in engine.states(name=name)})
            step = known[len(known) // 2]
            assert engine.branch(name, f"{name} again", step) == step
            assert engine.rollback(name, step)
            assert max(state.tokens for state in engine.states(name=name)) == step
            before = engine.counters().reused
            for _, request, want in trajectory[-2:]:
                same(engine.submit(request, name=f"{name} again").result(120), want)
            assert engine.counters().reused - before >= 2 * step
    finally:
        engine.close()


def test_from_host_memory(steps: list[list[Step]]) -> None:
    """Steps find their states on the host: the others have driven them off the device."""
    engine = Engine(cramped(host_bytes=256 << 20))
    try:
        replayed(engine, steps)
        counters = engine.counters()
        assert counters.from_host > 0.2 * counters.reused
        assert counters.reused > 0.5 * counters.asked
    finally:
        engine.close()


def test_from_disk_and_after_a_restart(steps: list[list[Step]], tmp_path: Path) -> None:
    """The host holds one of them, too: the rest come from files, also in another process."""
    config = cramped(host_bytes=12 << 20, disk_folder=tmp_path)
    engine = Engine(config)
    try:
        replayed(engine, steps)
        counters = engine.counters()
        assert counters.from_disk > 1000 * len(steps)
    finally:
        engine.close()
    again = Engine(config)
    try:
        for name, request, want in (trajectory[-1] for trajectory in steps):
            same(again.submit(request, name=name).result(120), want)
        assert again.counters().from_disk > 1000 * len(steps)
        assert again.counters().reused > 0.8 * again.counters().asked
    finally:
        again.close()
