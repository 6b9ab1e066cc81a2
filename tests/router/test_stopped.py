"""A replica whose process outlives its engine: routers leave it out once callers say so."""

import asyncio

from router.boards import shared
from router.request_router import StateRouter
from tests.router.serve_stand_ins import APP, DEPLOYMENT, Replica, asking, chosen, with_router
from tests.router.test_policy import text


def test_a_replica_whose_engine_stopped_is_out_at_once_and_for_good() -> None:
    """Before the controller knows, and whatever list comes; nobody else's states move."""

    async def test(router: StateRouter, replicas: dict[str, Replica]) -> None:
        states = [{"state": text(600, i)} for i in range(30)]
        before = [await chosen(router, asking(state)) for state in states]
        assert "a" in before
        shared(APP, DEPLOYMENT).stopped.add("a")
        for _ in range(2):
            after = [await chosen(router, asking(state)) for state in states]
            assert "a" not in after
            assert all(b in ("a", x) for b, x in zip(before, after, strict=True))
            assert "a" not in [await chosen(router, asking(None, "describe")) for _ in range(8)]
            router.update_replicas(list(replicas.values()))

    with_router(test)


def test_a_call_waits_for_the_next_replica_where_all_have_stopped() -> None:
    """As where all are dead."""

    async def test(router: StateRouter, replicas: dict[str, Replica]) -> None:
        shared(APP, DEPLOYMENT).stopped.update(replicas)
        waiting = asyncio.create_task(chosen(router, asking({"state": "s"})))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        router.update_replicas([*replicas.values(), Replica("new")])
        assert await waiting == "new"

    with_router(test)
