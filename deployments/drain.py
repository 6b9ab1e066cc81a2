"""What becomes of a replica's checkpoints when it leaves: the next owners of their states get them.

Serve takes a replica that is to go out of the routers first, then waits until nothing is in flight,
then calls its `__del__`. Who is asked about a state from then on is what the routers make of its
anchor, so each checkpoint goes through a router of the replica's own deployment. The next owner
copies it before it answers.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import ray

from deployments.config import HandOver
from deployments.siblings import Siblings
from flide_engine.admission import Load
from flide_engine.errors import CheckpointRefused, PoolExhausted
from router.routing_key import anchor_key

log = logging.getLogger("ray.serve")


@dataclass(frozen=True)
class Leaving:
    """How a replica goes. handover: whether its checkpoints go to their next owners; auto: where
    that is cheaper than computing them anew. within_s: seconds for that and for what is in flight;
    then Serve kills it.
    """

    handover: HandOver = "auto"
    within_s: float = 60.0


SIBLING_WITHIN_S = 5.0
"""How long a leaving replica waits to hear whether there are others of its deployment."""

AT_ONCE = 2
"""Checkpoints on their way at a time: one is read while another travels."""

BYTES_PER_TOKEN = 3.7  # of a state's text, as in router.policy


WAIT_LOOP_S = 2.0
"""How often Serve looks whether anything is in flight (graceful_shutdown_wait_loop_s)."""


class Leaf(Protocol):
    """A checkpoint to hand over (`flide_engine.states.Leaf`)."""

    @property
    def tenant(self) -> str: ...  # noqa: D102
    @property
    def anchor(self) -> str: ...  # noqa: D102
    @property
    def tokens(self) -> int: ...  # noqa: D102
    @property
    def bytes(self) -> int: ...  # noqa: D102


class Computes(Protocol):
    """An engine, as far as it decides who can use its checkpoints."""

    @property
    def weights_hash(self) -> str: ...  # noqa: D102
    @property
    def stack(self) -> str: ...  # noqa: D102


class Giver(Computes, Protocol):
    """What a hand-over needs of the engine that leaves."""

    def leaves(self) -> Sequence[Any]: ...  # noqa: D102
    def export_leaf(self, leaf: Any) -> bytes | None: ...  # noqa: D102
    def load(self) -> Load: ...  # noqa: D102


class Taker(Computes, Protocol):
    """What it needs of the next owner's."""

    def import_state(self, data: bytes) -> int: ...  # noqa: D102


class Calls:
    """When calls came and went, for how long Serve may have waited for the last ones."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: seconds, monotonic."""
        self._clock = clock
        self._began = self._ended = clock()
        self.under_way = 0
        """How many are."""

    def began(self) -> None:
        """One came."""
        self._began = self._clock()
        self.under_way += 1

    def ended(self) -> None:
        """One is over."""
        self._ended = self._clock()
        self.under_way -= 1

    def spent_s(self) -> float:
        """At most so long ago Serve began to wait, if nothing is in flight.

        It tells nobody when; but no call comes after that but for those on their way, and it looks
        every `WAIT_LOOP_S` seconds.
        """
        return max(0.0, self._ended - self._began) + 2 * WAIT_LOOP_S


class Pace:
    """Whether to hand a checkpoint over, by what those before it took.

    Handing over pays if moving the bytes takes less time than computing the tokens: for the floors
    in DESIGN.md from 7.8 GB/s on for 0.8B, 3.0 for 4B, 1.6 for 9B. How fast bytes move is not known
    before some have; the first checkpoint goes to find out.
    """

    def __init__(self, how: HandOver, tokens_per_ms: float) -> None:
        """tokens_per_ms: how fast an engine like this computes states."""
        self._how, self._tokens_per_ms = how, tokens_per_ms
        self._bytes, self._seconds, self._until = 0, 0.0, 0.0

    def pays(self, tokens: int, size: int) -> bool:
        """Whether a checkpoint of so many tokens and bytes goes."""
        if self._how != "auto":
            return self._how == "always"
        if not self._bytes:
            return True
        move_ms = 1000 * self._seconds * size / self._bytes
        return move_ms < tokens / max(self._tokens_per_ms, 1e-9)

    def moved(self, size: int, began: float, ended: float) -> None:
        """Bytes reached their next owner between two times, told in the order of the second."""
        self._bytes += size
        # several are on their way at a time: time is counted once
        self._seconds += ended - max(began, self._until)
        self._until = ended


