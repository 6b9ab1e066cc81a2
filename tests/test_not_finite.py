"""Values that are not finite: whose fault they are, who is told, and what it costs the others."""

from pathlib import Path
from typing import Any

import pytest
import torch

from flide_engine import Engine, EngineConfig
from flide_engine.api import DecisionResponse
from flide_engine.errors import DeadlineExceeded, NonFiniteOutput
from flide_engine.layout.stream import Job
from flide_engine.readout import Asked
from flide_engine.runner import Started
from tests.checkpoints import POISON
from tests.engines import NOUL, Gate, NotANumber, ask, assert_balanced, leak, submit_together

STATE = "A report. " + "all is well. " * 40
LONG = "A long report. " + "all is well. " * 200


def about(instructions: str, state: str = STATE) -> dict[str, Any]:
    """A request with one question."""
    return ask(state, q={"type": "noul", "instructions": instructions})


def wants(path: Path, requests: list[dict[str, Any]]) -> list[float]:
    """What each gets of an engine that is asked nothing else."""
    engine = Engine(EngineConfig(model=str(path), keep_checkpoints=False))
    try:
        return [noul(engine.decide(request)) for request in requests]
    finally:
        engine.close()


def noul(response: DecisionResponse) -> float:
    """Its one answer."""
    return float(response.answers["q"].noul)  # type: ignore[union-attr]


def assert_at_rest(engine: Engine) -> None:
    """Nothing waits, is out, or is held."""
    engine._loop.call(lambda: None)
    assert engine.waiting == 0
    assert not engine._loop._scheduler._out
    assert_balanced(engine)


@pytest.fixture
def tainted(poisoned: Path) -> Any:
    """An engine on the weights that give NaN for a letter."""
    engine = Engine(EngineConfig(model=str(poisoned), max_prompt_tokens=4096, max_round_tokens=575))
    yield engine
    engine.close()


@pytest.mark.parametrize("batch", [False, True])
def test_what_company_brings_in_reaches_nobody(
    poisoned: Path, tainted: Engine, monkeypatch: pytest.MonkeyPatch, batch: bool
) -> None:
    """All of a round get NaN by one of it: each is computed once more alone, also one that may
    wait, and only whose fault it is is told.
    """
    good = [ask(f"state {i}") for i in range(3)]
    want = wants(poisoned, good)
    rounds = leak(tainted, monkeypatch)
    asked = [*good, ask(f"a {POISON}")]
    futures = submit_together(tainted, lambda: [tainted.submit(r, batch=batch) for r in asked])
    with pytest.raises(NonFiniteOutput, match="question 'q' is not finite"):
        futures.pop().result(60)
    got = [future.result(60) for future in futures]
    assert [noul(response) for response in got] == pytest.approx(want, abs=1e-5)
    assert rounds == [4, 1, 1, 1, 1]
    known = sum(response.usage.input_tokens for response in got)
    counters = tainted.counters()
    assert known < counters.asked < counters.computed
    assert counters.computed == 2 * counters.asked  # asked is counted once
    assert_at_rest(tainted)


