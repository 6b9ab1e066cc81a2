"""Requests that replicas have died under, remembered for a while by what they ask.

A request that kills its replica would be retried by the Gateway, then by the client, and take one
replica after the other with it. What one process refuses the others hear of by a store that all of
them reach: every few seconds, and before a request that has met a death is tried again.
"""

import hashlib
import json
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from flide_engine.api import DecisionRequest
from flide_engine.errors import RequestQuarantined

DEATHS, SECONDS, MOST = 2, 600, 10_000
"""Replicas a request may cost, for how long it is refused then, and how many are remembered."""

READ_EVERY_S = 2.0
"""How often a process that asks looks for what others refuse; a millisecond on a thread."""

log = logging.getLogger("ray.serve")


class Store(Protocol):
    """What all processes refuse, by digest, with the time until which."""

    def put(self, digest: bytes, until: float) -> None:
        """Tells the others. Blocks."""
        ...

    def all(self) -> Mapping[bytes, float]:
        """What anyone has told. Blocks."""
        ...


class Quarantine:
    """What is refused, by digest."""

    def __init__(self, clock: Callable[[], float] = time.time, store: Store | None = None) -> None:
        """clock: seconds, the same in all processes. store: none: this process is alone."""
        self._clock, self._store = clock, store
        self._until: OrderedDict[bytes, float] = OrderedDict()
        self._read_at = -READ_EVERY_S
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._until)

    def check(self, request: DecisionRequest | dict[str, Any]) -> None:
        """Raises RequestQuarantined if the request is refused, as far as this process knows."""
        if self._store is not None and self._clock() - self._read_at >= READ_EVERY_S:
            self._read_at = self._clock()
            threading.Thread(target=self._read, name="flide-quarantine", daemon=True).start()
        if not self._until:
            return
        with self._lock:
            self._drop(MOST)
        # a digest takes 1.5 ms for 147 kB, so nobody pays for what is over
        if self._until and self._until.get(_digest(request), 0.0) > self._clock():
            raise RequestQuarantined(DEATHS, SECONDS)

    def check_with_others(self, request: DecisionRequest | dict[str, Any]) -> None:
        """As `check`, with what others refuse by now. Blocks."""
        if self._store is not None:
            self._read()
        self.check(request)

    def put(self, request: DecisionRequest | dict[str, Any]) -> RequestQuarantined:
        """Refuses a request from now on; the error for whoever asked. Blocks if others are told."""
        digest, until = _digest(request), self._clock() + SECONDS
        if digest:
            self._remember(digest, until)
        if digest and self._store is not None:
            try:
                self._store.put(digest, until)
            except Exception:
                log.exception("other processes are not told of a request that is refused")
        return RequestQuarantined(DEATHS, SECONDS)

    def _read(self) -> None:
        assert self._store is not None
        try:
            found = self._store.all()
        except Exception as error:
            log.warning("what other processes refuse is not known: %r", error)
            return
        for digest, until in sorted(found.items(), key=lambda item: item[1]):
            if until > max(self._clock(), self._until.get(digest, 0.0)):
                self._remember(digest, until)

    def _remember(self, digest: bytes, until: float) -> None:
        with self._lock:
            self._drop(MOST - 1)
            self._until.pop(digest, None)
            self._until[digest] = until

    def _drop(self, most: int) -> None:
        """Drops what is over, and the oldest beyond so many."""
        now, kept = self._clock(), self._until
        while kept and (len(kept) > most or next(iter(kept.values())) <= now):
            kept.popitem(last=False)


def _digest(request: DecisionRequest | dict[str, Any]) -> bytes:
    """Of state and questions, the same for the typed and the plain form; b"" for what the engine
    refuses before it can do harm: what is malformed, no JSON, or nested too deeply.
    """
    try:
        if not isinstance(request, DecisionRequest):
            request = DecisionRequest.model_validate(request)
        asked = request.model_dump(include={"state", "questions"})
        text = json.dumps(asked, sort_keys=True, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return b""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
