"""A drain: what the next owners of a replica's states do not compute anew."""

import asyncio
import time
from collections.abc import Mapping
from typing import NamedTuple

from benchmarks.callers import engine_handle
from benchmarks.fleet.callers import OPENING_BYTES, Cutter
from benchmarks.fleet.cluster import Fleet
from benchmarks.fleet.works import Asked, handed_over
from benchmarks.results_file import Row
from flide_engine.api import DecisionResponse
from flide_engine.config import GRAIN
from router.asking import Call
from router.options import CallOptions


class Found(NamedTuple):
    """Who answered, and from how many tokens it resumed."""

    replica: str
    reused: int


def drained(fleet: Fleet, asked: Asked, count: int) -> Row:
    """One of so many replicas is told to go; each caller's last request is asked before and after.

    The app hands over always, is scaled by hand, and has been asked everything.
    """
    before = fleet.live()
    # the second time: the first may have moved a state
    asyncio.run(_last_requests(asked))
    there = asyncio.run(_last_requests(asked))
    began = time.monotonic()
    fleet.scale(count - 1)
    spent, after = time.monotonic() - began, fleet.live()
    again = asyncio.run(_last_requests(asked))
    moved = [name for name, found in there.items() if found.replica not in after]
    opening = asked.callers[0].requests[0]["state"].encode()[:OPENING_BYTES]
    shared = Cutter().count(opening.decode(errors="ignore")) // GRAIN * GRAIN
    return {
        "work": "drain",
        "states_moved": len(moved),
        "handed_over": handed_over(before, after),
        "share_saved": saved({n: (there[n].reused, again[n].reused) for n in moved}, shared),
        "drain_s": round(spent, 1),
    }


def saved(moved: Mapping[str, tuple[int, int]], shared: int) -> float | None:
    """Of the tokens that new owners would have had to compute, the share that they had; None if
    nothing has moved.

    moved: tokens resumed from before and after, by state. shared: tokens that all states begin
    with, which every replica has anyway.
    """
    cost = sum(max(0, before - shared) for before, _ in moved.values())
    lost = sum(max(0, before - max(after, shared)) for before, after in moved.values())
    return round(1 - lost / cost, 4) if cost else None


async def _last_requests(asked: Asked) -> dict[str, Found]:
    """Each caller's last request by handle, one after the other: who answered, by its name."""
    handle, found = engine_handle(), {}
    for caller in asked.callers:
        options = CallOptions(session_id=caller.session, timeout_s=asked.deadline_s)
        told = await Call(handle, caller.requests[-1], options).send()
        usage = DecisionResponse.model_validate_json(told[0]).usage
        found[caller.name] = Found(told[1], usage.x_reused_tokens)
    return found
