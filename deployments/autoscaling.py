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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from deployments.metrics import AutoscalerMetrics

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
    comes now. agents: states asked about again within a minute. refused: refused work, in replicas'
    worth of time.
    """

    busy: float = 0.0
    wait_ms: float = 0.0
    agents: float = 0.0
    refused: float = 0.0


class Needs(NamedTuple):
    """Replicas that each kind of demand asks for: busy time, backlog, and refused work add up, the
    states of agents stand beside them.
    """

    load: float
    wait: float
    refused: float
    agents: float


def needs_of(signals: Sequence[Signal], objectives: Objectives, running: int = 0) -> Needs:
    """What was seen, in replicas. running: those there are; any that have not told are taken to be
    as busy as the others; 0: to be idle.
    """
    more = (running or len(signals)) / max(1, len(signals)) / objectives.busy_target
    over = sum(max(0.0, s.wait_ms - objectives.latency_objective_ms) for s in signals)
    return Needs(
        load=more * sum(s.busy for s in signals),
        wait=more * over / (1000 * objectives.recover_s),
        refused=more * sum(s.refused for s in signals),
        agents=sum(s.agents for s in signals) / objectives.agents_per_replica,
    )


def demand(needs: Needs) -> tuple[float, str]:
    """(replicas needed in all, the name of the need that is most of it)."""
    by_time = needs.load + needs.wait + needs.refused
    if needs.agents >= by_time:
        return needs.agents, "agents"
    parts = needs._asdict()
    return by_time, max(("load", "wait", "refused"), key=lambda name: parts[name])


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
        self._metrics: AutoscalerMetrics | None = None
        self._tells = True
        self._before: tuple[int, int, str] | None = None  # target, what was asked for, and why

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """(replicas, what is kept for the next call: the need and its reason)."""
        try:
            count, kept = self._decide(context)
        except Exception:
            # a policy that raises freezes the whole application
            log.exception("the autoscaling policy failed; the fleet stays as it is")
            return int(getattr(context, "target_num_replicas", 1) or 0), {}
        if self._tells:
            try:
                self._tell(context, count, kept)
            except Exception:
                log.exception("the autoscaling policy tells its metrics no longer")
                self._tells = False
        return count, kept

    def _decide(self, context: Any) -> tuple[int, dict[str, Any]]:
        target, running = int(context.target_num_replicas), int(context.current_num_replicas)
        # those that run, and those that wait in a handle
        requests = float(getattr(context, "total_num_requests", 0) or 0)
        if running == 0:
            # nothing can tell of its load yet: keep what is coming, or wake for who waits
            return max(target, 1 if requests else 0), {"reason": "waking"}
        signals = read_signals(context.aggregated_metrics or {})
        if not signals:
            return target, {"reason": "silent"}
        needs = needs_of(signals, self._objectives)
        need, reason = demand(needs)
        if requests and need == 0.0:
            need, reason = 0.01, "load"
        kept = {"need": need, "reason": reason, "needs": needs._asdict()}
        count = wanted(target, need, self._objectives)
        if len(signals) < running:
            # What has just started is idle: taken for as busy as the rest it would multiply what
            # they tell. But nothing goes for want of a word from replicas that may be busy.
            most, _ = demand(needs_of(signals, self._objectives, running))
            count = max(count, min(target, wanted(target, most, self._objectives)))
        return count, kept

    def _tell(self, context: Any, count: int, kept: dict[str, Any]) -> None:
        """Metrics: what is needed, and a change of the target, which Serve makes some calls after
        it was asked for.
        """
        self._metrics = self._metrics or AutoscalerMetrics()
        application, target = str(context.app_name), int(context.target_num_replicas)
        self._metrics.needs(application, kept.get("needs", {}))
        if self._before is not None and target != self._before[0]:
            change, (_, asked, reason) = target - self._before[0], self._before
            # from zero Serve itself wakes the fleet, without a question
            ours = (asked - self._before[0]) * change > 0 or (reason == "waking" and change > 0)
            self._metrics.decided(application, change, reason if ours else "not ours")
        self._before = target, count, kept["reason"]


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
