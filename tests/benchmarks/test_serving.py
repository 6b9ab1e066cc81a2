"""The serving benchmark's own parts: requests of the size they say, a closed loop, rows."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.processes import cpu_seconds, processes, resident_bytes, running_now
from benchmarks.serving import Spans, bodies, in_process, row_of, with_cpu
from benchmarks.shapes import WORKLOADS, tokens_of
from benchmarks.soak import grown
from benchmarks.tables import TABLES
from flide_engine import DecisionResponse, Usage
from flide_engine.families.registry import load_family
from flide_engine.resolve import locate
from flide_engine.wire import from_json
from tests.waiting import PATIENCE_S


@pytest.mark.parametrize("work", ["race1", "race_all", "multirc"])
def test_requests_have_about_the_tokens_of_their_workload(work: str) -> None:
    """And its questions; all of them differ."""
    folder, name = locate("nano")
    family, _ = load_family(folder, name, "", 0)
    made = bodies(work, folder)
    assert len(set(made)) == len(made)
    for body in made[:3]:
        request = from_json(body)
        assert len(request.questions) == WORKLOADS[work][1]
        tokens = family.render(request).input_tokens
        assert 0.85 * tokens_of(work) <= tokens <= 1.15 * tokens_of(work)


@dataclass
class Slow:
    """Answers each request on a thread of its own, once three have come; every answer takes ten
    milliseconds of its clock.
    """

    most: int = 0
    clock: float = 0.0
    three: threading.Event = field(default_factory=threading.Event)
    asked: list[bytes] = field(default_factory=list)
    _now: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def submit(self, body: bytes) -> "Future[DecisionResponse]":
        future: Future[DecisionResponse] = Future()
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
            self.asked.append(body)
            if len(self.asked) == 3:
                self.three.set()

        def answer() -> None:
            self.three.wait(PATIENCE_S)
            with self._lock:
                self._now -= 1
                self.clock += 0.01
            usage = Usage(input_tokens=7, output_tokens=0)
            response = DecisionResponse(model="m", usage=usage, answers={}, x_timing={"queue": 2.0})
            future.set_result(response)

        threading.Thread(target=answer).start()
        return future


def test_a_closed_loop_keeps_its_clients_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many in flight as there are clients, never more, all requests in turn."""
    engine = Slow()
    clock = SimpleNamespace(perf_counter=lambda: engine.clock)
    monkeypatch.setattr("benchmarks.serving.time", clock)
    spans = in_process(engine, [b"a", b"b", b"c"], clients=3, seconds=0.2)
    assert engine.most == 3
    assert len(spans) == len(engine.asked)
    assert set(engine.asked) == {b"a", b"b", b"c"}
    assert all(ms >= 9.999 for _, ms, _ in spans)


def test_a_row_counts_what_is_asked_or_answered_after_the_warm_up() -> None:
    """Percentiles of requests and of stages that were asked then, the rate of those answered then,
    processor time for each request.
    """
    told: dict[str, Any] = {"tokens": 10, "queue": 1.0, "device": 3.0}
    spans = [(0.1 * i, float(i), told) for i in range(1, 21)]
    row = row_of(spans, 2.0, {"mode": "m"}, {"engine": 0.04})
    assert (row["mode"], row["input_tokens"], row["engine_cpu_ms"]) == ("m", 10, 2.0)
    assert row["rps"] == round(18 / 1.8, 1)
    assert (row["timed"], row["p50_ms"], row["p99_ms"]) == (18, 11.0, 19.0)
    assert (row["queue_p50_ms"], row["device_p99_ms"]) == (1.0, 3.0)
    assert "render_p50_ms" not in row


def test_the_longest_are_in_a_row_although_they_end_last() -> None:
    """One answer a second for eight clients in turn: each waits for 8 s, in a loop of 10 s.
    What is cut at the end of a loop would be the longest of them.
    """
    answered = [float(end) for end in range(1, 18)]
    spans = [(end, 1000 * min(end, 8.0), {"tokens": 1}) for end in answered]
    row = row_of(spans, 10.0, {}, {})
    assert (row["timed"], row["p50_ms"], row["p99_ms"]) == (9, 8000.0, 8000.0)
    assert row["rps"] == 1.0
    unlucky = row_of([(9.5, 9500.0, {"tokens": 1})], 10.0, {}, {})
    assert (unlucky["timed"], unlucky["rps"]) == (0, 0.1)
    assert "p50_ms" not in unlucky


def test_a_loop_is_warmed_up_before_its_processor_time_counts() -> None:
    """Those requests are no spans."""
    spent = {"engine": 1.0}

    @contextmanager
    def loop() -> Iterator[Callable[[float], Spans]]:
        spent["engine"] += 5.0

        def run(seconds: float) -> Spans:
            spent["engine"] += seconds
            spent["gateway"] = 0.5
            return [(seconds, 1.0, {})]

        yield run
        spent["engine"] += 7.0

    spans, used = with_cpu(loop(), 2.0, lambda: dict(spent))
    assert (spans, used) == ([(2.0, 1.0, {})], {"engine": 2.0, "gateway": 0.5})


def test_latencies_that_were_cut_are_not_shown() -> None:
    """Of rows from before all that is asked was timed: those whose median is far below the mean
    that clients and rate come to.
    """
    row = {"shape": "s", "work": "w", "mode": "default", "engine": "ours", "loop": "closed"}
    row |= {"gateways": 0, "card": "c", "clients": 64, "rps": 8.6}
    row |= {"p50_ms": 2219.4, "p99_ms": 3976.3, "queue_p50_ms": 1500.0, "queue_p99_ms": 3000.0}
    right = row | {"p50_ms": 7441.9}
    since = row | {"timed": 80}
    one = row | {"clients": 1}

    def last(table: str, row: dict[str, Any]) -> str:
        return TABLES[table]([row])[-1]

    assert "| 8.6 | - | - |" in last("engine_loops", row)
    assert "| - | - | 8.6 |" in last("serving", row)
    assert "1500" not in last("serving_stages", row)
    for good in (right, since, one):
        assert "3976.3" in last("engine_loops", good)
        assert "3976.3" in last("serving", good)
    assert "1500.00 / 3000.00" in last("serving_stages", since)


def test_this_process_is_seen() -> None:
    """Its memory and time; one that is gone counts nothing; others are left out."""
    assert resident_bytes() > 10 << 20
    assert cpu_seconds(1 << 30) == resident_bytes(1 << 30) == 0
    assert not any(processes(running_now()).values())


def test_growth_is_told() -> None:
    """Beyond a twentieth."""
    assert grown({"a": 100 << 20}, {"a": 105 << 20}) == []
    assert grown({"a": 100 << 20}, {"a": 106 << 20}) == ["a grew from 100 to 106 MiB"]
