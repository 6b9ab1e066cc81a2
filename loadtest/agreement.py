"""Whether a report and the server's own counters say the same of a run.

The server's metrics are scraped before and after it; both sides count every request, warm-up
included. Nobody else may ask the server meanwhile.
"""

import re
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from deployments.metrics import METRICS
from deployments.observability.dashboard import dashboard
from loadtest.driver import TIMEOUT
from router.http_errors import STATUS
from router.observed import ANSWERED, CANCELLED, INTERNAL

PREFIX = "ray_flide_"
GRACE_S = 2.0
"""Waited beyond the period: replicas sample their engine's counters every other second."""

LOOKS = 4
"""How often the server's side is looked at until it agrees: its processes may be late to tell."""

TOLERANCE = 0.01
"""Relative difference of mean times that still agrees."""

GIVEN_UP = "given up"
"""What a request counts as that its client did not wait for, or lost the connection of."""


Counts = defaultdict[str, float]


class Scrape:
    """One look at all endpoints of a cluster's metrics."""

    def __init__(self, texts: Iterable[str], app: str = "default") -> None:
        """texts: in Prometheus' format. app: the Serve application whose series count."""
        self._samples = [
            (sample.name, sample.labels, sample.value)
            for text in texts
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name.startswith(PREFIX) and sample.labels.get("application") == app
        ]

    @property
    def names(self) -> set[str]:
        """Names of the series."""
        return {name for name, _, _ in self._samples}

    def by(self, name: str, label: str = "", **where: str) -> Counts:
        """Values by a label, or in all by "", summed over everything else.

        name: without its prefix. where: labels that must have a value.
        """
        found = Counts(float)
        for have, labels, value in self._samples:
            if have == PREFIX + name and where.items() <= labels.items():
                found[labels.get(label, "")] += value
        return found


def scrape(urls: Iterable[str], app: str = "default") -> Scrape:
    """A look at these endpoints now. Raises OSError if one does not answer."""
    texts = []
    for url in urls:
        with urllib.request.urlopen(url, timeout=60) as answer:
            texts.append(answer.read().decode())
    return Scrape(texts, app)


@dataclass(frozen=True)
class Row:
    """One number on both sides."""

    what: str
    report: float
    server: float
    agrees: bool


class Check:
    """Looks before and after a run, and compares."""

    def __init__(
        self,
        urls: Sequence[str],
        app: str = "default",
        period_s: float = 10.0,
        fresh: bool = False,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Looks for the first time. urls: of every node. period_s: how often Ray's processes export
        what they have counted. fresh: the server has not been asked anything yet; else what it was
        asked before may not be in its metrics for a period.
        """
        self._urls, self._app, self._period_s, self._sleep = urls, app, period_s, sleep
        if not fresh:
            sleep(period_s + GRACE_S)
        self._before = scrape(urls, app)

    def result(self, totals: Mapping[str, Any], transport: str) -> dict[str, Any]:
        """What a run of these totals and the server say, one period after it, as JSON data; while
        they differ, it is looked at again after every further period, a few times.
        """
        for _ in range(LOOKS):
            self._sleep(self._period_s + GRACE_S)
            after = scrape(self._urls, self._app)
            rows = compare(self._before, after, totals, transport)
            missing = sorted(dashboard_names() - after.names - occasional())
            if agrees := all(row.agrees for row in rows) and not missing:
                break
        return {
            "period_s": self._period_s,
            "agrees": agrees,
            "rows": [asdict(row) for row in rows],
            "dashboard": {"found": len(dashboard_names() & after.names), "missing": missing},
        }


def dashboard_names() -> set[str]:
    """Names of all series that the Grafana dashboard draws."""
    return set(re.findall(rf"\b{PREFIX}\w+", str(dashboard())))


def occasional() -> set[str]:
    """Names of series that are absent until what they count has happened."""
    return {metric.exported for metric in METRICS.values() if metric.occasional}


def compare(before: Scrape, after: Scrape, totals: Mapping[str, Any], transport: str) -> list[Row]:
    """Counts, which must be equal, and mean times, to 1%. transport: as in the run."""

    def gained(name: str, label: str = "", **where: str) -> Counts:
        found = after.by(name, label, **where)
        for key, value in before.by(name, label, **where).items():
            found[key] -= value
        return found

    def row(what: str, report: float, server: float) -> Row:
        return Row(what, report, server, report == server)

    ours, theirs = _outcomes(totals), _kinds(gained, transport)
    rows = [row("requests", totals["requests"], sum(theirs.values()))]
    kinds = sorted(kind for kind in {*ours, *theirs} if ours[kind] or theirs[kind])
    rows += [row(kind, ours[kind], theirs[kind]) for kind in kinds]
    usage = totals["usage"]
    rows += [
        row(
            "answered by engines", totals["answered"], gained("requests_total", "outcome")[ANSWERED]
        ),
        row("questions", totals["answers"], gained("questions_total")[""]),
        row("input tokens", usage.get("input_tokens", 0), gained("input_tokens_total")[""]),
        row(
            "reused tokens",
            usage.get("x_reused_tokens", 0),
            gained("request_reused_tokens_total")[""],
        ),
    ]
    counts, spent = (
        gained("stage_seconds_count", "stage"),
        gained("stage_spent_seconds_total", "stage"),
    )
    for stage, seen in totals["stages"].items():
        rows.append(row(f"{stage}, times measured", seen["count"], counts[stage]))
        mean = seen["sum_ms"] / seen["count"]
        theirs_ms = 1000 * spent[stage] / counts[stage] if counts[stage] else 0.0
        near = abs(mean - theirs_ms) <= TOLERANCE * max(mean, theirs_ms)
        rows.append(Row(f"{stage}, mean ms", round(mean, 4), round(theirs_ms, 4), near))
    return rows


def _outcomes(totals: Mapping[str, Any]) -> Counts:
    """Of the report: answers, and errors by kind."""
    found = Counts(float, {ANSWERED: totals["answered"]})
    for kind, count in totals["errors"].items():
        lost = kind == TIMEOUT or kind.startswith("transport ")
        found[GIVEN_UP if lost else kind] += count
    return found


def _kinds(gained: Callable[..., Counts], transport: str) -> Counts:
    """Of the server, in the words of a client: over HTTP it sees a status and a kind of error."""
    if transport == "handle":
        outcomes = gained("requests_total", "outcome")
    else:
        outcomes = gained("gateway_requests_total", "outcome", via="http")
    words = {CANCELLED: GIVEN_UP}
    if transport != "handle":
        words |= {e.__name__: f"{status} {e.error_type}" for e, status in STATUS.items()}
        words[INTERNAL] = "500 internal_error"
    found = Counts(float)
    for outcome, count in outcomes.items():
        found[words.get(outcome, outcome)] += count
    return found
