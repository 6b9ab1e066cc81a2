"""The policy behind Serve's router API, over stand-ins for Serve's replicas; no cluster."""

import asyncio
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ray.serve._private.common import (
    DeploymentHandleSource,
    DeploymentID,
    ReplicaID,
    RequestMetadata,
)
from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import PendingRequest

from flide_engine import DecisionRequest, Noul
from router import boards, request_router
from router.boards import shared
from router.fingerprint import Fingerprint
from router.policy import Load, Stats
from router.request_router import StateRouter, key_of_call
from router.routing_key import anchor_key, anchor_text, as_key, route_key
from tests.router.test_policy import text

IDLE, BUSY = Load(0.0, 0.0, 3.0, 400.0), Load(5000.0, 5000.0, 3.0, 400.0)
APP, DEPLOYMENT = "app", "Engine"
NAMES = ("a", "b", "c", "d")


class Replica:
    """What Serve gives a router of a replica."""

    def __init__(self, name: str, stats: dict[str, bytes] | None = None) -> None:
        self.replica_id = ReplicaID(name, DeploymentID(DEPLOYMENT, APP))
        self.routing_stats = stats or {}
        self.replica_metadata: dict[str, object] = {}
        self.max_ongoing_requests = 2
        self.ongoing = 0

    @property
    def name(self) -> str:
        return str(self.replica_id.unique_id)

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return self.ongoing


class Clock:
    """A second between any two looks, so that no call finds the one before still in a queue."""

    def __init__(self) -> None:
        self._looks = itertools.count()

    def monotonic(self) -> float:
        return float(next(self._looks))


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Time, and what this process knows of deployments, are of one test only."""
    monkeypatch.setattr(request_router, "time", Clock())
    boards._shared.clear()
    yield
    boards._shared.clear()


def asking(positional: object, method: str = "decide", **kwargs: Any) -> PendingRequest:
    """A call as Serve hands it to a router; to be made on an event loop."""
    asking.count += 1  # type: ignore[attr-defined]
    number = str(asking.count)  # type: ignore[attr-defined]
    about = RequestMetadata(request_id=number, internal_request_id=number, call_method=method)
    args = [] if positional is None else [positional]
    return PendingRequest(args=args, kwargs=kwargs, metadata=about)


asking.count = 0  # type: ignore[attr-defined]


def with_router(
    test: Callable[[StateRouter, dict[str, Replica]], Awaitable[None]], **limits: Any
) -> None:
    """Runs a test on an event loop, over a router that knows four idle replicas."""

    async def run() -> None:
        router = StateRouter(
            deployment_id=DeploymentID(DEPLOYMENT, APP),
            handle_source=DeploymentHandleSource.REPLICA,
            use_replica_queue_len_cache=True,
            self_node_id="node",
        )
        router.initialize_state(**limits)
        replicas = {name: Replica(name, Stats(IDLE).encode()) for name in NAMES}
        router.update_replicas(list(replicas.values()))
        await asyncio.sleep(0)
        await test(router, replicas)

    asyncio.run(asyncio.wait_for(run(), 20))


async def chosen(router: StateRouter, request: PendingRequest) -> str:
    """Where Serve's own code sends a call by this router."""
    return str((await router._choose_replica_for_request(request)).replica_id.unique_id)


def test_a_growing_state_stays_and_the_replica_is_told() -> None:
    """Typed and plain, with and without a key, in the arguments that the replica takes."""

    async def test(router: StateRouter, replicas: dict[str, Replica]) -> None:
        for seed in range(12):
            homes = set()
            for size in (700, 3000, 9000, 30_000):
                state = text(size, 0) if seed == 0 else text(700, seed) + text(size, 99)
                typed = DecisionRequest(state=state, questions={"q": Noul(instructions="?")})
                calls = [
                    asking({"state": state}),
                    asking(typed, "decide_with_load"),
                    asking(typed, route=tuple(route_key(typed))),
                    asking(None, request={"state": state}),
                ]
                for call in calls:
                    homes.add(await chosen(router, call))
                    assert call.kwargs["route"] == tuple(route_key(typed))
                    assert {call.kwargs["home"]} == homes
                    assert call.kwargs["reason"] == "home"
                    assert 0 <= call.kwargs["anchor"] < 1 << 64
            assert len(homes) == 1
        assert router.reasons.snapshot() == {"home": 12 * 16}

    with_router(test)


def test_a_shared_opening_spreads() -> None:
    """Forty states behind 8 KiB that all have: no replica gets more than half of them."""

    async def test(router: StateRouter, replicas: dict[str, Replica]) -> None:
        opening, got = text(8192, 1), []
        for seed in range(60):
            got.append(await chosen(router, asking({"state": opening + text(2000, 2 + seed)})))
        assert max(got[20:].count(name) for name in NAMES) <= 20
        assert set(got[20:]) == set(NAMES)

    with_router(test)


