"""Samples of a run to the run's JSON: every number a report shows is in it."""

import math
import os
import platform
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from loadtest.driver import TIMEOUT, Sample
from loadtest.plan import Level, Plan

FORMAT = 1
SHARES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
Run = dict[str, Any]


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of all values does not exceed (nearest rank).

    Raises ValueError if there are no values.
    """
    if not ordered:
        raise ValueError("no values")
    return ordered[max(1, math.ceil(share * len(ordered) - 1e-9)) - 1]


def spread(values: Iterable[float]) -> dict[str, float | int]:
    """count, mean, percentiles and max of milliseconds, to a microsecond; count alone if empty."""
    ordered = sorted(values)
    if not ordered:
        return {"count": 0}
    found = {name: percentile(ordered, share) for name, share in SHARES.items()}
    mean = math.fsum(ordered) / len(ordered)
    numbers = {"mean": mean, **found, "max": ordered[-1]}
    return {"count": len(ordered), **{name: round(v, 3) for name, v in numbers.items()}}


def summary(
    plan: Plan,
    levels: Sequence[Level],
    name: str,
    transport: str,
    server: Mapping[str, Any],
    replicas: Sequence[tuple[float, int]] = (),
) -> Run:
    """The run as JSON data.

    transport: "http", "handle" or "locust". server: what the server says of itself. replicas:
    (seconds from the start, engine replicas running), where known.
    """
    every = [s for level in levels for s in level.samples]
    return {
        "format": FORMAT,
        "name": name,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "transport": transport,
        "workload": plan.workload,
        "loop": plan.loop,
        "arrivals": plan.shape if plan.loop == "open" else None,
        "seconds": plan.seconds,
        "warmup_s": plan.warmup_s,
        "seed": plan.seed,
        "one_by_one": plan.options.one_by_one,
        "think_s": plan.options.think_s,
        "records": "files" if plan.data.is_dir() else "synthetic",
        "client": {
            "cpus": os.cpu_count(),
            "processor": _processor(),
            "python": platform.python_version(),
        },
        "server": dict(server),
        "totals": totals(every),
        "levels": [_level(plan, level) for level in levels],
        "series": series(levels),
        "replicas": [list(pair) for pair in replicas],
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def totals(samples: Iterable[Sample]) -> dict[str, Any]:
    """Everything that was sent, warm-up included: what a server's own counters should say."""
    errors: Counter[str] = Counter()
    usage: defaultdict[str, float] = defaultdict(float)
    stages: dict[str, dict[str, float]] = {}
    requests = answered = questions = answers = 0
    for sample in samples:
        requests, questions = requests + 1, questions + sample.questions
        if sample.reply.error:
            errors[sample.reply.error] += 1
            continue
        answered, answers = answered + 1, answers + sample.reply.answers
        for name, value in sample.reply.usage.items():
            usage[name] += value
        for stage, ms in sample.reply.stages.items():
            seen = stages.setdefault(stage, {"count": 0, "sum_ms": 0.0})
            seen["count"] += 1
            seen["sum_ms"] += ms
    return {
        "requests": requests,
        "answered": answered,
        "questions": questions,
        "answers": answers,
        "usage": dict(usage),
        "errors": dict(errors.most_common()),
        "stages": stages,
    }


def _level(plan: Plan, level: Level) -> dict[str, Any]:
    """Statistics of one level; warm-up is left out by due time, throughput by answer time."""
    window = plan.level_s - plan.warmup_s
    measured = [s for s in level.samples if s.due >= plan.warmup_s]
    within = [
        s for s in level.samples if plan.warmup_s <= s.done < plan.level_s and not s.reply.error
    ]
    usage: defaultdict[str, float] = defaultdict(float)
    for sample in within:
        for name, value in sample.reply.usage.items():
            usage[name] += value
    return {
        "offered": level.offered,
        "unit": "requests/s" if plan.loop == "open" else "clients",
        "start_s": round(level.start_s, 3),
        "seconds": plan.level_s,
        "due_per_s": round(len(measured) / window, 3),
        "answered_per_s": round(len(within) / window, 3),
        "questions_per_s": round(sum(s.reply.answers for s in within) / window, 3),
        "usage_per_s": {name: round(v / window, 1) for name, v in usage.items()},
        **_part(measured),
        "lag_ms": spread((s.sent - s.due) * 1000 for s in measured),
        "distribution_ms": _distribution(measured),
        "by_work": {
            work: _part([s for s in measured if s.work == work])
            for work in dict.fromkeys(sorted(s.work for s in measured))
        },
    }


def _part(samples: Sequence[Sample]) -> dict[str, Any]:
    """Counts, latency, errors by kind and stages of some samples."""
    by_stage: defaultdict[str, list[float]] = defaultdict(list)
    for sample in samples:
        for stage, ms in sample.reply.stages.items():
            by_stage[stage].append(ms)
    errors = Counter(s.reply.error for s in samples if s.reply.error)
    return {
        "requests": len(samples),
        "answered": sum(not s.reply.error for s in samples),
        "questions": sum(s.questions for s in samples),
        "latency_ms": spread(_latencies(samples)),
        "errors": dict(errors.most_common()),
        "stages_ms": {stage: spread(values) for stage, values in by_stage.items()},
    }


def _latencies(samples: Iterable[Sample]) -> list[float]:
    """Of answers, and of what was given up, at least so late; a refusal's 1 ms would flatter."""
    return [s.latency_ms for s in samples if s.reply.error in ("", TIMEOUT)]


def _distribution(samples: Iterable[Sample]) -> list[float]:
    """Latency at 0%, 1%, ... 100% of requests; empty without any."""
    ordered = sorted(_latencies(samples))
    return [round(percentile(ordered, i / 100), 3) for i in range(101)] if ordered else []


def series(levels: Sequence[Level], most: int = 60) -> dict[str, Any]:
    """The run over time in at most about `most` bins of whole seconds.

    due, answered, errors: counts a bin; p50 and p99 of the latency of what was due in a bin,
    null where nothing was; usage: tokens a bin by name. Warm-up is in it.
    """
    ends = [level.start_s + s.done for level in levels for s in level.samples]
    if not ends:
        return {"bin_s": 1, "t": [], "due": [], "answered": [], "errors": [], "p50": [],
                "p99": [], "usage": {}}  # fmt: skip
    width = max(1, math.ceil(max(ends) / most))
    bins = int(max(ends) // width) + 1
    due, answered, errors = [0] * bins, [0] * bins, [0] * bins
    latencies: list[list[float]] = [[] for _ in range(bins)]
    usage: dict[str, list[float]] = {}
    for level in levels:
        for sample in level.samples:
            asked = int((level.start_s + sample.due) // width)
            done = int((level.start_s + sample.done) // width)
            due[asked] += 1
            (errors if sample.reply.error else answered)[done] += 1
            latencies[asked].extend(_latencies([sample]))
            for name, value in sample.reply.usage.items():
                usage.setdefault(name, [0.0] * bins)[done] += value
    ordered = [sorted(values) for values in latencies]
    return {
        "bin_s": width,
        "t": [i * width for i in range(bins)],
        "due": due,
        "answered": answered,
        "errors": errors,
        "p50": [round(percentile(v, 0.5), 3) if v else None for v in ordered],
        "p99": [round(percentile(v, 0.99), 3) if v else None for v in ordered],
        "usage": usage,
    }
