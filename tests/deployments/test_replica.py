"""A replica over a stand-in for its engine, and the app's configuration; no cluster."""

import asyncio
import logging
import os
import pickle
import time
from collections import Counter
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.app import build
from deployments.config import AppArgs
from deployments.drain import Leaving
from deployments.metrics import MOST_TENANTS, ReplicaMetrics
from deployments.replica import EngineReplica
from flide_engine import DecisionRequest, DecisionResponse, Noul, Usage
from flide_engine.cache.pool import Accounting
from flide_engine.counters import Counters
from flide_engine.errors import EngineStopped, InvalidRequest, NotReady, Overloaded, UnknownModel
from router import fingerprint
from router.policy import Load, Stats, decode
from router.routing_key import anchor_key, route_key

PLAIN: dict[str, Any] = {"state": "s", "questions": {"q": {"type": "noul", "instructions": "?"}}}
TYPED = DecisionRequest(state="s", questions={"q": Noul(instructions="?")})
GOOD = DecisionResponse(model="m", usage=Usage(input_tokens=1, output_tokens=0), answers={})


class FakeEngine:
    """Answers at once, or as told."""

    def __init__(self, config: object) -> None:
        self.card = SimpleNamespace(name="m", description="d", release_date="r")
        self.device = "cpu"
        self.config, self.stack, self.fingerprint = config, "torch", ""
        self.submitted: list[dict[str, Any]] = []
        self.fails: Exception | None = None
        self.futures: list[Future[DecisionResponse]] = []
        self.answers, self.closed = True, False
        self.waiting = 0

    weights_hash = "w"

    def submit(self, request: object, **options: Any) -> "Future[DecisionResponse]":
        self.submitted.append(options)
        if self.fails:
            raise self.fails
        future: Future[DecisionResponse] = Future()
        self.futures.append(future)
        if self.answers:
            future.set_result(GOOD)
        return future

    def counters(self) -> SimpleNamespace:
        return Counters(asked=3, reused=2, computed=1, rounds=4, busy_seconds=0.5)

    def accounting(self) -> Accounting:
        return Accounting(150, 40, 10)

    def tier_bytes(self) -> dict[tuple[str, str], tuple[int, int]]:
        return {**self.accounting().by_kind(), ("host", "any"): (3, 8)}

    def distinct_tokens(self) -> dict[str, int]:
        return {"device": 640}

    def checkpoint_counts(self) -> dict[str, int]:
        return {"device": 2}

    def load(self) -> SimpleNamespace:
        return SimpleNamespace(
            wait_ms=4.0, mean_wait_ms=3.0, step_ms=2.0, tokens_per_ms=1.0, refused_tokens=0
        )

    def is_alive(self) -> bool:
        return not self.closed

    def import_state(self, data: bytes) -> int:
        return len(data)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def replica(monkeypatch: pytest.MonkeyPatch) -> EngineReplica:
    """A replica of this name, as Serve would make it."""
    monkeypatch.setattr("flide_engine.engine.Engine", FakeEngine)
    monkeypatch.setattr("flide_engine.fingerprint.bits_of", lambda engine: "bits")
    monkeypatch.setattr("deployments.logs.join", lambda: None)  # for good, in this process
    made = EngineReplica({})
    made._id = "me"
    return made


def engine_of(replica: EngineReplica) -> FakeEngine:
    """The stand-in."""
    engine = replica._engine
    assert isinstance(engine, FakeEngine)
    return engine


def test_typed_for_typed_and_plain_for_plain(replica: EngineReplica) -> None:
    """With errors of the same kind; the session id is the name of the state's checkpoints."""
    assert asyncio.run(replica.decide(TYPED, "tenant", "session")) is GOOD
    assert asyncio.run(replica.decide(PLAIN, timeout_s=2.5, batch=True)) == GOOD.model_dump()
    first, second = engine_of(replica).submitted
    assert first == {
        "tenant": "tenant", "name": "session", "timeout": None, "batch": False, "anchor": "",
    }  # fmt: skip
    assert second == {"tenant": "", "name": "", "timeout": 2.5, "batch": True, "anchor": ""}
    with pytest.raises(InvalidRequest):
        asyncio.run(replica.decide(TYPED, session_id="x" * 257))
    with pytest.raises(ValueError, match="256 printable"):
        asyncio.run(replica.decide(PLAIN, session_id="x" * 257))
    engine_of(replica).fails = Overloaded(1, "requests", 1, "max_waiting_requests", 5)
    with pytest.raises(Overloaded):
        asyncio.run(replica.decide(TYPED))
    with pytest.raises(RuntimeError):
        asyncio.run(replica.decide(PLAIN))


