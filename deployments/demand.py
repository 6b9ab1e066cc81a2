"""What one replica tells the autoscaler: `deployments.autoscaling.Signal`, as numbers by name."""

import time
from collections import OrderedDict
from collections.abc import Callable

AGENT_S = 60.0
"""Seconds for which a state that was asked about is remembered: one that comes again within them is
an agent's.
"""

MOST = 65_536
"""States that are remembered: a minute of 1,000 new ones a second, in 13 MB."""


class Demand:
    """What happened since the last telling, from what an engine has counted since its start."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: seconds, monotonic."""
        self._clock = clock
        self._at = clock()
        self._busy_s = self._refused = 0.0
        # anchor -> when, and whether it had been asked about before; the last one last
        self._seen: OrderedDict[int, tuple[float, bool]] = OrderedDict()
        self._agents = 0

    def __len__(self) -> int:
        """States that are remembered."""
        return len(self._seen)

    def asked(self, anchor: int) -> None:
        """A request for a state came: once it may be anybody's, again it is an agent's."""
        now = self._clock()
        self._forget(now)
        again = anchor in self._seen
        if again:
            self._drop(anchor)
        elif len(self._seen) >= MOST:
            self._drop(next(iter(self._seen)))
        self._seen[anchor] = now, again
        self._agents += again

    def told(
        self, busy_s: float, wait_ms: float, refused_tokens: float, tokens_per_ms: float
    ) -> dict[str, float]:
        """Fields of a Signal. busy_s, refused_tokens: since the engine's start."""
        now = self._clock()
        self._forget(now)
        spent = max(now - self._at, 1e-3)
        refused_s = (refused_tokens - self._refused) / max(tokens_per_ms, 1e-3) / 1000
        told = {
            "busy": min(1.0, max(0.0, busy_s - self._busy_s) / spent),
            "wait_ms": wait_ms,
            "agents": float(self._agents),
            "refused": max(0.0, refused_s / spent),
        }
        self._at, self._busy_s, self._refused = now, busy_s, refused_tokens
        return told

    def _forget(self, now: float) -> None:
        """Here and not only when it is told: nobody asks a fleet of a fixed size."""
        while self._seen:
            anchor, (at, _) = next(iter(self._seen.items()))
            if now - at <= AGENT_S:
                return
            self._drop(anchor)

    def _drop(self, anchor: int) -> None:
        _, again = self._seen.pop(anchor)
        self._agents -= again
