"""What one replica tells the autoscaler: `deployments.autoscaling.Signal`, as numbers by name."""

import time
from collections import OrderedDict
from collections.abc import Callable

AGENT_S = 60.0
"""Seconds for which a state that was asked about counts as an agent's."""


class Demand:
    """What happened since the last telling, from what an engine has counted since its start."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: seconds, monotonic."""
        self._clock = clock
        self._at = clock()
        self._busy_s = self._refused = 0.0
        self._seen: OrderedDict[int, float] = OrderedDict()  # anchor -> when, the last one last

    def asked(self, anchor: int) -> None:
        """A request for a state came."""
        self._seen.pop(anchor, None)
        self._seen[anchor] = self._clock()

    def told(
        self, busy_s: float, wait_ms: float, refused_tokens: float, tokens_per_ms: float
    ) -> dict[str, float]:
        """Fields of a Signal. busy_s, refused_tokens: since the engine's start."""
        now = self._clock()
        while self._seen and next(iter(self._seen.values())) < now - AGENT_S:
            self._seen.popitem(last=False)
        spent = max(now - self._at, 1e-3)
        refused_s = (refused_tokens - self._refused) / max(tokens_per_ms, 1e-3) / 1000
        told = {
            "busy": min(1.0, max(0.0, busy_s - self._busy_s) / spent),
            "wait_ms": wait_ms,
            "agents": float(len(self._seen)),
            "refused": max(0.0, refused_s / spent),
        }
        self._at, self._busy_s, self._refused = now, busy_s, refused_tokens
        return told
