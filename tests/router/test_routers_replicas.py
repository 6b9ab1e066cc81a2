"""Replicas that are full, dead, unlike, busy or leaving, as the request router sees them."""

import asyncio

import pytest
from ray.serve._private.common import (
    DeploymentID,
    ReplicaID,
)

from router.boards import shared
from router.fingerprint import Fingerprint
from router.policy import Stats
from router.request_router import StateRouter
from tests.router.serve_stand_ins import (
    APP,
    BUSY,
    DEPLOYMENT,
    IDLE,
    NAMES,
    Replica,
    asking,
    chosen,
    with_router,
)
from tests.router.test_policy import text


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


def test_limits_are_the_policy_s() -> None:
    """By name, from the deployment's configuration; an unknown one is refused."""

    async def test(router: StateRouter, replicas: dict[str, Replica]) -> None:
        assert router._policy._limits.margin_steps == 3.5

    with_router(test, margin_steps=3.5)
    with pytest.raises(TypeError, match="margin_stepz"):
        with_router(test, margin_stepz=1.0)


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