Give = Callable[[Any, bytes], Awaitable[str]]
"""Hands one checkpoint to its next owner: "adopted", "known", or "refused"."""


async def hand_over(
    engine: Giver,
    leaves: Sequence[Leaf],
    give: Give,
    pace: Pace,
    deadline: float,
    clock: Callable[[], float] = time.monotonic,
) -> Counter[str]:
    """Hands checkpoints over, and returns how many of them met which end.

    adopted: copied by the next owner; known: it had it; refused: it cannot use it, as its weights
    or its stack are others; full: it has no room; kept: computing it anew is cheaper, or nobody can
    tell who will be asked for it; failed: the next owner could not be reached; late: there was no
    time left; gone: evicted meanwhile. deadline: for all of them, on the clock.
    """
    ends: Counter[str] = Counter()
    places = asyncio.Semaphore(1)  # the first goes alone: its time is nobody else's

    async def one(leaf: Leaf) -> None:
        async with places:
            ends[await _give_one(engine, give, pace, leaf, deadline, clock)] += 1

    for leaf in leaves[:1]:
        await one(leaf)
    for _ in range(AT_ONCE - 1):
        places.release()
    await asyncio.gather(*map(one, leaves[1:]))
    return ends


async def _give_one(
    engine: Giver,
    give: Give,
    pace: Pace,
    leaf: Leaf,
    deadline: float,
    clock: Callable[[], float],
) -> str:
    if not leaf.anchor or not pace.pays(leaf.tokens, leaf.bytes):
        return "kept"
    if (began := clock()) >= deadline:
        return "late"
    data = await asyncio.to_thread(engine.export_leaf, leaf)
    if data is None:
        return "gone"
    try:
        end = await asyncio.wait_for(give(leaf, data), max(0.0, deadline - clock()))
    except TimeoutError:
        return "late"
    except Exception as error:
        log.warning("a checkpoint could not be handed over: %s: %s", type(error).__name__, error)
        return "failed"
    if end == "adopted":
        pace.moved(len(data), began, clock())
    return end


def give_to(siblings: Siblings, engine: Computes) -> Give:
    """Hands an engine's checkpoints to whoever of the siblings owns them next."""
    weights, stack = engine.weights_hash, engine.stack

    async def give(leaf: Leaf, data: bytes) -> str:
        route = tuple(anchor_key(leaf.anchor, leaf.tenant, int(BYTES_PER_TOKEN * leaf.tokens)))
        # in a list it stays a reference, so that the owner may refuse before it copies
        response = siblings.handle.adopt.remote([ray.put(data)], weights, route=route, stack=stack)
        try:
            return str(await response)
        except asyncio.CancelledError:
            response.cancel()
            raise

    return give


async def leave(engine: Giver, leaving: Leaving, spent_s: float) -> Counter[str]:
    """Hands an engine's checkpoints to their next owners, as far as that is wanted: how it ended.

    spent_s: of the time that the replica has, how much is over.
    """
    deadline = time.monotonic() + leaving.within_s - spent_s
    if leaving.handover == "never" or not (leaves := await asyncio.to_thread(engine.leaves)):
        return Counter()
    siblings = await asyncio.to_thread(Siblings)
    if not await siblings.exist(SIBLING_WITHIN_S):
        log.info("no other replica takes over %d checkpoints", len(leaves))
        return Counter()
    pace = Pace(leaving.handover, engine.load().tokens_per_ms)
    ends = await hand_over(engine, leaves, give_to(siblings, engine), pace, deadline)
    log.info("checkpoints handed over: %s", dict(ends))
    return ends


async def take_over(engine: Taker, pieces: list[Any], weights: str, stack: str) -> str:
    """Copies a checkpoint from a replica that leaves; how that ended, as in `hand_over`.

    pieces: a reference to its bytes, looked at only if its weights and its stack are ours. stack:
    "" is not known, and left to the bytes to tell.
    """
    try:
        for what, there, here in (
            ("weights", weights, engine.weights_hash),
            ("stack", stack or engine.stack, engine.stack),
        ):
            if there != here:
                raise CheckpointRefused(f"its {what} differ", f"{there!r}, here {here!r}")
        (piece,) = pieces
        data = await piece
        return "adopted" if await asyncio.to_thread(engine.import_state, data) else "known"
    except CheckpointRefused as error:
        log.warning("%s", error)
        return "refused"
    except PoolExhausted:
        return "full"
