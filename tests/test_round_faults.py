"""What goes wrong in one round costs nobody else anything, and no answer is ever lost for it."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flide_engine import Engine, EngineConfig
from flide_engine.errors import (
    ConfigError,
    EngineStopped,
    NonFiniteOutput,
    PoolExhausted,
    RoundTooLarge,
)
from flide_engine.layout.buckets import cut_replays, halved
from flide_engine.layout.state_shape import StateShape
from flide_engine.layout.stream import Job
from flide_engine.readout import Asked
from flide_engine.runner import Started
from tests.checkpoints import POISON
from tests.waiting import PATIENCE_S, until

WORDS = " ".join(f"the {i} item was {'good' if i % 3 else 'bad'}" for i in range(255))


def ask(state: str, count: int = 1) -> dict[str, Any]:
    """A request with some questions."""
    questions = {f"q{i}": {"type": "noul", "instructions": f"Is {i} good?"} for i in range(count)}
    return {"state": state, "questions": questions}


@contextmanager
def engine_of(**options: Any) -> Iterator[Engine]:
    """An engine; it must be idle and hold nothing but checkpoints at the end, if it is alive."""
    made = Engine(EngineConfig(**options))
    yield made
    if made.is_alive():
        made.drop_checkpoints()
        held = made.accounting()
        assert held.page_bytes_held == held.slot_bytes_held == 0
    made.close()


@contextmanager
def held_back(engine: Engine) -> Iterator[None]:
    """Keeps the engine's thread from its next round; what is submitted waits together."""
    ready, go = threading.Event(), threading.Event()

    def hold() -> None:
        ready.set()
        go.wait(2 * PATIENCE_S)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(engine._loop.call, hold)
        assert ready.wait(PATIENCE_S)
        try:
            yield
        finally:
            go.set()


def starting(
    engine: Engine, patch: pytest.MonkeyPatch, before: Callable[[list[Job]], None]
) -> None:
    """Has `before` look at every round's jobs, and raise what it likes."""
    start = engine._loop._runner.start

    def looked_at(jobs: list[Job], asked: Asked) -> Started:
        before(jobs)
        return start(jobs, asked)

    patch.setattr(engine._loop._runner, "start", looked_at)


