"""The engine around its rounds: limits, departures, faults of one request, closing."""

import logging
import threading
import time
from collections.abc import Iterator
from contextvars import ContextVar, copy_context
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flide_engine import Engine, EngineConfig
from flide_engine.errors import (
    ConfigError,
    DeadlineExceeded,
    EngineStopped,
    FlideError,
    InvalidRequest,
    NonFiniteOutput,
    NotReady,
    Overloaded,
    PoolExhausted,
    RoundFailed,
    TooManyTokens,
    UnknownModel,
)
from flide_engine.layout.stream import Job
from flide_engine.readout import Asked
from flide_engine.runner import Started
from tests.checkpoints import POISON

NOUL = {"type": "noul", "instructions": "Is it late?"}


def ask(state: Any = "The parcel is late.", **questions: Any) -> dict[str, Any]:
    """A request."""
    return {"state": state, "questions": questions or {"q": NOUL}}


@pytest.fixture
def engine(checkpoint: Path) -> Iterator[Engine]:
    """The random checkpoint, with short limits."""
    made = Engine(
        EngineConfig(
            model=str(checkpoint),
            max_prompt_tokens=512,
            max_request_tokens=700,
            max_questions=20,
            max_round_tokens=256,
        )
    )
    yield made
    if made.is_alive():
        assert_balanced(made)
        made.close()


def assert_balanced(engine: Engine) -> None:
    """With its checkpoints forgotten, an idle engine holds nothing."""
    engine.drop_checkpoints()
    held = engine.accounting()
    assert held.page_bytes_held == held.slot_bytes_held == 0


class Lost:
    """A round whose device has failed."""

    rows = 0

    def wait(self) -> Any:
        raise OSError("the device is gone")


class Gate:
    """Holds the engine's rounds until it is opened; counts them and notes their sizes."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.rounds: list[int] = []
        self.fault: type[Exception] | None = None
        self.lost = False
        start = engine._loop._runner.start

        def held(jobs: list[Job], asked: Asked) -> Started:
            self.rounds.append(len(jobs))
            self.open.wait(10)
            if self.fault is not None:
                raise self.fault("injected")
            started = start(jobs, asked)
            return replace(started, pending=Lost()) if self.lost else started

        monkeypatch.setattr(engine._loop._runner, "start", held)

    def wait_for_rounds(self, count: int) -> None:
        """Until that many rounds have begun."""
        for _ in range(1000):
            if len(self.rounds) >= count:
                return
            time.sleep(0.005)
        raise AssertionError(f"{len(self.rounds)} rounds, expected {count}")


def longest_state(engine: Engine, limit: int) -> int:
    """Words of the longest state whose prompt has at most `limit` tokens."""
    words = 1
    while True:
        rendered = engine._family.render(engine_request("x " * (words + 1)))
        if rendered.longest_prompt > limit:
            return words
        words += 1


def engine_request(state: str) -> Any:
    """A typed request."""
    from flide_engine.wire import parse_request

    return parse_request(ask(state))


def test_prompts_at_the_limit_and_one_above(engine: Engine) -> None:
    """Exactly the limit is answered, one token more is refused with all numbers."""
    words = longest_state(engine, 512)
    assert engine.decide(ask("x " * words)).usage.input_tokens <= 512
    with pytest.raises(
        TooManyTokens, match=r"has 51\d tokens; .* 512 tokens \(max_prompt_tokens\)"
    ):
        engine.decide(ask("x " * (words + 1)))


def test_requests_over_the_limit(engine: Engine) -> None:
    """Each prompt fits, all together do not; and too many questions."""
    many = {f"q{i}": {"type": "noul", "instructions": f"{i} word " * 40} for i in range(12)}
    with pytest.raises(TooManyTokens, match="the request has .*max_request_tokens"):
        engine.decide(ask("s", **many))
    assert len(engine.decide(ask("s", **{f"q{i}": NOUL for i in range(20)})).answers) == 20
    with pytest.raises(InvalidRequest, match=r"21 questions; the limit is 20 \(max_questions\)"):
        engine.decide(ask("s", **{f"q{i}": NOUL for i in range(21)}))


def test_handle_callers_meet_the_same_checks(engine: Engine) -> None:
    """Plain dicts are validated here too: shape, model, depth, lone surrogates."""
    with pytest.raises(InvalidRequest, match="questions"):
        engine.decide({"state": "s"})
    with pytest.raises(UnknownModel, match="served here: tiny-random, jev-latest"):
        engine.decide({**ask(), "model": "other"})
    assert engine.decide({**ask(), "model": "jev-latest"}).model == "tiny-random"
    deep: Any = "x"
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(InvalidRequest):
        engine.decide(ask(deep))
    with pytest.raises(InvalidRequest, match="surrogate"):
        engine.decide(ask("a\ud800"))
    assert engine.decide(ask()).answers


def test_a_failing_round_is_retried_request_by_request(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three requests share a round that fails; each runs alone then, and fails or not by itself."""
    gate = Gate(engine, monkeypatch)
    first = engine.submit(ask())
    gate.wait_for_rounds(1)
    waiting = [engine.submit(ask(f"state {i}")) for i in range(3)]
    for _ in range(200):
        if engine._loop.waiting == 3:
            break
        time.sleep(0.005)
    gate.fault = ValueError
    gate.open.set()
    for future in (first, *waiting):
        with pytest.raises(RoundFailed, match="ValueError: injected"):
            future.result(10)
    assert gate.rounds == [1, 3, 1, 1, 1]
    gate.fault = None
    assert engine.decide(ask()).answers
    assert engine.is_alive()