def test_load_comes_with_the_answers(replica: EngineReplica) -> None:
    """Beside the replica's id, in builtins."""
    answers, name, load = asyncio.run(replica.decide_with_load(PLAIN))
    assert (DecisionResponse.model_validate_json(answers), name) == (GOOD, "me")
    assert type(load) is tuple
    assert load == (4.0, 3.0, 2.0, 1.0)
    assert asyncio.run(replica.counters())["answered"] == 1


def test_refusals_come_as_values_to_our_own_callers(replica: EngineReplica) -> None:
    """With the load, and without what it would cost to raise them; other faults are raised."""
    engine_of(replica).fails = Overloaded(1, "requests", 1, "max_waiting_requests", 5)
    error, name, load = pickle.loads(pickle.dumps(asyncio.run(replica.decide_with_load(PLAIN))))
    assert isinstance(error, Overloaded)
    assert (error.retry_after_ms, error.__traceback__) == (5, None)
    assert (name, load) == ("me", (4.0, 3.0, 2.0, 1.0))
    engine_of(replica).fails = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        asyncio.run(replica.decide_with_load(PLAIN))


def test_what_was_asked_is_not_logged(
    replica: EngineReplica, caplog: pytest.LogCaptureFixture
) -> None:
    """What was wrong with it is."""
    engine_of(replica).fails = error = UnknownModel("SECRET", ("m",))
    with caplog.at_level(logging.INFO, "ray.serve"):
        told, _, _ = asyncio.run(replica.decide_with_load(PLAIN))
    assert told is error
    assert "not answered: UnknownModel: served here: m" in caplog.text
    assert "SECRET" not in caplog.text


def test_what_came_from_elsewhere_is_told(replica: EngineReplica) -> None:
    """Only if sent away from home, by a router of ours, and taken in by the engine."""
    route = tuple(route_key(PLAIN))
    for i, (anchor, home) in enumerate(((7, "me"), (8, "other"), (9, ""))):
        asyncio.run(replica.decide(PLAIN, route=route, anchor=anchor, home=home))
        assert len(engine_of(replica).submitted) == i + 1
        assert engine_of(replica).submitted[-1]["anchor"] == f"{anchor:016x}"
    for junk in (
        (route, None),
        (route, "x"),
        (route, -1),
        (route, 1 << 64),
        (("x",), 5),
        (None, 5),
    ):
        asyncio.run(replica.decide(PLAIN, route=junk[0], anchor=junk[1]))
    engine_of(replica).fails = Overloaded(1, "requests", 1, "max_waiting_requests", 5)
    with pytest.raises(RuntimeError):
        asyncio.run(replica.decide(PLAIN, route=route, anchor=10))
    told = decode(asyncio.run(replica.record_routing_stats()))
    assert told is not None
    assert told.load == Load(4.0, 3.0, 2.0, 1.0)
    assert [anchor for anchor, _ in told.foreign] == [9, 8]


def test_what_another_replica_left_is_taken_over(replica: EngineReplica) -> None:
    """And counted; a state that has another home is told as foreign."""
    key = anchor_key(f"{7:016x}", "", 640)

    async def take(weights: str, home: str, stack: str = "torch") -> str:
        piece = asyncio.get_running_loop().create_future()
        piece.set_result(b"data")
        return await replica.adopt([piece], weights, tuple(key), 7, home, stack)

    assert asyncio.run(take("w", "me")) == "adopted"
    assert told_by(replica).foreign == ()
    assert asyncio.run(take("other", "")) == "refused"
    assert asyncio.run(take("w", "", "other")) == "refused"
    assert told_by(replica).foreign == ()
    assert asyncio.run(take("w", "other")) == "adopted"
    assert told_by(replica).foreign == ((7, 512),)
    taken = asyncio.run(replica.counters())["checkpoints_taken_over"]
    assert taken == {"adopted": 2, "refused": 2}


