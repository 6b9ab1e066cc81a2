"""Requests that replicas have died under, remembered for a while by what they ask.

A request that kills its replica would be retried by the Gateway, then by the client, and take one
replica after the other with it. Each process remembers its own.
"""

import hashlib
import json
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from flide_engine.api import DecisionRequest
from flide_engine.errors import RequestQuarantined

DEATHS, SECONDS, MOST = 2, 600, 10_000
"""Replicas a request may cost, for how long it is refused then, and how many are remembered."""


class Quarantine:
    """What is refused, by digest."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: seconds, monotonic."""
        self._clock = clock
        self._until: OrderedDict[bytes, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._until)

    def check(self, request: DecisionRequest | dict[str, Any]) -> None:
        """Raises RequestQuarantined if the request is refused."""
        if self._until and self._until.get(_digest(request), 0.0) > self._clock():
            raise RequestQuarantined(DEATHS, SECONDS)

    def put(self, request: DecisionRequest | dict[str, Any]) -> RequestQuarantined:
        """Refuses a request from now on; the error for whoever asked."""
        now = self._clock()
        while self._until and (len(self._until) >= MOST or next(iter(self._until.values())) <= now):
            self._until.popitem(last=False)
        digest = _digest(request)
        self._until.pop(digest, None)
        self._until[digest] = now + SECONDS
        return RequestQuarantined(DEATHS, SECONDS)


def _digest(request: DecisionRequest | dict[str, Any]) -> bytes:
    """Of state and questions, the same for the typed and the plain form."""
    if not isinstance(request, DecisionRequest):
        try:
            request = DecisionRequest.model_validate(request)
        except (ValueError, RecursionError):
            return b""  # the engine refuses it before it can do harm
    asked = request.model_dump(include={"state", "questions"})
    text = json.dumps(asked, sort_keys=True, ensure_ascii=False)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