def test_a_session_pins_whatever_its_state() -> None:
    """The id alone decides, also for a raw call."""

    async def test(router: StateRouter, replicas: dict[str, Replica]) -> None:
        for session in ("one", "two", "three"):
            calls = [asking({"state": text(900, i)}, session_id=session) for i in range(5)]
            calls.append(asking("s", route=tuple(route_key({"state": "s"}, "", session))))
            assert len({await chosen(router, call) for call in calls}) == 1

    with_router(test)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((), {}),
        ((7,), {}),
        (({"questions": {}},), {}),
        (({"state": "s"},), {"session_id": 7}),
        (({"state": "s"},), {"tenant": None}),
        ((object(),), {"route": "junk"}),
    ],
)
def test_calls_without_a_state_have_no_key(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """They go to whichever replica has less to do, and nothing is added to them."""
    assert key_of_call(args, kwargs) is None

    async def test(router: StateRouter, replicas: dict[str, Replica]) -> None:
        call = asking(args[0] if args else None, **kwargs)
        assert await chosen(router, call) in NAMES
        assert call.kwargs == kwargs

    with_router(test)


def test_keys_of_strangers_are_made_anew() -> None:
    """Another scheme's key, or a malformed one, is not believed."""
    good = route_key({"state": "s"})
    for bad in ((99, *good[1:]), tuple(good[:-1]), "key", {}, (*good[:3], b"123", -1, 1)):
        assert key_of_call([{"state": "s"}], {"route": bad}) == good
    assert key_of_call([], {"route": tuple(good)}) == as_key(good)


def test_other_methods_get_no_arguments() -> None:
    """`describe` and the like take none."""

    async def test(router: StateRouter, replicas: dict[str, Replica]) -> None:
        call = asking({"state": "s"}, "describe")
        assert await chosen(router, call) in NAMES
        assert call.kwargs == {}
        assert router.reasons.snapshot() == {"no key": 1}

    with_router(test)


def test_ranks() -> None:
    """The choice, two others one by one, then all; only the first is needed if it has room."""

    async def test(router: StateRouter, replicas: dict[str, Replica]) -> None:
        everyone = list(replicas.values())
        for replica in everyone:
            router.replica_queue_len_cache.invalidate_key(replica.replica_id)
        ranks = await router.choose_replicas(everyone, asking({"state": text(600)}))
        assert [len(rank) for rank in ranks] == [1, 1, 1, 4]
        assert len({rank[0].name for rank in ranks[:3]}) == 3
        assert ranks[3] is everyone
        router.on_new_queue_len_info(ranks[0][0].replica_id, 1)
        known = await router.choose_replicas(everyone, asking({"state": text(600)}))
        assert known == [ranks[0], everyone]
        assert await router.choose_replicas(everyone) == [everyone]

    with_router(test)


def test_full_replicas_are_passed_over_and_waited_for() -> None:
    """One that is full loses the call to a fallback; while all are, it waits, then goes."""

    async def test(router: StateRouter, replicas: dict[str, Replica]) -> None:
        home = await chosen(router, asking({"state": "s"}))
        replicas[home].ongoing = 2
        router.on_new_queue_len_info(replicas[home].replica_id, 2)
        assert await chosen(router, asking({"state": "s"})) != home
        for replica in replicas.values():
            replica.ongoing = 2
            router.on_new_queue_len_info(replica.replica_id, 2)
        waiting = asyncio.create_task(chosen(router, asking({"state": "s"})))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        replicas[home].ongoing = 0
        assert await waiting == home

    with_router(test)


def test_a_dead_replica_is_out_at_once_and_for_good() -> None:
    """Told several times over, and listed by a controller that does not know yet."""

    async def test(router: StateRouter, replicas: dict[str, Replica]) -> None:
        states = [{"state": text(600, i)} for i in range(30)]
        before = [await chosen(router, asking(state)) for state in states]
        for _ in range(8):
            router.on_replica_actor_died(replicas["a"].replica_id)
        for listed in (False, True):
            if listed:
                router.update_replicas(list(replicas.values()))
            after = [await chosen(router, asking(state)) for state in states]
            assert "a" not in after
            # and nobody else's states move
            assert all(b in ("a", a) for b, a in zip(before, after, strict=True))
        kept = [replica for replica in replicas.values() if replica.name != "a"]
        router.update_replicas([*kept, Replica("e", Stats(IDLE).encode())])
        assert set(router.curr_replicas) == {r.replica_id for r in kept} | {
            ReplicaID("e", DeploymentID(DEPLOYMENT, APP))
        }
        assert "e" in [await chosen(router, asking(state)) for state in states]

    with_router(test)


def test_all_replicas_dead() -> None:
    """A call waits for the next replica rather than fail."""

    async def test(router: StateRouter, replicas: dict[str, Replica]) -> None:
        for replica in replicas.values():
            router.on_replica_actor_died(replica.replica_id)
        router.update_replicas(list(replicas.values()))
        waiting = asyncio.create_task(chosen(router, asking({"state": "s"})))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        router.update_replicas([Replica("new")])
        assert await waiting == "new"

    with_router(test)


def test_a_replica_out_of_reach_comes_back_with_the_next_list() -> None:
    """Until then its states go elsewhere."""

    async def test(router: StateRouter, replicas: dict[str, Replica]) -> None:
        home = await chosen(router, asking({"state": "s"}))
        router.on_replica_actor_unavailable(replicas[home].replica_id)
        assert await chosen(router, asking({"state": "s"})) != home
        router.update_replicas(list(replicas.values()))
        assert await chosen(router, asking({"state": "s"})) == home

    with_router(test)


def test_a_state_that_is_handed_over_goes_to_its_next_owner() -> None:
    """Where its anchor's own calls go, however busy that replica is; the replica is told."""

    async def test(router: StateRouter, replicas: dict[str, Replica]) -> None:
        for seed in range(12):
            call = asking({"state": text(3000, seed)})
            home = await chosen(router, call)
            key = anchor_key(anchor_text(call.kwargs["anchor"]), "", 3000)
            replicas[home].routing_stats = Stats(BUSY).encode()
            router.update_replicas(list(replicas.values()))
            adopt = asking([None], "adopt", route=tuple(key))
            assert await chosen(router, adopt) == home
            assert adopt.kwargs["anchor"] == call.kwargs["anchor"]
            assert adopt.kwargs["home"] == home
            assert await chosen(router, asking([], "owner", route=tuple(key))) == home
            replicas[home].routing_stats = Stats(IDLE, draining=True).encode()
            router.update_replicas(list(replicas.values()))
            again = await chosen(router, asking([None], "adopt", route=tuple(key)))
            assert again != home
            replicas[home].routing_stats = Stats(IDLE).encode()
            router.update_replicas(list(replicas.values()))
            assert again != await chosen(router, asking([None], "adopt", route=tuple(key)))

    with_router(test)


@pytest.mark.parametrize("strict", [False, True])
def test_bits_unlike_the_fleets_are_reported_and_barred_where_they_were_promised(
    strict: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """From before its first call on; once its fleet is gone, it is the fleet."""

    async def test(router: StateRouter, replicas: dict[str, Replica]) -> None:
        for replica in replicas.values():
            bits = "other" if replica.name == "b" else "bits"
            told = Fingerprint("w", bits, f"stack of {replica.name}", strict, 0.0)
            replica.replica_metadata = dict(told.encode())
        others = [r for name, r in replicas.items() if name != "a"]
        with caplog.at_level("WARNING", "ray.serve"):
            for live in (others, [*others, replicas["a"]]):
                router.update_replicas(live)
        odd = shared(APP, DEPLOYMENT).odd
        assert list(odd) == ["b"]
        assert "bits on 3 of 4 replicas" in odd["b"]
        assert "here stack of b, there stack of a" in odd["b"]
        assert sum("unlike its fleet" in record.message for record in caplog.records) == 1
        homes = {await chosen(router, asking({"state": text(700, seed)})) for seed in range(40)}
        assert homes == ({"a", "c", "d"} if strict else {"a", "b", "c", "d"})
        router.update_replicas([replicas["b"]])
        assert not odd
        assert await chosen(router, asking({"state": "s"})) == "b"

    with_router(test)


def test_a_draining_replica_takes_nothing() -> None:
    """By what it says in its stats; also when all of them drain."""

    async def test(router: StateRouter, replicas: dict[str, Replica]) -> None:
        home = await chosen(router, asking({"state": "s"}))
        replicas[home].routing_stats = Stats(IDLE, draining=True).encode()
        router.update_replicas(list(replicas.values()))
        assert await chosen(router, asking({"state": "s"})) != home
        for replica in replicas.values():
            replica.routing_stats = Stats(IDLE, draining=True).encode()
        router.update_replicas(list(replicas.values()))
        assert await chosen(router, asking({"state": "s"})) in NAMES

    with_router(test)


def test_what_callers_write_moves_states() -> None:
    """A replica whose last answer told of five seconds of queue loses a short state to another."""

    async def test(router: StateRouter, replicas: dict[str, Replica]) -> None:
        home = await chosen(router, asking({"state": "short"}))
        shared(APP, DEPLOYMENT).board.answered(home, tuple(BUSY), 1e12)
        call = asking({"state": "short"})
        other = await chosen(router, call)
        assert other != home
        assert call.kwargs["home"] == ""
        assert router.reasons.snapshot() == {"home": 1, "spilled": 1}
        assert shared(APP, DEPLOYMENT).reasons is router.reasons

    with_router(test)


def test_stats_move_states() -> None:
    """As told by the controller; what is no stats changes nothing."""

    async def test(router: StateRouter, replicas: dict[str, Replica]) -> None:
        home = await chosen(router, asking({"state": "short"}))
        for told in ({}, {"flide": b"junk"}, {"flide": 7}, {"other": b""}):
            replicas[home].routing_stats = told  # type: ignore[assignment]
            router.update_replicas(list(replicas.values()))
            assert await chosen(router, asking({"state": "short"})) == home
        replicas[home].routing_stats = Stats(BUSY).encode()
        router.update_replicas(list(replicas.values()))
        assert await chosen(router, asking({"state": "short"})) != home

    with_router(test)


def test_a_failing_policy_costs_the_choice_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raised on Serve's loop, an error would leave the caller waiting."""

    async def test(router: StateRouter, replicas: dict[str, Replica]) -> None:
        monkeypatch.setattr(router._policy, "choose", lambda *_: 1 / 0)
        assert await chosen(router, asking({"state": "s"})) in NAMES

    with_router(test)


def test_how_many_there_are_is_known_to_the_process() -> None:
    """Also none, and how long a first one takes where there may be none."""

    async def test(router: StateRouter, replicas: dict[str, Replica]) -> None:
        members = shared(APP, DEPLOYMENT).members
        assert (members.count, members.cold_start_s) == (len(replicas), 90.0)
        router.update_replicas([])
        assert members.count == 0

    with_router(test, cold_start_s=90.0)

    async def always(router: StateRouter, replicas: dict[str, Replica]) -> None:
        assert shared(APP, DEPLOYMENT).members.cold_start_s is None

    with_router(always)


def test_limits_are_the_policy_s() -> None:
    """By name, from the deployment's configuration; an unknown one is refused."""

    async def test(router: StateRouter, replicas: dict[str, Replica]) -> None:
        assert router._policy._limits.margin_steps == 3.5

    with_router(test, margin_steps=3.5)
    with pytest.raises(TypeError, match="margin_stepz"):
        with_router(test, margin_stepz=1.0)


WITHOUT_PACKAGE = """
import asyncio, sys
from pathlib import Path

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"flide_engine", "router", "deployments", "tests"}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Hidden())
from ray import cloudpickle
from ray.serve._private.common import *
from ray.serve.request_router import PendingRequest

Router = cloudpickle.loads(Path(sys.argv[1]).read_bytes())
engine = DeploymentID("Engine", "app")

class Replica:
    routing_stats, max_ongoing_requests = {}, 8
    replica_metadata = {"flide_fingerprint": ["weights", "bits", "stack", False, 1.0]}
    def __init__(self, name):
        self.replica_id = ReplicaID(name, engine)
    async def get_queue_len(self, *, deadline_s):
        return 0

async def main():
    router = Router(
        deployment_id=engine, handle_source=DeploymentHandleSource.REPLICA,
        use_replica_queue_len_cache=True,
    )
    router.initialize_state()
    router.update_replicas([Replica(name) for name in "abcd"])
    for i in range(12):
        await asyncio.sleep(0.02)  # so that no state leaves a home for its queue
        about = RequestMetadata(request_id="r", internal_request_id=str(i), call_method="decide")
        call = PendingRequest(args=[{"state": "state %d" % i}], kwargs={}, metadata=about)
        print((await router._choose_replica_for_request(call)).replica_id.unique_id)

asyncio.run(main())
"""


def test_a_process_without_this_package_routes_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what Serve pickles of the class, and to the same replicas as here."""
    with monkeypatch.context() as patch:
        patch.setattr(request_router, "time", time)
        config = RequestRouterConfig(request_router_class="router.request_router.StateRouter")
    pickled = tmp_path / "router"
    pickled.write_bytes(config.get_serialized_request_router_cls() or b"")
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_PACKAGE, str(pickled)],
        cwd=tmp_path,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr

    async def test(router: StateRouter, replicas: dict[str, Replica]) -> None:
        mine = [await chosen(router, asking({"state": f"state {i}"})) for i in range(12)]
        assert done.stdout.split() == mine

    with_router(test)
