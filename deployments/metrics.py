"""What Gateways, replicas and the autoscaler tell Prometheus, by Ray's metrics (prefix `ray_`).

Each metric is declared once, in `METRICS`; the dashboard and the alert rules in `observability/`
use these names, which a test holds to a scrape of a running app.
"""

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ray.serve import metrics

from flide_engine.api import DecisionResponse
from router.auth import is_hash
from router.observed import ANSWERED, Trip, outcome_of
from router.policy import REASONS

Kind = Literal["counter", "gauge", "histogram"]

STAGE_BOUNDS = [0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0]
"""Seconds: from the stages of a small request on a GPU to a long one on a CPU."""

TOKENS = ("asked", "reused", "computed", "recomputed", "padding", "from_host", "from_disk")
"""Kinds of tokens that an engine counts."""

MOST_TENANTS = 100
"""Tenants with a name of their own in metrics; Prometheus keeps a series for each."""


@dataclass(frozen=True)
class Metric:
    """One metric: its name without Ray's prefix and Prometheus' suffix, help text, labels.

    occasional: Prometheus has no series of it until what it tells of has happened.
    """

    kind: Kind
    name: str
    help: str
    labels: tuple[str, ...] = ()
    occasional: bool = False

    @property
    def exported(self) -> str:
        """The name that Prometheus sees; of a histogram, what its series begin with."""
        return f"ray_{self.name}" + ("_total" if self.kind == "counter" else "")

    def make(self) -> Any:
        """The metric in this process. Serve adds deployment, replica and application in one of its
        replicas.
        """
        if self.kind == "counter":
            return metrics.Counter(self.name, self.help, self.labels)
        if self.kind == "gauge":
            return metrics.Gauge(self.name, self.help, self.labels)
        return metrics.Histogram(self.name, self.help, STAGE_BOUNDS, self.labels)


GATEWAY = (
    Metric(
        "counter",
        "flide_gateway_requests",
        "Decision requests at Gateways by outcome.",
        ("outcome", "tenant", "via"),
    ),
)
STAGES = (
    Metric("histogram", "flide_stage_seconds", "Time of answered requests.", ("stage",)),
    # Ray's own sum of a histogram counts the middle of each bucket
    Metric("counter", "flide_stage_spent_seconds", "The same, summed exactly.", ("stage",)),
)
REPLICA = (
    Metric("counter", "flide_requests", "Requests at engines by outcome.", ("outcome", "tenant")),
    Metric("counter", "flide_questions", "Questions answered.", ("tenant",)),
    Metric("counter", "flide_input_tokens", "Tokens of answered requests.", ("tenant",)),
    Metric(
        "counter",
        "flide_request_reused_tokens",
        "Of those, saved by a checkpoint.",
        occasional=True,
    ),
    Metric("counter", "flide_routed", "Requests by why they were sent to a replica.", ("reason",)),
    Metric(
        "counter",
        "flide_retries",
        "Requests asked again as a replica died under them.",
        occasional=True,
    ),
    Metric("counter", "flide_tokens", "Tokens of rounds by what became of them.", ("kind",)),
    Metric(
        "counter",
        "flide_checkpoint_hits",
        "Requests that resumed from a checkpoint.",
        occasional=True,
    ),
    Metric("counter", "flide_rounds", "Rounds run."),
    Metric("counter", "flide_busy_seconds", "Seconds in which a round was under way."),
    Metric("gauge", "flide_pool_bytes", "Bytes for states.", ("tier", "kind", "state")),
    Metric("gauge", "flide_checkpoints", "Checkpoints by tier.", ("tier",)),
    Metric("gauge", "flide_checkpoint_tokens", "Their distinct tokens.", ("tier",)),
    Metric("gauge", "flide_wait_seconds", "Predicted wait of a request that comes now."),
    Metric(
        "counter",
        "flide_handovers",
        "Checkpoints given or taken by end.",
        ("way", "end"),
        occasional=True,
    ),
)
# of each process that has routers (`router.request_router`), while they hear from replicas
ROUTER = (
    Metric(
        "gauge",
        "flide_odd_replicas",
        "Replicas whose bits are not their fleet's.",
        occasional=True,
    ),
)
AUTOSCALER = (
    Metric(
        "counter",
        "flide_autoscaling_decisions",
        "Changes of how many engine replicas there should be.",
        ("application", "direction", "reason"),
        occasional=True,
    ),
    Metric(
        "gauge",
        "flide_autoscaling_need_replicas",
        "Replicas that each kind of demand asks for.",
        ("application", "reason"),
        occasional=True,
    ),
)

METRICS = {m.name: m for m in (*GATEWAY, *STAGES, *REPLICA, *ROUTER, *AUTOSCALER)}


COUNTED_WITHIN_S = 1.0
"""How long counts are added up here: an increment costs Ray as much as rendering a question."""


Counts = defaultdict[tuple[str, tuple[tuple[str, str], ...]], float]
"""By name and labels."""