def test_a_call_is_told_when_the_thread_ends(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that was to run after the very round in which it does."""

    def fail(jobs: list[Job]) -> None:
        raise SystemError("the thread is gone")

    with engine_of(model=str(checkpoint)) as engine:
        starting(engine, monkeypatch, fail)
        monkeypatch.setattr(engine._loop._runner.executor, "check", lambda: fail([]))
        with ThreadPoolExecutor(1) as pool:
            with held_back(engine):
                future = engine.submit(ask("short"))
                until(lambda: engine._loop.waiting == 1)
                call = pool.submit(engine._loop.call, list)
                until(lambda: len(engine._loop._calls) == 1)
            with pytest.raises(EngineStopped):
                call.result(60)
        with pytest.raises(EngineStopped, match="the thread is gone"):
            future.result(60)
        assert not engine.is_alive()


def test_a_round_that_fails_alone_is_its_requests_fault_if_the_device_is_well(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the engine's end if it is not: whoever comes next would fail, too."""
    with engine_of(model=str(checkpoint)) as engine:
        broken = False

        def fail(jobs: list[Job]) -> None:
            raise RuntimeError("launch failed")

        def check() -> None:
            if broken:
                raise RuntimeError("an illegal memory access was encountered")

        starting(engine, monkeypatch, fail)
        monkeypatch.setattr(engine._loop._runner.executor, "check", check)
        assert "launch failed" in str(engine.submit(ask("short")).exception(60))
        assert engine.is_alive()
        broken = True
        error = engine.submit(ask("short")).exception(60)
        assert isinstance(error, EngineStopped)
        assert "illegal memory access" in str(error)


def test_work_that_has_begun_is_cut_finer(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Questions about a long state that are too many nodes for a round run in several."""
    limits: dict[str, Any] = {"model": str(checkpoint), "max_round_tokens": 256}
    with engine_of(**limits, keep_checkpoints=False) as plain:
        want = plain.decide(ask(WORDS[:900], 6))
    with engine_of(**limits) as engine:
        sizes: list[int] = []

        def refuse(jobs: list[Job]) -> None:
            leaves = sum(len(job.forest.leaves) for job in jobs)
            sizes.append(leaves)
            if leaves > 2:
                raise RoundTooLarge(0, leaves, 256, 2)

        starting(engine, monkeypatch, refuse)
        got = engine.decide(ask(WORDS[:900], 6))
        assert max(sizes) > 2
        for name, answer in want.answers.items():
            assert got.answers[name].noul == pytest.approx(answer.noul, abs=1e-5)
        one = engine.submit({**ask("x"), "questions": ask("x", 1)["questions"]})
        assert one.result(60).answers


def test_halves_are_what_one_piece_was() -> None:
    """Prompts in order, from the same place; a lone prompt and a checkpoint cannot be divided."""
    rng = np.random.default_rng(0)
    trunk = rng.integers(0, 50, 200)
    prompts = [np.append(trunk, rng.integers(50, 90, 30)).astype(np.int32) for _ in range(5)]
    *trunks, last = cut_replays(prompts, 192)
    assert trunks
    assert all(not halved(prompts, piece) for piece in trunks if piece.stop is not None)
    parts = halved(prompts, last)
    assert [p for part in parts for p in part.prompts] == list(last.prompts)
    for part in parts:
        assert (part.start, part.resumes, part.stop) == (last.start, last.resumes, None)
        assert part.forest is not None
        assert part.tokens >= part.forest.num_tokens
    while len(parts[0].prompts) > 1:
        parts = halved(prompts, parts[0])
    assert halved(prompts, parts[0]) == []


def states_of(engine: Engine) -> list[int]:
    """Tokens of the checkpoints held."""
    return sorted(state.tokens for state in engine.states(""))


def test_a_checkpoint_at_fault_is_forgotten_and_the_answer_given(checkpoint: Path) -> None:
    """Requests that resumed from it are computed anew; what they leave then is sound."""
    with engine_of(model=str(checkpoint), keep_checkpoints=False) as plain:
        grown = WORDS[:900] + " and so on, and so on, for a while, until more than a grain is new"
        want = plain.decide(ask(grown)).answers["q0"].noul
    with engine_of(model=str(checkpoint)) as engine:
        engine.decide(ask(WORDS[:900]))
        (kept,) = engine._checkpoints.index
        engine._loop._runner._pool.tensors.recurrent_state[:, kept.slot] = torch.nan
        for left in (False, True, True):
            before = states_of(engine)
            got = engine.decide(ask(grown))
            assert got.answers["q0"].noul == pytest.approx(want, abs=1e-5)
            assert kept not in engine._checkpoints.index
            assert bool(states_of(engine)) == left  # nothing of the one that was done again
        assert got.usage.x_reused_tokens == before[-1] >= kept.position


def test_a_question_at_fault_costs_its_state_nothing(poisoned: Path) -> None:
    """What the state left before stays; what came with the fault does not, on no tier."""
    state = "A report. " + "all is well. " * 40
    with engine_of(model=str(poisoned), host_bytes=1 << 26) as engine:
        engine.decide(ask(state))
        before = states_of(engine)
        assert before
        bad = ask(state)
        bad["questions"]["q0"]["instructions"] = f"Is it {POISON}?"
        with pytest.raises(NonFiniteOutput):
            engine.decide(bad)
        with pytest.raises(NonFiniteOutput):
            engine.decide(ask(state + POISON + " more of it. " * 40))
        assert states_of(engine) == before
        assert engine.checkpoint_counts()["host"] == engine.checkpoint_counts()["device"]
        assert engine.decide(ask(state)).usage.x_reused_tokens == max(before)


def test_a_long_state_at_fault_leaves_nothing(poisoned: Path) -> None:
    """Its first pieces read nothing: what they left is sound only if the last one's values are."""
    with engine_of(model=str(poisoned), max_round_tokens=256, host_bytes=1 << 26) as engine:
        with pytest.raises(NonFiniteOutput):
            engine.decide(ask(f"A report {POISON}. " + "all is well. " * 200))
        assert engine.counters().rounds > 2
        assert engine.checkpoint_counts() == {"device": 0, "host": 0}


def test_a_long_state_at_fault_leaves_nothing_on_its_way_out(
    poisoned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the device had to give up what its first pieces left."""
    with engine_of(model=str(poisoned), max_round_tokens=256, host_bytes=1 << 26) as engine:
        given_up = []

        def crowded(jobs: list[Job]) -> None:
            given_up.append(len(engine._checkpoints.index))
            pool = engine._loop._runner._pool
            while engine._checkpoints.make_room(
                PoolExhausted("units", pool.free + 1, pool.free, pool.units)
            ):
                pass

        starting(engine, monkeypatch, crowded)
        with pytest.raises(NonFiniteOutput):
            engine.decide(ask(f"A report {POISON}. " + "all is well. " * 200))
        assert sum(given_up) > 0
        assert engine.checkpoint_counts() == {"device": 0, "host": 0}


def least_pool(**limits: Any) -> int:
    """Bytes of the smallest pool that an engine takes."""
    try:
        Engine(EngineConfig(**limits, pool_bytes=1000))
    except ConfigError as error:
        return int(str(error).rpartition(" bytes")[0].rpartition(" ")[2])
    raise AssertionError("1,000 bytes were enough")


def test_a_pool_that_was_accepted_serves_all() -> None:
    """Eight agents whose states fill it, of three tenants, each of several rounds: those that wait
    have plans that lock checkpoints, and the one that has begun holds its own.
    """
    limits: dict[str, Any] = {
        "model": "nano", "max_prompt_tokens": 2048, "max_round_tokens": 256,
        "max_request_tokens": 4096,
    }  # fmt: skip
    rng = np.random.default_rng(2)
    states = [
        " ".join(f"agent {a} saw {rng.integers(100)} and {i} ok" for i in range(150))
        for a in range(8)
    ]
    with engine_of(**limits, pool_bytes=least_pool(**limits)) as engine:
        for _ in range(3):
            with held_back(engine):
                futures = [
                    engine.submit(ask(state, 2), tenant=f"t{a % 3}")
                    for a, state in enumerate(states)
                ]
                until(lambda: engine._loop.waiting == 8)
            assert Counter(str(f.exception(60)) for f in futures) == {"None": 8}
            states = [
                s + " ".join(f" then {n} came" for n in rng.integers(100, size=15)) for s in states
            ]


def marked(questions: int) -> dict[str, Any]:
    """A state of 3,750 tokens whose last turn and whose tail are worth checkpoints."""
    words = np.random.default_rng(0).choice(["good", "bad", "item", "order"], 3750)
    parts = (words[:3378], words[3378:])
    turns = [{"role": "user", "content": " ".join(part)} for part in parts]
    return ask("", questions) | {"state": turns}


def branching(groups: int) -> dict[str, Any]:
    """Pairs of questions that each have an opening of their own."""
    asked = ask("short", 2 * groups)
    for i, question in enumerate(asked["questions"].values()):
        question["instructions"] = f"{i // 2}: {WORDS[:300]}. Is it {i}?"
    return asked


@pytest.mark.parametrize("request_", [marked(1), marked(5), branching(6)])
def test_states_that_do_not_fit_beside_each_other_are_done_without(
    request_: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within the limits nothing is refused for good: checkpoints for later requests are not taken,
    and what branches at many places is cut finer. States as large as of 0.8B, 25 pages each.
    """
    monkeypatch.setattr(StateShape, "slot_units", lambda self, itemsize: 25)
    limits: dict[str, Any] = {
        "model": "nano", "max_prompt_tokens": 4096, "max_round_tokens": 1024,
    }  # fmt: skip
    with engine_of(**limits) as roomy:
        want = roomy.decide(request_)
    with engine_of(**limits, pool_bytes=least_pool(**limits)) as engine:
        got = engine.decide(request_)
    for name, answer in want.answers.items():
        assert got.answers[name].noul == pytest.approx(answer.noul, abs=1e-5)


def test_a_long_request_whose_plan_was_given_up_is_planned_again(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its turn is over before it has begun, another one lacks memory and is given what the plan
    had locked, and then it is run so that the other one may be.
    """
    short, long = ask("short"), ask(WORDS[:2000], 36)
    limits: dict[str, Any] = {"model": str(checkpoint), "max_round_tokens": 512}
    with engine_of(**limits, keep_checkpoints=False) as plain:
        want = plain.decide(long)
    with engine_of(**limits) as engine:
        engine.decide(ask(WORDS[:2000]))
        rounds: list[list[int]] = []

        def refuse(jobs: list[Job]) -> None:
            rounds.append([int(job.forest.starts[0]) for job in jobs])
            if len(rounds) <= 3:
                raise PoolExhausted("units", 1 << 20, 0, 1 << 20)

        starting(engine, monkeypatch, refuse)
        with held_back(engine):
            futures = [engine.submit(short)]
            until(lambda: engine._loop.waiting == 1)
            futures.append(engine.submit(long))
            until(lambda: engine._loop.waiting == 2)
        got = [future.result(60) for future in futures][1]
        (both, *alone), later = rounds[:3], rounds[3:]
        assert both[0] == 0 < both[1]
        assert alone == [[0], [0]]
        assert len(later) > 2
        for name, answer in want.answers.items():
            assert got.answers[name].noul == pytest.approx(answer.noul, abs=1e-5)


def test_a_request_is_counted_once(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often its round had to be made smaller."""
    with engine_of(model=str(checkpoint)) as engine:
        sizes: list[int] = []

        def refuse(jobs: list[Job]) -> None:
            sizes.append(len(jobs))
            if len(jobs) > 1:
                raise RoundTooLarge(0, len(jobs), 256, 1)

        starting(engine, monkeypatch, refuse)
        with held_back(engine):
            futures = [engine.submit(ask(f"{i} parcels are late")) for i in range(5)]
            until(lambda: engine._loop.waiting == len(futures))
        tokens = sum(future.result(60).usage.input_tokens for future in futures)
        assert max(sizes) == 5
        assert engine.counters().asked == engine.counters().computed == tokens
