"""What is counted as what, and what the dashboard and the alerts say of it; no cluster."""

import asyncio
import json
import re
from collections import Counter
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from deployments import metrics
from deployments.autoscaling import FleetPolicy
from deployments.metrics import METRICS, TOKENS, GatewayMetrics, Metric, ReplicaMetrics
from deployments.observability.dashboard import FILE, dashboard
from flide_engine import DecisionResponse, Usage
from flide_engine.errors import Overloaded
from router.http_errors import STATUS
from router.observed import Trip
from tests.promql import Rule

ALERTS = FILE.with_name("alerts.yaml").read_text()
USED = re.compile(r"\bray_flide_\w+")
SERIES = ("_bucket", "_sum", "_count")


def declared() -> set[str]:
    """Series names that the declarations come to."""
    names = set()
    for metric in METRICS.values():
        ends = SERIES if metric.kind == "histogram" else ("",)
        names |= {metric.exported + end for end in ends}
    return names


def test_the_dashboard_is_what_the_code_draws_and_uses_metrics_that_exist() -> None:
    """grafana.json and alerts.yaml."""
    assert json.loads(FILE.read_text()) == dashboard()
    for text in (FILE.read_text(), ALERTS):
        assert set(USED.findall(text)) <= declared()


def test_no_alert_is_of_a_pool_that_is_full() -> None:
    """Every warm one is: checkpoints go where a round lacks room, and not before. That states were
    given up which were asked about again is what costs.
    """
    rules = yaml.safe_load(ALERTS)["groups"][0]["rules"]
    told = {rule["alert"]: rule["expr"] for rule in rules}
    assert not [name for name, expr in told.items() if "pool_bytes" in expr]
    kinds = re.findall(r'tokens_total\{kind="(\w+)"\}', told["FlideForgets"])
    assert kinds == ["recomputed", "asked"]
    assert set(kinds) <= set(TOKENS)


def rule(name: str) -> str:
    """An alert's expression."""
    rules = yaml.safe_load(ALERTS)["groups"][0]["rules"]
    return str(next(rule["expr"] for rule in rules if rule["alert"] == name))


def test_errors_of_ours_are_those_with_a_status_of_ours() -> None:
    """5xx, and what nobody foresaw."""
    found = re.search(r'outcome=~"([\w|]+)"', rule("FlideErrors"))
    assert found
    ours = {error.__name__ for error, status in STATUS.items() if status >= 500}
    assert set(found[1].split("|")) == ours | {"internal"}


def scraped(*steps: tuple[int, float | None]) -> list[tuple[float, float | None]]:
    """Samples each 15 s until 12,000 s. steps: (second, value from then on); None: gone."""
    return [
        (float(t), value)
        for (begin, value), (end, _) in pairwise([*steps, (12_000, None)])
        for t in range(begin, end if value is not None else begin + 1, 15)
    ]


def test_replicas_that_die_are_told_the_first_time_too() -> None:
    """Retries are counted by who took them over, in a series that begins there. That one goes with
    its replica, which must neither alarm nor hide the next death.
    """
    known = scraped((1000, 40.0), (5000, 43.0), (8000, None))
    series = {("app", "a"): known, ("app", "b"): scraped((8310, 5.0)), ("other", "c"): []}
    die = Rule(rule("FlideReplicasDie"), series)
    fires = {t for t in range(0, 12_000, 30) if die.at(t)}
    # until each has been there for 15 minutes
    assert fires == {
        t
        for t in range(0, 12_000, 30)
        if any(begin <= t < begin + 900 for begin in (1000, 5000, 8310))
    }
    assert set(die.at(1100)) == {("app",)}


class Told:
    """Stands in for a metric of Ray's: what it was told, by its labels."""

    def __init__(self, metric: Metric, into: dict[str, Counter[str]]) -> None:
        self._declared, self._values = metric, into.setdefault(metric.name, Counter())

    def _key(self, labels: dict[str, str]) -> str:
        assert set(labels) == set(self._declared.labels)
        return " ".join(labels[name] for name in self._declared.labels)

    def inc(self, value: float, labels: dict[str, str]) -> None:
        assert value > 0  # or Ray raises
        self._values[self._key(labels)] += value  # type: ignore[assignment]

    def observe(self, value: float, labels: dict[str, str]) -> None:
        assert value > 0
        self._values[self._key(labels)] += 1

    def set(self, value: float, labels: dict[str, str]) -> None:
        self._values[self._key(labels)] = value  # type: ignore[assignment]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> dict[str, Counter[str]]:
    """What metrics made during the test are told, by name and labels."""
    into: dict[str, Counter[str]] = {}
    monkeypatch.setattr(Metric, "make", lambda metric: Told(metric, into))
    return into


