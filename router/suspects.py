"""Which request was running when a replica died, told by a mark that outlives the replica.

A request that was in a replica that died is a suspect: it may have killed it, or have been there
with the one that did. It is tried again alone, under a mark in the cluster's key-value store that
names the replica while it runs there, one suspect at a time. If that replica dies too, the mark
says who was running; a suspect that was only waiting there, or could not be reached, is not to
blame. Nor is one that ran there once, unless the process has ended by a fault of its own
(`router.crash`): something else may have killed it.
"""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from enum import Enum

import ray
from ray.experimental import internal_kv
from ray.serve._private.constants import SERVE_NAMESPACE

from router import crash

log = logging.getLogger("ray.serve")

STORE, REFUSED = "flide-suspects", "flide-refused"

SETTLED_WITHIN_S = 5.0
"""How long the cluster may take to learn that a process is gone; it is milliseconds on one node."""


class End(Enum):
    """How a replica ended under a suspect."""

    NONE = "not at all, or another ran there"
    GONE = "its process is gone, whoever killed it"
    CRASHED = "its process ended by a fault of its own"


class Turns:
    """Suspects of one replica, which run there one after the other."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    @asynccontextmanager
    async def of(self, suspect: str) -> AsyncIterator[None]:
        """While a suspect runs here; "": it is none, and waits for nobody."""
        if not suspect:
            yield
            return
        async with self._turn:
            marking = asyncio.ensure_future(asyncio.to_thread(_listen, suspect))
            try:
                await asyncio.shield(marking)
                yield
            finally:
                # whoever leaves: a mark that nobody takes away is there for good
                await asyncio.shield(asyncio.ensure_future(_unmark(marking, suspect)))


def _listen(suspect: str) -> crash.LastWords:
    words = crash.LastWords()
    try:
        begin(suspect, words.path)
    except BaseException:
        words.close()
        raise
    return words


async def _unmark(marking: "asyncio.Future[crash.LastWords]", suspect: str) -> None:
    with suppress(Exception):
        (await marking).close()  # or the mark would come after its end
    await asyncio.to_thread(end, suspect)


def begin(suspect: str, last_words: str = "") -> None:
    """A suspect is about to run in this replica. Blocks for a millisecond.

    last_words: the file that this process writes to if it ends by a fault of its own.
    """
    here = ray.get_runtime_context()
    mark = [here.get_actor_name() or "", here.get_node_id(), last_words]
    internal_kv._internal_kv_put(suspect, json.dumps(mark), namespace=STORE)


def end(suspect: str) -> None:
    """It did no harm. Blocks for a millisecond."""
    internal_kv._internal_kv_del(suspect, namespace=STORE)


def ended_under(suspect: str, within_s: float = SETTLED_WITHIN_S) -> End:
    """How the replica ended in which a suspect was running; the mark is used up.

    A replica that could not be reached may live on, so its actor is asked for until it is gone or
    the time is over. Blocks.
    """
    mark = internal_kv._internal_kv_get(suspect, namespace=STORE)
    if mark is None:
        return End.NONE
    name, node, last_words = json.loads(mark)
    dead = wait_until(lambda: not _lives(name), within_s)
    end(suspect)
    if not dead:
        return End.NONE
    words = crash.taken(node, last_words, within_s)
    if words:
        log.error("the last words of replica %s:\n%s", name, words)
    return End.CRASHED if words else End.GONE


class Refused:
    """What all processes of a cluster refuse, in its store: a `router.quarantine.Store`.

    Each key is a digest and the time until which it is refused, so that one look shows all.
    """

    def put(self, digest: bytes, until: float) -> None:
        """Tells the others, and takes out what is over."""
        for key in self._keys():
            if float(key.partition(" ")[2]) <= time.time():
                internal_kv._internal_kv_del(key, namespace=REFUSED)
        internal_kv._internal_kv_put(f"{digest.hex()} {until}", b"", namespace=REFUSED)

    def all(self) -> dict[bytes, float]:
        """What anyone has told; nothing outside a cluster."""
        pairs = (key.split(" ") for key in self._keys())
        return {bytes.fromhex(digest): float(until) for digest, until in pairs}

    def _keys(self) -> list[str]:
        if not internal_kv._internal_kv_initialized():
            return []
        return [key.decode() for key in internal_kv._internal_kv_list("", namespace=REFUSED)]


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether it comes to hold in time; looked at every 50 ms."""
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= until:
            return False
        time.sleep(0.05)
    return True


def _lives(actor: str) -> bool:
    try:
        ray.get_actor(actor, SERVE_NAMESPACE)
    except ValueError:
        return False
    return True