def told_by(replica: EngineReplica) -> Stats:
    """What the routers hear."""
    told = decode(asyncio.run(replica.record_routing_stats()))
    assert told is not None
    return told


@pytest.mark.parametrize("fails", [False, True])
def test_a_replica_leaves_once_whatever_becomes_of_its_checkpoints(
    replica: EngineReplica, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """Serve awaits what `__del__` returns; Python's own call of it later changes nothing."""
    seen: list[tuple[object, bool]] = []

    async def leave(engine: object, leaving: object, spent_s: float) -> Counter[str]:
        seen.append((leaving, told.draining if (told := decode(await stats())) else False))
        if fails:
            raise RuntimeError("no controller")
        return Counter(adopted=2)

    stats = replica.record_routing_stats
    monkeypatch.setattr("deployments.replica.leave", leave)
    assert not told_by(replica).draining

    async def go() -> None:
        going = replica.__del__()
        assert going is not None
        await going
        assert replica.__del__() is None

    asyncio.run(go())
    assert seen == [(Leaving(), True)]
    assert engine_of(replica).closed


def test_an_engine_that_stopped_names_its_replica(replica: EngineReplica) -> None:
    """So that the next try goes elsewhere."""
    engine_of(replica).fails = EngineStopped("CUDA error", running=False)
    told, *_ = asyncio.run(replica.decide_with_load(PLAIN))
    assert isinstance(told, EngineStopped)
    assert (told.cause, told.replica, told.running) == ("CUDA error", "me", False)


def test_a_replica_whose_engine_stopped_takes_nothing_new(replica: EngineReplica) -> None:
    """Routers hear it before Serve has replaced it."""
    assert not told_by(replica).draining
    engine_of(replica).closed = True
    assert told_by(replica).draining


def test_a_replica_describes_itself_while_its_engine_lives(replica: EngineReplica) -> None:
    """With the engine's own device, and not with one that happens to be there."""
    engine = engine_of(replica)
    engine.device = "cuda"
    about = asyncio.run(replica.describe())
    assert (about["device"], about["name"], about["weights_hash"]) == ("cuda", "m", "w")
    engine.closed = True
    with pytest.raises(NotReady, match="engine"):
        asyncio.run(replica.describe())


def test_a_replica_tells_what_it_computes_with(replica: EngineReplica) -> None:
    """Once, to the routers, and with every answer."""
    told = fingerprint.decode(asyncio.run(replica.record_replica_metadata()))
    assert told is not None
    assert (told.weights, told.bits, told.stack, told.strict) == ("w", "bits", "torch", False)
    assert engine_of(replica).fingerprint == told.text == "w-bits"


@pytest.mark.parametrize("strict", [False, True])
def test_bits_of_ones_own_are_unhealthy_where_the_fleets_were_promised(
    replica: EngineReplica, monkeypatch: pytest.MonkeyPatch, strict: bool
) -> None:
    """With the reason; elsewhere routers report it, and no replica looks."""
    reasons: list[str] = []
    looked: list[bool] = []

    class Siblings:
        def __init__(self) -> None:
            looked.append(True)

        def against_me(self) -> str:
            return "".join(reasons)

    monkeypatch.setattr("deployments.replica.Siblings", Siblings)
    replica._fingerprint = replica._fingerprint._replace(strict=strict)
    asyncio.run(replica.check_health())
    reasons.append("the probe gave other bits")
    if strict:
        with pytest.raises(NotReady, match="deterministic=True, and the probe gave other bits"):
            asyncio.run(replica.check_health())
    else:
        asyncio.run(replica.check_health())
    assert looked == ([True] if strict else [])


def test_a_replica_has_one_handle_of_its_siblings(
    replica: EngineReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if several calls come first."""
    made: list[object] = []

    class Slow:
        def __init__(self) -> None:
            time.sleep(0.05)
            made.append(self)

    monkeypatch.setattr("deployments.replica.Siblings", Slow)

    async def both() -> list[object]:
        return await asyncio.gather(*(replica._own_siblings() for _ in range(3)))

    assert asyncio.run(both()) == made * 3
    assert len(made) == 1


def test_tenants_in_metrics() -> None:
    """By name: of a key's hash as configured, of a file of keys as they are; a hundred in all."""
    metrics = ReplicaMetrics({"f" * 64: "acme"})
    assert [metrics.tenant(t) for t in ("f" * 64, "e" * 64, "", "beta")] == [
        "acme", "other", "other", "beta",
    ]  # fmt: skip
    labels = {metrics.tenant(f"tenant {i}") for i in range(200)}
    assert len(labels) == MOST_TENANTS - 1
    assert metrics.tenant("beta") == "beta"


def test_a_cancelled_call_drops_its_work(replica: EngineReplica) -> None:
    """The engine's future is cancelled with it."""
    engine_of(replica).answers = False

    async def leave() -> None:
        call = asyncio.create_task(replica.decide(TYPED))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    asyncio.run(leave())
    assert engine_of(replica).futures[0].cancelled()


@pytest.mark.parametrize(
    ("options", "cores", "threads"),
    [
        ({}, 16, "16"),
        ({"num_replicas": 3}, 16, "5"),
        ({"num_replicas": 40}, 16, "1"),
        ({"num_replicas": "auto", "min_replicas": 2}, 16, "8"),
        ({"num_replicas": 3, "cpus_per_replica": 4}, 16, "4"),
        ({"num_replicas": 2, "cpus_per_replica": 0.1}, 16, "8"),
    ],
)
def test_threads_are_those_of_the_replicas_own_machine(
    replica: EngineReplica,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    cores: int,
    threads: str,
) -> None:
    """What is set aside for it, if that is said; nothing of the machine where the app is built."""
    monkeypatch.setattr(os, "cpu_count", lambda: 1000)
    gateway: Any = build(AppArgs.model_validate(options))
    bound = gateway._bound_deployment.init_args[0]._bound_deployment
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr("deployments.replica._own_id", lambda: "r")
    monkeypatch.setenv("OMP_NUM_THREADS", "before")
    for name, value in bound.ray_actor_options["runtime_env"]["env_vars"].items():
        monkeypatch.setenv(name, value)
    EngineReplica(*bound.init_args)
    assert os.environ["OMP_NUM_THREADS"] == threads
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
    monkeypatch.setenv("OMP_NUM_THREADS", "before")
    monkeypatch.setattr("deployments.replica._own_id", lambda: "")
    EngineReplica(*bound.init_args)
    assert os.environ["OMP_NUM_THREADS"] == "before"  # this process is not Serve's


def test_what_the_autoscaler_is_told(replica: EngineReplica) -> None:
    """Numbers by name, as Serve takes them; a state asked about again is an agent."""
    key = tuple(route_key({"state": "s"}))
    for anchor in (7, 8, 7):
        asyncio.run(replica.decide(TYPED, route=key, anchor=anchor, home="me"))
    told = asyncio.run(replica.record_autoscaling_stats())
    assert set(told) == {"busy", "wait_ms", "agents", "refused"}
    assert all(isinstance(value, float) for value in told.values())
    assert told["agents"] == 1.0
    assert told["wait_ms"] == 4.0


def test_a_replica_with_a_request_under_way_is_not_idle(replica: EngineReplica) -> None:
    """Its round may be a long one, of which nothing is counted before it is over."""

    async def busy() -> list[float]:
        told = [(await replica.record_autoscaling_stats())["busy"]]  # what was before
        told.append((await replica.record_autoscaling_stats())["busy"])
        engine_of(replica).answers = False
        call = asyncio.create_task(replica.decide(TYPED))
        await asyncio.sleep(0)
        told.append((await replica.record_autoscaling_stats())["busy"])
        engine_of(replica).futures[-1].set_result(GOOD)
        await call
        return [*told, (await replica.record_autoscaling_stats())["busy"]]

    before, idle, under_way, after = asyncio.run(busy())
    assert before > 0
    assert under_way > 0
    assert idle == after == 0
