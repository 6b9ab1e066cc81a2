"""What the request router says to `router.channel`: where a request goes, and how to get there."""

import asyncio
from typing import Any

from router import boards
from router.request_router import LISTENS, StateRouter, address_of
from router.routing_key import route_key
from tests.router.serve_stand_ins import (
    APP,
    DEPLOYMENT,
    Replica,
    asking,
    chosen,
    with_router,
)


def listening(replicas: dict[str, Replica], *names: str) -> list[Any]:
    """New replicas in place of these, those of the given names with an address."""
    made = {name: Replica(name) for name in replicas}
    for name in names:
        made[name].replica_metadata = {LISTENS: ["host", ord(name), "token"]}
    return list(made.values())


def route(number: int) -> tuple[Any, ...]:
    """The key of a state."""
    return tuple(route_key({"state": f"state {number}"}))


def test_a_request_goes_where_a_handle_would_send_it() -> None:
    """With the same words of why; by handle where a replica has no address or has stopped."""

    async def test(router: StateRouter, replicas: dict[str, Replica]) -> None:
        known = boards.shared(APP, DEPLOYMENT)
        assert router.place(route(0)) is None  # nobody listens
        assert known.ways.router_here() is None
        router.update_replicas([])
        router.update_replicas(listening(replicas, "a", "b", "c"))
        assert known.ways.router_here() is router
        places = [router.place(route(i)) for i in range(40)]
        for i, place in enumerate(places):
            call = asking({"state": f"state {i}"})
            replica = await chosen(router, call)
            if replica == "d":
                assert place is None
                continue
            assert place is not None
            assert place[:2] == (replica, ("host", ord(replica), "token"))
            assert {name: call.kwargs[name] for name in ("anchor", "home")} == {
                name: place[2][name] for name in ("anchor", "home")
            }
        assert None in places
        known.stopped.update("abcd")
        assert {router.place(route(i)) for i in range(40)} == {None}
        assert router.place("no key") is None

    with_router(test)


def test_nothing_goes_where_a_connection_broke_until_it_is_listed_again() -> None:
    """As with a replica that could not be reached by handle."""

    async def test(router: StateRouter, replicas: dict[str, Replica]) -> None:
        router.update_replicas([])
        made = listening(replicas, *"abcd")
        router.update_replicas(made)

        def used() -> set[str]:
            return {place[0] for i in range(40) if (place := router.place(route(i)))}

        assert used() == set("abcd")
        router.lost("b")
        assert used() == set("acd")
        router.update_replicas(made)
        assert used() == set("abcd")

    with_router(test)


def test_a_router_is_asked_on_its_own_loop_only() -> None:
    """The newest there; those of loops that are over are forgotten."""
    ways = boards.Ways()

    async def add(router: str) -> Any:
        ways.add(router)
        ways.add(router)
        return ways.router_here()

    assert asyncio.run(add("first")) == "first"
    assert asyncio.run(add("second")) == "second"
    assert len(ways._routers) == 1

    async def nobody() -> Any:
        return ways.router_here()

    assert asyncio.run(nobody()) is None
    assert ways.exist


def test_an_address_is_read_from_metadata_and_anything_else_is_none() -> None:
    """Replicas of other versions, and without channels, have none."""
    assert address_of({LISTENS: ["h", 1, "t"]}) == ("h", 1, "t")
    for odd in (None, {}, {LISTENS: None}, {LISTENS: ["h", 1]}, {LISTENS: ["h", "1", "t"]}):
        assert address_of(odd) is None
