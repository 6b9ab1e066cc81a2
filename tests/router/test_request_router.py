"""Which replica a call goes to by its state, its session or its key, over stand-ins for Serve."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ray.serve.config import RequestRouterConfig

from flide_engine import DecisionRequest, Noul
from router.policy import Stats
from router.request_router import StateRouter, key_of_call
from router.routing_key import anchor_key, anchor_text, as_key, route_key
from tests.router.serve_stand_ins import BUSY, IDLE, NAMES, Replica, asking, chosen, with_router
from tests.router.test_policy import text


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


def test_a_process_without_this_package_routes_alike(tmp_path: Path) -> None:
    """By what Serve pickles of the class, and to the same replicas as here."""
    config = RequestRouterConfig(request_router_class="router.request_router.StateRouter")
    pickled = tmp_path / "router"
    pickled.write_bytes(config.get_serialized_request_router_cls() or b"")
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_PACKAGE, str(pickled)],
        cwd=tmp_path,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr

    async def test(router: StateRouter, replicas: dict[str, Replica]) -> None:
        mine = [await chosen(router, asking({"state": f"state {i}"})) for i in range(12)]
        assert done.stdout.split() == mine

    with_router(test)