class _Metrics:
    """Some of the metrics, made in this process. Of one event loop, where there is one."""

    def __init__(self, *declared: Metric, tenant_names: Mapping[str, str] | None = None) -> None:
        """tenant_names: names of tenants by the hash of their key."""
        self._names = dict(list((tenant_names or {}).items())[:MOST_TENANTS])
        self._of = {metric.name: metric.make() for metric in declared}
        self._counted = Counts(float)

    def tenant(self, tenant: str) -> str:
        """The label of a tenant: the name that `tenant_names` or the file of keys gives it, for as
        many as may have one.
        """
        if tenant in self._names:
            return self._names[tenant]
        # what has no name goes by its key's hash
        if not tenant or is_hash(tenant) or len(self._names) >= MOST_TENANTS:
            return "other"
        self._names[tenant] = tenant
        return tenant

    def count(self) -> None:
        """Hands on what has been added up."""
        counted, self._counted = self._counted, Counts(float)
        for (name, labels), value in counted.items():
            self._of[name].inc(value, dict(labels))

    def _add(self, name: str, value: float, labels: dict[str, str]) -> None:
        if value <= 0:  # Ray refuses to count nothing
            return
        if not self._counted:
            loop = asyncio._get_running_loop()
            if loop is None:
                self._of[name].inc(value, labels)
                return
            loop.call_later(COUNTED_WITHIN_S, self.count)
        self._counted[name, tuple(labels.items())] += value

    def _spent(self, stage: str, seconds: float) -> None:
        labels = {"stage": stage}
        # a histogram of Ray takes no zero
        self._of["flide_stage_seconds"].observe(max(seconds, 1e-9), labels)
        self._add("flide_stage_spent_seconds", seconds, labels)


class GatewayMetrics(_Metrics):
    """One Gateway's metrics: an `Observer` of its trips."""

    def __init__(self, tenant_names: Mapping[str, str]) -> None:
        """tenant_names: names of tenants by the hash of their key."""
        super().__init__(*GATEWAY, *STAGES, tenant_names=tenant_names)

    def ended(self, trip: Trip) -> None:
        """Counts a request, and if it was answered its stages."""
        labels = {"outcome": trip.outcome, "tenant": self.tenant(trip.tenant), "via": trip.via}
        self._add("flide_gateway_requests", 1, labels)
        if trip.outcome == ANSWERED:
            for stage, seconds in trip.stages.items():
                self._spent(stage, seconds)


class ReplicaMetrics(_Metrics):
    """One engine replica's metrics. Its methods must be cheap: requests wait for them."""

    def __init__(self, tenant_names: Mapping[str, str]) -> None:
        """tenant_names: names of tenants by the hash of their key."""
        super().__init__(*STAGES, *REPLICA, tenant_names=tenant_names)
        self._seen: dict[str, float] = {}

    def routed(self, reason: str, retry: bool = False) -> None:
        """A request came; reason: its router's, or "" if none of ours sent it."""
        if reason in REASONS:
            self._add("flide_routed", 1, {"reason": reason})
        if retry:
            self._add("flide_retries", 1, {})

    def answered(self, response: DecisionResponse, tenant: str) -> None:
        """A request was answered."""
        label = {"tenant": self.tenant(tenant)}
        self._add("flide_requests", 1, {"outcome": ANSWERED, **label})
        self._add("flide_questions", len(response.answers), label)
        self._add("flide_input_tokens", response.usage.input_tokens, label)
        self._add("flide_request_reused_tokens", response.usage.x_reused_tokens, {})
        for stage, ms in response.x_timing.items():
            self._spent(stage, ms / 1000)

    def failed(self, error: BaseException, tenant: str) -> None:
        """A request was not."""
        labels = {"outcome": outcome_of(error), "tenant": self.tenant(tenant)}
        self._add("flide_requests", 1, labels)

    def handed_over(self, way: str, end: str, count: int = 1) -> None:
        """Checkpoints were given or taken; end: as in `deployments.drain.hand_over`."""
        self._add("flide_handovers", count, {"way": way, "end": end})

    def sample(self, engine: Any, wait_s: float) -> None:
        """What an engine has counted so far; called now and then."""
        counters = engine.counters()
        for kind in TOKENS:
            self._count_to("flide_tokens", getattr(counters, kind), {"kind": kind})
        self._count_to("flide_checkpoint_hits", counters.resumed, {})
        self._count_to("flide_rounds", counters.rounds, {})
        self._count_to("flide_busy_seconds", counters.busy_seconds, {})
        gauge = self._of["flide_pool_bytes"]
        for (tier, kind), (held, total) in engine.tier_bytes().items():
            gauge.set(held, {"tier": tier, "kind": kind, "state": "held"})
            gauge.set(total - held, {"tier": tier, "kind": kind, "state": "free"})
        for tier, count in engine.checkpoint_counts().items():
            self._of["flide_checkpoints"].set(count, {"tier": tier})
        for tier, count in engine.distinct_tokens().items():
            self._of["flide_checkpoint_tokens"].set(count, {"tier": tier})
        self._of["flide_wait_seconds"].set(wait_s, {})

    def _count_to(self, name: str, total: float, labels: dict[str, str]) -> None:
        """Raises a counter to a total that something else has counted."""
        key = name + repr(labels)
        self._add(name, total - self._seen.get(key, 0.0), labels)
        self._seen[key] = total


class AutoscalerMetrics(_Metrics):
    """What the autoscaling policy of one deployment tells, from Serve's controller."""

    def __init__(self) -> None:
        super().__init__(*AUTOSCALER)

    def needs(self, application: str, needs: Mapping[str, float]) -> None:
        """Replicas that are needed, by reason."""
        for reason, need in needs.items():
            labels = {"application": application, "reason": reason}
            self._of["flide_autoscaling_need_replicas"].set(need, labels)

    def decided(self, application: str, change: int, reason: str) -> None:
        """The number of replicas that there should be has changed by so many."""
        direction = "up" if change > 0 else "down"
        labels = {"application": application, "direction": direction, "reason": reason}
        self._of["flide_autoscaling_decisions"].inc(1, labels)