def test_one_that_cannot_be_planned_fails_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault of the checkpoints in one request's planning is that request's."""
    plan = engine._checkpoints.plan

    def faulty(work: Any, limit: int) -> None:
        if work.name == "bad":
            raise KeyError("injected")
        plan(work, limit)

    monkeypatch.setattr(engine._checkpoints, "plan", faulty)
    futures = [engine.submit(ask(f"state {name}"), name=name) for name in ("a", "bad", "b")]
    with pytest.raises(RoundFailed, match="KeyError: 'injected'"):
        futures[1].result(10)
    assert futures[0].result(10).answers
    assert futures[2].result(10).answers
    assert engine.is_alive()


def test_a_device_that_fails_ends_the_engine(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be read back is lost with all that waits, each told that another may answer."""
    gate = Gate(engine, monkeypatch)
    gate.lost = True
    first = engine.submit(ask())
    gate.wait_for_rounds(1)
    waiting = engine.submit(ask())
    gate.open.set()
    for future in (first, waiting):
        with pytest.raises(
            EngineStopped, match="the engine stopped: OSError: the device is gone"
        ) as told:
            future.result(10)
        assert told.value.running == (future is first)
    assert not engine.is_alive()
    for late in (lambda: engine.submit(ask()).result(10), engine.leaves):
        with pytest.raises(EngineStopped, match="OSError: the device is gone") as told:
            late()
        assert not told.value.running
    engine.close()
    with pytest.raises(NotReady):  # as this was wanted
        engine.submit(ask()).result(10)


