"""How many engine replicas there should be: a pure rule, and the policy that Serve calls with it.

Demand is counted in replicas' worth of time. What replicas are busy with is demand; so is what
waits, by the time in which it should be worked off, and what was refused. All of that may fill a
replica to `busy_target`. Agents count by themselves: each wants its state resident, also while it
thinks.

Source of what Serve does with the answer: ray/serve/autoscaling_policy.py of 2.60 (factors, delays,
bounds), which also stops managing the application if a policy raises.
"""

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

log = logging.getLogger("ray.serve")


@dataclass(frozen=True)
class Objectives:
    """What the fleet is meant to keep, and how eagerly.

    latency_objective_ms: predicted wait that is not worth another replica. busy_target: share of a
    replica's time that load may fill. agents_per_replica: agents whose states one replica holds.
    recover_s: seconds in which a backlog beyond the objective should be gone. slack: how far demand
    may fall below a smaller fleet's capacity before it shrinks.
    """

    latency_objective_ms: float = 500.0
    busy_target: float = 0.7
    agents_per_replica: int = 32
    recover_s: float = 10.0
    slack: float = 0.15

    def __post_init__(self) -> None:
        """Raises ValueError for what could never be kept."""
        if not 0 < self.busy_target <= 1 or not 0 <= self.slack < 1:
            raise ValueError(f"busy_target {self.busy_target} and slack {self.slack} are shares")
        if min(self.latency_objective_ms, self.agents_per_replica, self.recover_s) <= 0:
            raise ValueError("latency_objective_ms, agents_per_replica and recover_s are positive")


@dataclass(frozen=True)
class Signal:
    """What one replica tells of the last period.

    busy: share of time in which a round was under way. wait_ms: predicted wait of a request that
    comes now. agents: distinct states asked about in a minute. refused: refused work, in replicas'
    worth of time.
    """

    busy: float = 0.0
    wait_ms: float = 0.0
    agents: float = 0.0
    refused: float = 0.0


def demand(signals: Iterable[Signal], objectives: Objectives) -> tuple[float, str]:
    """(replicas that what was seen needs, the reason: "load", "wait", "refused" or "agents")."""
    told = list(signals)
    busy = sum(s.busy for s in told)
    over = sum(max(0.0, s.wait_ms - objectives.latency_objective_ms) for s in told)
    waiting = over / (1000 * objectives.recover_s)
    refused = sum(s.refused for s in told)
    agents = sum(s.agents for s in told) / objectives.agents_per_replica
    by_time = (busy + waiting + refused) / objectives.busy_target
    if agents >= by_time:
        return agents, "agents"
    parts = {"load": busy, "wait": waiting, "refused": refused}
    return by_time, max(parts, key=lambda name: parts[name])


def wanted(now: int, need: float, objectives: Objectives) -> int:
    """Replicas to have, given those there are: up to the need at once, down only with slack.

    The need is rounded up, so a fleet at a whole number would flap by the noise of a measurement:
    one replica less must hold the need with `slack` to spare.
    """
    up = math.ceil(need - 1e-9)
    if up >= now:
        return up
    return min(now, math.ceil(need / (1 - objectives.slack) - 1e-9))


class FleetPolicy:
    """The policy as Serve calls it: every 0.1 s, in its controller. Never raises."""

    def __init__(self, **objectives: Any) -> None:
        """objectives: fields of `Objectives`. Raises ValueError, so at deployment and not later."""
        self._objectives = Objectives(**objectives)

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """(replicas, what is kept for the next call: the need and its reason)."""
        try:
            return self._decide(context)
        except Exception:
            # a policy that raises freezes the whole application
            log.exception("the autoscaling policy failed; the fleet stays as it is")
            return int(getattr(context, "target_num_replicas", 1) or 0), {}

    def _decide(self, context: Any) -> tuple[int, dict[str, Any]]:
        target, running = int(context.target_num_replicas), int(context.current_num_replicas)
        queued = float(getattr(context, "total_num_requests", 0) or 0)
        if running == 0:
            # nothing can tell of its load yet: keep what is coming, or wake for who waits
            return max(target, 1 if queued else 0), {"need": 0.0, "reason": "waking"}
        signals = read_signals(context.aggregated_metrics or {})
        if not signals:
            return target, {"need": float(target), "reason": "silent"}
        need, reason = demand(signals, self._objectives)
        # those that have not told yet are taken to be like the others
        need *= running / len(signals) if reason != "agents" else 1.0
        if queued and need == 0.0:
            need, reason = 0.01, "load"
        return wanted(target, need, self._objectives), {"need": need, "reason": reason}


def read_signals(metrics: Mapping[str, Mapping[Any, Any]]) -> list[Signal]:
    """One signal a replica, from Serve's {name: {replica: value}}; what is no number counts 0."""
    replicas = {r for values in metrics.values() if isinstance(values, Mapping) for r in values}

    def value(name: str, replica: Any) -> float:
        values = metrics.get(name)
        found = values.get(replica) if isinstance(values, Mapping) else None
        if not isinstance(found, (int, float)) or not math.isfinite(found):
            return 0.0
        return max(0.0, float(found))

    names = ("busy", "wait_ms", "agents", "refused")
    return [Signal(*(value(name, replica) for name in names)) for replica in replicas]