def test_a_state_is_resumed_from_though_company_brought_nan(
    poisoned: Path, tainted: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What somebody else asks about a state costs neither its checkpoints nor its computation."""
    asked = [about(f"Is {i} late?") for i in range(3)]
    want = wants(poisoned, asked)
    tainted.decide(about("Is all well?"))
    known = sorted(state.tokens for state in tainted.states(""))
    assert known
    rounds = leak(tainted, monkeypatch)
    asked.append(about(f"Is it {POISON}?"))
    futures = submit_together(tainted, lambda: [tainted.submit(request) for request in asked])
    with pytest.raises(NonFiniteOutput):
        futures.pop().result(60)
    got = [future.result(60) for future in futures]
    assert [noul(response) for response in got] == pytest.approx(want, abs=1e-5)
    assert {response.usage.x_reused_tokens for response in got} == {known[-1]}
    assert sorted(state.tokens for state in tainted.states("")) == known
    assert sorted(rounds) == [1, 1, 1, 1, 1, 4]  # whose fault it is ran without its checkpoint, too
    assert_at_rest(tainted)


def test_a_checkpoint_at_fault_is_found_out_in_company(
    checkpoint: Path,
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Alone first, then without it: it is forgotten, and both are answered."""
    asked = [about(f"Is {i} late?") for i in range(2)]
    want = wants(checkpoint, asked)
    engine.decide(about("Is all well?"))
    kept = max(engine._checkpoints.index, key=lambda c: c.position)
    engine._loop._runner._pool.tensors.recurrent_state[:, kept.slot] = torch.nan
    rounds = leak(engine, monkeypatch)
    futures = submit_together(engine, lambda: [engine.submit(request) for request in asked])
    got = [future.result(60) for future in futures]
    assert [noul(response) for response in got] == pytest.approx(want, abs=1e-5)
    assert kept not in engine._checkpoints.index
    assert rounds[0] == 2
    assert set(rounds[1:]) == {1}
    assert caplog.text.count("this request is computed once more, alone") == 2 * len(asked)
    assert [response.usage.x_reused_tokens for response in got] == [0, 0]
    assert_at_rest(engine)


def test_a_long_request_whose_earlier_piece_had_company_is_computed_anew(
    tainted: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All pieces of it, each in a round of its own: what the first one left may be tainted, though
    the last one, which has the values, ran alone.
    """
    request = about("Is it late?", LONG)
    want = noul(tainted.decide(request))
    tainted.drop_checkpoints()
    start, rounds, tainted_once = tainted._loop._runner.start, list[list[int]](), False

    def taints(jobs: list[Job], asked: Asked) -> Started:
        nonlocal tainted_once
        rounds.append([int(job.forest.starts[0]) for job in jobs])
        started = start(jobs, asked)
        if tainted_once or len(jobs) > 1 or not len(asked.ends):
            return started
        tainted_once = True
        return Started(NotANumber(started.pending), started.asked, started.checkpoints)

    monkeypatch.setattr(tainted._loop._runner, "start", taints)
    both = [ask("x"), request]
    futures = submit_together(tainted, lambda: [tainted.submit(each) for each in both])
    assert futures[0].result(60).answers
    assert noul(futures[1].result(60)) == pytest.approx(want, abs=1e-5)
    starts = [position for (position,) in rounds[1:]]
    assert rounds[0] == [0, 0]
    assert starts.count(0) == 1
    assert starts[starts.index(0) :] == [0, *starts[: starts.index(0)]]
    assert_at_rest(tainted)


def test_nobody_is_computed_more_than_twice_for_ever_failing_values(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where every round gives NaN: each in company, then alone, and that is all."""
    gate = Gate(engine, monkeypatch)
    gate.nan = True
    gate.open.set()
    asked = [ask(f"state {i}") for i in range(3)]
    for future in submit_together(engine, lambda: [engine.submit(request) for request in asked]):
        with pytest.raises(NonFiniteOutput):
            future.result(60)
    assert gate.rounds == [3, 1, 1, 1]
    gate.nan = False
    assert engine.decide(asked[0]).usage.x_reused_tokens == 0
    assert_at_rest(engine)


def test_there_is_no_second_try_past_the_deadline(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who has no time left is told that; others that shared the round are computed once more."""
    now = 0.0
    engine = Engine(EngineConfig(model=str(checkpoint)), clock=lambda: now)
    try:
        start = engine._loop._runner.start

        def slow(jobs: list[Job], asked: Asked) -> Started:
            nonlocal now
            started = start(jobs, asked)
            if len(jobs) == 1:
                return started
            now += 10.0
            return Started(NotANumber(started.pending), started.asked, started.checkpoints)

        monkeypatch.setattr(engine._loop._runner, "start", slow)
        late, patient = submit_together(
            engine, lambda: [engine.submit(ask(f"{s}"), timeout=s) for s in (5.0, 50.0)]
        )
        with pytest.raises(DeadlineExceeded):
            late.result(60)
        assert patient.result(60).answers
        assert_at_rest(engine)
    finally:
        engine.close()


def test_the_error_names_the_questions_it_is_about(
    tainted: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is known to be at fault; all that may be, where one can have tainted the others."""
    questions = {f"q{i}": NOUL | {"instructions": f"Is {i} late?"} for i in range(3)}
    questions["q1"] = NOUL | {"instructions": f"Is it {POISON}?"}
    with pytest.raises(NonFiniteOutput) as told:
        tainted.decide(ask(STATE, **questions))
    assert str(told.value) == "the model's output for question 'q1' is not finite"
    leak(tainted, monkeypatch)
    with pytest.raises(NonFiniteOutput) as told:
        tainted.decide(ask(STATE, **questions))
    assert str(told.value) == (
        "the model's output for question 'q0', question 'q1', question 'q2' is not finite; "
        "one of them may have made the others so"
    )
    assert told.value.for_logs == "the model's output is not finite"
    questions |= {f"q{i}": NOUL for i in range(3, 9)}
    with pytest.raises(NonFiniteOutput, match="question 'q4' and 4 more is not finite; one of"):
        tainted.decide(ask(STATE, **questions))