def test_a_round_that_does_not_end_is_noticed(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread lives, and yet the engine is not healthy; when it goes on it is."""
    now = 0.0
    config = EngineConfig(model=str(checkpoint), watchdog_seconds=5)
    engine = Engine(config, clock=lambda: now)
    try:
        gate = Gate(engine, monkeypatch)
        future = engine.submit(ask())
        gate.wait_for_rounds(1)
        now = 4.0
        assert engine.is_alive()
        now = 6.0
        assert not engine.is_alive()
        gate.open.set()
        assert future.result(10).answers
        engine._loop.call(lambda: None)
        assert engine.is_alive()
    finally:
        engine.close()


def test_one_who_asks_alone_shares_no_round(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those beside it run, too, in another round."""
    gate = Gate(engine, monkeypatch)
    first = engine.submit(ask())
    gate.wait_for_rounds(1)
    waiting = [engine.submit(ask(f"state {i}"), alone=i == 1) for i in range(3)]
    for _ in range(200):
        if engine._loop.waiting == 3:
            break
        time.sleep(0.005)
    gate.open.set()
    for future in (first, *waiting):
        assert future.result(10).answers
    assert sorted(gate.rounds) == [1, 1, 2]


def test_memory_that_is_short_makes_rounds_smaller(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints go first, then a round is halved until it fits; a request fails only if it does
    not fit alone.
    """
    engine.decide(ask("long enough to be remembered " * 8))
    assert engine.checkpoint_counts()["device"] > 0
    gate = Gate(engine, monkeypatch)
    held, most = engine._loop._runner.start, 2

    def short(jobs: list[Job], asked: Asked) -> Started:
        prompts = sum(len(job.forest.leaves) for job in jobs)
        if gate.open.is_set() and prompts > most:
            gate.rounds.append(-prompts)
            raise PoolExhausted("pages", 1 << 20, 0, 1 << 20)
        return held(jobs, asked)

    monkeypatch.setattr(engine._loop._runner, "start", short)
    first = engine.submit(ask())
    gate.wait_for_rounds(1)
    waiting = [engine.submit(ask(f"state {i}")) for i in range(8)]
    large = engine.submit(ask("s", **{f"q{i}": NOUL | {"instructions": f"{i}?"} for i in range(3)}))
    for _ in range(200):
        if engine._loop.waiting == 9:
            break
        time.sleep(0.005)
    gate.open.set()
    for future in (first, *waiting):
        assert future.result(10).answers
    with pytest.raises(PoolExhausted):
        large.result(10)
    assert engine.checkpoint_counts()["device"] == 0
    assert min(gate.rounds) < -most
    assert engine.is_alive()


def test_those_who_leave_are_not_run(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancelled and late requests never reach a round, and cancelling a running one is harmless."""
    gate = Gate(engine, monkeypatch)
    running = engine.submit(ask())
    gate.wait_for_rounds(1)
    cancelled = engine.submit(ask())
    late = engine.submit(ask(), timeout=0.01)
    assert cancelled.cancel()
    assert running.cancel()
    time.sleep(0.05)
    gate.open.set()
    with pytest.raises(DeadlineExceeded, match=r"within 0\.01 s"):
        late.result(10)
    assert engine.decide(ask()).answers
    assert sum(gate.rounds) == 2
    assert engine.is_alive()


def test_a_caller_who_waits_too_short(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """`decide` gives up at its timeout and takes its work back."""
    gate = Gate(engine, monkeypatch)
    with pytest.raises(DeadlineExceeded):
        engine.decide(ask(), timeout=0.05)
    gate.open.set()
    assert engine.decide(ask()).answers


def test_a_full_queue_refuses(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By tokens and by number, naming the option; what was taken is answered."""
    config = EngineConfig(
        model=str(checkpoint), max_queued_tokens=100, max_waiting_requests=4, max_prompt_tokens=512
    )
    engine = Engine(config)
    gate = Gate(engine, monkeypatch)
    running = engine.submit(ask())
    gate.wait_for_rounds(1)
    futures = [running]
    refused: list[str] = []
    for _ in range(8):
        try:
            futures.append(engine.submit(ask()))
        except Overloaded as error:
            refused.append(error.option)
        time.sleep(0.05)
    gate.open.set()
    ends = [future.exception(10) for future in futures]
    for error in (e for e in ends if e is not None):
        assert isinstance(error, Overloaded)
        assert error.retry_after_ms >= 50
        refused.append(error.option)
    assert ends.count(None) == 9 - len(refused)
    assert "max_queued_tokens" in refused
    engine.close()


def test_nan_fails_its_own_request(poisoned: Path) -> None:
    """Asked together with others, in one round or in many pieces."""
    engine = Engine(EngineConfig(model=str(poisoned), max_prompt_tokens=4096, max_round_tokens=256))
    try:
        alone = engine.decide(ask("fine " * 100)).answers["q"]
        futures = [
            engine.submit(ask(s)) for s in (f"bad {POISON} " * 30, "fine " * 100, f"{POISON}")
        ]
        for bad in (futures[0], futures[2]):
            with pytest.raises(NonFiniteOutput, match="question 'q'"):
                bad.result(30)
        answer = futures[1].result(30).answers["q"]
        assert abs(answer.noul - alone.noul) < 1e-5  # type: ignore[union-attr]
        assert_balanced(engine)
    finally:
        engine.close()


def test_closing(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits fails, what runs finishes, and afterwards nothing is taken."""
    gate = Gate(engine, monkeypatch)
    running = engine.submit(ask())
    gate.wait_for_rounds(1)
    waiting = engine.submit(ask())
    closer = threading.Thread(target=engine.close)
    closer.start()
    time.sleep(0.05)
    gate.open.set()
    closer.join(10)
    assert running.result(10).answers
    with pytest.raises(NotReady):
        waiting.result(10)
    with pytest.raises(NotReady):
        engine.submit(ask())
    assert not engine.is_alive()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pool_bytes": 1_000_000}, "holds .* pages of 64 tokens; max_prompt_tokens 32768"),
        (
            {"max_prompt_tokens": 65537, "max_request_tokens": 70000},
            "max_position_embeddings 65536",
        ),
        ({"device": "cuda"}, "no GPU is visible"),
    ],
)
def test_options_that_cannot_work(checkpoint: Path, options: dict[str, Any], message: str) -> None:
    """Refused at start, with the numbers."""
    if options.get("device") == "cuda":
        import torch

        if torch.cuda.is_available():
            pytest.skip("a GPU is visible")
    with pytest.raises(ConfigError, match=message):
        Engine(EngineConfig(model=str(checkpoint), **options))


def test_the_root_of_the_tree_catches_all(engine: Engine) -> None:
    """Callers may catch one class."""
    with pytest.raises(FlideError):
        engine.decide({})


def test_an_answer_says_where_its_time_went(engine: Engine) -> None:
    """Stages of the second asking, which reuses the state; together no more than the wait."""
    engine.decide(ask("long enough to be remembered " * 8))
    began = time.monotonic()
    response = engine.decide(ask("long enough to be remembered " * 8 + "and more"))
    spent = 1000 * (time.monotonic() - began)
    assert set(response.x_timing) == {"render", "queue", "device", "finish"}
    assert 0 < sum(response.x_timing.values()) <= spent
    assert response.usage.x_reused_tokens % 64 == 0
    assert 0 < response.usage.x_reused_tokens < response.usage.input_tokens


REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")


class Noted(logging.Handler):
    """What is logged, with the request that the context names."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((REQUEST_ID.get(), record.getMessage()))


def test_lines_about_a_request_are_logged_in_its_callers_context(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """From the rendering threads and the engine's own, in company and alone."""
    noted, name = Noted(), "flide_engine"
    caplog.set_level(logging.DEBUG, name)
    monkeypatch.setattr(logging.getLogger(name), "handlers", [noted])
    gate = Gate(engine, monkeypatch)

    def submit(number: int) -> Any:
        REQUEST_ID.set(f"id {number}")
        return engine.submit(ask(f"state {number}"))

    first = copy_context().run(submit, 0)
    gate.wait_for_rounds(1)
    waiting = [copy_context().run(submit, i) for i in (1, 2)]
    for _ in range(200):
        if engine._loop.waiting == 2:
            break
        time.sleep(0.005)
    gate.fault = ValueError
    gate.open.set()
    for future in (first, *waiting):
        with pytest.raises(RoundFailed):
            future.result(10)
    gate.fault = None
    copy_context().run(submit, 3).result(10)
    company = [i for i, line in noted.lines if line.startswith("a round of 2 requests failed")]
    assert company == ["id 1", "id 2"]
    assert [i for i, line in noted.lines if "the request's round failed" in line] == [
        "id 0", "id 1", "id 2",
    ]  # fmt: skip
    assert [i for i, line in noted.lines if line.startswith("computed")] == ["id 3"]