def test_gateways_count_by_outcome_and_tenant(told: dict[str, Counter[str]]) -> None:
    """Names that are configured, of a hundred tenants at most; stages of answers only."""
    metrics = GatewayMetrics({f"{i:064x}": f"tenant-{i}" for i in range(60)})
    named = [f"{59:064x}", *(f"in-file-{i}" for i in range(45))]
    nameless = [f"{99:064x}", ""]
    for tenant in [*named, *nameless]:
        trip = Trip()
        trip.tenant, trip.outcome, trip.stages = tenant, "answered", {"read": 0.0, "call": 0.25}
        metrics.ended(trip)
    trip = Trip("handle")
    trip.outcome = "cancelled"
    metrics.ended(trip)
    kept = ["tenant-59", *named[1:41]]
    assert told["flide_gateway_requests"] == {
        **{f"answered {name} http": 1 for name in kept},
        "answered other http": 5 + 2,
        "cancelled other handle": 1,
    }
    assert told["flide_stage_seconds"] == {"read": 48, "call": 48}
    assert told["flide_stage_spent_seconds"] == {"call": 12.0}


def test_replicas_count_what_reaches_them(told: dict[str, Counter[str]]) -> None:
    """Outcomes, why they were sent, retries; junk for a reason is not believed."""
    metrics = ReplicaMetrics({"hash": "acme"})
    usage = Usage(input_tokens=7, output_tokens=0, x_reused_tokens=3)
    timing = {"queue": 2.5, "device": 0.0}
    answer = DecisionResponse(model="m", usage=usage, answers={}, x_timing=timing)
    metrics.answered(answer, "hash")
    metrics.failed(Overloaded(1, "requests", 1, "max_waiting_requests", 5), "hash")
    metrics.failed(ZeroDivisionError(), "")
    for reason, retry in (("home", False), ("spilled", True), ("", False), ("junk", False)):
        metrics.routed(reason, retry)
    assert told["flide_requests"] == {"answered acme": 1, "Overloaded acme": 1, "internal other": 1}
    assert told["flide_input_tokens"] == {"acme": 7}
    assert told["flide_request_reused_tokens"] == {"": 3}
    assert told["flide_stage_spent_seconds"] == {"queue": 0.0025}
    assert told["flide_routed"] == {"home": 1, "spilled": 1}
    assert told["flide_retries"] == {"": 1}


def test_counts_on_an_event_loop_are_handed_on_together(
    told: dict[str, Counter[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a moment, and at the end at once: none is lost, none comes twice."""
    monkeypatch.setattr(metrics, "COUNTED_WITHIN_S", 0.01)
    seen: list[float] = []

    async def counted(rounds: int) -> None:
        replica = ReplicaMetrics({})
        for _ in range(rounds):
            for _ in range(3):
                replica.routed("home", retry=True)
            seen.append(sum(told["flide_routed"].values()))
            await asyncio.sleep(0.05)
            seen.append(sum(told["flide_routed"].values()))
        replica.routed("home")
        replica.count()
        replica.count()

    asyncio.run(counted(2))
    assert seen == [0, 3, 3, 6]
    assert sum(told["flide_routed"].values()) == 7
    assert sum(told["flide_retries"].values()) == 6


def context(target: int, **metrics: float) -> Any:
    """What Serve hands the policy of one replica."""
    return SimpleNamespace(
        app_name="app", target_num_replicas=target, current_num_replicas=1, total_num_requests=1,
        aggregated_metrics={name: {"r": value} for name, value in metrics.items()},
    )  # fmt: skip


def test_autoscaling_decisions_count_when_they_take_effect(told: dict[str, Counter[str]]) -> None:
    """Once each, with the reason for which they were asked for; changes by others are said so."""
    policy = FleetPolicy(agents_per_replica=1)
    for _ in range(3):  # Serve's delay: asked for several times
        assert policy(context(1, busy=0.35, agents=2.0))[0] == 2
    needs = {"app load": 0.5, "app wait": 0.0, "app refused": 0.0, "app agents": 2.0}
    assert told["flide_autoscaling_need_replicas"] == pytest.approx(needs)
    assert told["flide_autoscaling_decisions"] == {}
    policy(context(2, busy=0.35, agents=2.0))
    policy(context(2, busy=2.8))
    policy(context(4, busy=0.1))
    policy(context(1, busy=0.1))
    policy(context(5, busy=0.1))
    assert told["flide_autoscaling_decisions"] == {
        "app up agents": 1,
        "app up load": 1,
        "app down load": 1,
        "app up not ours": 1,
    }


def test_a_fleet_that_is_woken_is_counted(told: dict[str, Counter[str]]) -> None:
    """Serve wakes it without asking the policy; that it sleeps again is the policy's doing."""
    policy = FleetPolicy()
    policy(replace(context(0), current_num_replicas=0, total_num_requests=0))
    policy(context(1, agents=1.0))
    policy(replace(context(1, agents=0.0), total_num_requests=0))
    policy(replace(context(0), current_num_replicas=0, total_num_requests=0))
    assert told["flide_autoscaling_decisions"] == {"app up waking": 1, "app down agents": 1}


def replace(made: Any, **fields: float) -> Any:
    """The same with other fields."""
    return SimpleNamespace(**{**vars(made), **fields})


def test_a_policy_that_cannot_tell_still_decides(
    told: dict[str, Counter[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stops trying."""
    tries: list[Metric] = []

    def broken(metric: Metric) -> Any:
        tries.append(metric)
        raise OSError

    monkeypatch.setattr(Metric, "make", broken)
    policy = FleetPolicy(agents_per_replica=1)
    assert [policy(context(1, agents=2.0))[0] for _ in range(3)] == [2, 2, 2]
    assert len(tries) == 1
