"""What a replica tells Prometheus, through Ray's metrics (prefix `ray_`).

Each metric is declared once, in `METRICS`; the dashboard and the alert rules in `observability/`
use these names, which a test holds to a scrape of a running app.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ray.serve import metrics

from flide_engine.api import DecisionResponse
from flide_engine.errors import FlideError

Kind = Literal["counter", "gauge", "histogram"]

STAGE_BOUNDS = [0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0]
"""Seconds: from the stages of a small request on a GPU to a long one on a CPU."""

MOST_TENANTS = 100
"""Tenants with a name of their own in metrics; Prometheus keeps a series for each."""


@dataclass(frozen=True)
class Metric:
    """One metric: its name without Ray's prefix and Prometheus' suffix, help text, labels."""

    kind: Kind
    name: str
    help: str
    labels: tuple[str, ...] = ()

    @property
    def exported(self) -> str:
        """The name that Prometheus sees; of a histogram, what its series begin with."""
        return f"ray_{self.name}" + ("_total" if self.kind == "counter" else "")


METRICS = {
    m.name: m
    for m in (
        Metric("counter", "flide_requests", "Requests by outcome.", ("outcome", "tenant")),
        Metric("counter", "flide_questions", "Questions answered.", ("tenant",)),
        Metric("counter", "flide_input_tokens", "Tokens of answered requests.", ("tenant",)),
        Metric("counter", "flide_request_reused_tokens", "Of those, saved by a checkpoint.", ()),
        Metric("histogram", "flide_stage_seconds", "Time of answered requests.", ("stage",)),
        Metric("counter", "flide_tokens", "Tokens of rounds by what became of them.", ("kind",)),
        Metric("counter", "flide_rounds", "Rounds run."),
        Metric("counter", "flide_busy_seconds", "Seconds in which a round was under way."),
        Metric("gauge", "flide_pool_bytes", "Bytes for states.", ("tier", "kind", "state")),
        Metric("gauge", "flide_checkpoints", "Checkpoints by tier.", ("tier",)),
        Metric("gauge", "flide_checkpoint_tokens", "Their distinct tokens.", ("tier",)),
        Metric("counter", "flide_handovers", "Checkpoints given or taken by end.", ("way", "end")),
        # of each process that has routers, not of replicas (`router.request_router`)
        Metric("gauge", "flide_odd_replicas", "Replicas whose bits are not their fleet's."),
        Metric("gauge", "flide_wait_seconds", "Predicted wait of a request that comes now."),
    )
}


class ReplicaMetrics:
    """One replica's metrics. Its methods must be cheap: they are called for every request."""

    def __init__(self, tenant_names: Mapping[str, str]) -> None:
        """tenant_names: names of keys' tenants that have one. Those of `api_keys` go by their own,
        all others are "other".
        """
        self._names = dict(list(tenant_names.items())[:MOST_TENANTS])
        self._of: dict[str, Any] = {}
        for metric in METRICS.values():
            if metric.kind == "counter":
                made: Any = metrics.Counter(metric.name, metric.help, metric.labels)
            elif metric.kind == "gauge":
                made = metrics.Gauge(metric.name, metric.help, metric.labels)
            else:
                made = metrics.Histogram(metric.name, metric.help, STAGE_BOUNDS, metric.labels)
            self._of[metric.name] = made
        self._seen: dict[str, float] = {}

    def tenant(self, tenant: str) -> str:
        """The label of a tenant: its name, while there are not too many."""
        # shorter than the hash that an unnamed key's tenant goes by
        if 0 < len(tenant) < 64 and len(self._names) < MOST_TENANTS:
            self._names.setdefault(tenant, tenant)
        return self._names.get(tenant, "other")

    def answered(self, response: DecisionResponse, tenant: str) -> None:
        """A request was answered."""
        label = {"tenant": self.tenant(tenant)}
        self._of["flide_requests"].inc(1, {"outcome": "answered", **label})
        self._add("flide_questions", len(response.answers), label)
        self._add("flide_input_tokens", response.usage.input_tokens, label)
        self._add("flide_request_reused_tokens", response.usage.x_reused_tokens, {})
        for stage, ms in response.x_timing.items():
            # a histogram of Ray takes no zero
            self._of["flide_stage_seconds"].observe(max(ms / 1000, 1e-9), {"stage": stage})

    def failed(self, error: BaseException, tenant: str) -> None:
        """A request was not: `cancelled`, or the class of its error."""
        outcome = type(error).__name__ if isinstance(error, FlideError) else "cancelled"
        self._of["flide_requests"].inc(1, {"outcome": outcome, "tenant": self.tenant(tenant)})

    def handed_over(self, way: str, end: str, count: int = 1) -> None:
        """Checkpoints were given or taken; end: as in `deployments.drain.hand_over`."""
        self._add("flide_handovers", count, {"way": way, "end": end})

    def sample(self, engine: Any, wait_s: float) -> None:
        """What an engine has counted so far; called now and then."""
        counters = engine.counters()
        for kind in ("asked", "reused", "computed", "recomputed", "from_host", "from_disk"):
            self._count_to("flide_tokens", getattr(counters, kind), {"kind": kind})
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

    def _add(self, name: str, value: float, labels: dict[str, str]) -> None:
        if value > 0:  # Ray refuses to count nothing
            self._of[name].inc(value, labels)

    def _count_to(self, name: str, total: float, labels: dict[str, str]) -> None:
        """Raises a counter to a total that something else has counted."""
        key = name + repr(labels)
        self._add(name, total - self._seen.get(key, 0.0), labels)
        self._seen[key] = total
