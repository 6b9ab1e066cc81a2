"""Spans of stages: where they stand, and that there are none where nobody records."""

from contextlib import suppress

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON

from router import tracing
from router.observed import observing
from router.tracing import record_stages

STAGES = {"queue": 0.25, "device": 1.5}


@pytest.fixture(params=[ALWAYS_ON, ALWAYS_OFF], ids=["sampled", "not sampled"])
def provider(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> TracerProvider:
    """OpenTelemetry as this process would have it set up."""
    made = TracerProvider(sampler=request.param)
    monkeypatch.setattr(tracing.trace, "get_tracer", made.get_tracer)
    return made


def test_stages_stand_below_the_span_at_hand(provider: TracerProvider) -> None:
    """One after the other from the beginning, with their attributes; none if it is not sampled."""
    memory = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    with provider.get_tracer("test").start_as_current_span("request") as parent:
        record_stages(10**9, STAGES, {"flide.questions": 2})
    found = [s for s in memory.get_finished_spans() if s.name.startswith("flide.")]
    if provider.sampler is ALWAYS_OFF:
        assert found == []
        return
    assert [(s.name, s.start_time, s.end_time) for s in found] == [
        ("flide.queue", 10**9, 1_250_000_000),
        ("flide.device", 1_250_000_000, 2_750_000_000),
    ]
    for span in found:
        assert span.parent is not None
        assert span.parent.span_id == parent.get_span_context().span_id
        assert dict(span.attributes or {}) == {"flide.questions": 2}


def test_nothing_is_made_without_a_span(provider: TracerProvider) -> None:
    """Tracing off, or OpenTelemetry not there."""
    memory = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    record_stages(10**9, STAGES, {})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracing, "trace", None)
        record_stages(10**9, STAGES, {})
    assert memory.get_finished_spans() == ()
    assert not trace.get_current_span().is_recording()


def test_a_trip_records_its_stages(provider: TracerProvider) -> None:
    """With its outcome, also if it failed; not if it was no decision."""
    memory = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    with provider.get_tracer("test").start_as_current_span("request"):
        with observing(None, "http") as trip:
            trip.passed("read")
        with observing(None, "http") as trip, trip:
            trip.passed("read")
        with suppress(ZeroDivisionError), observing(None, "http") as trip, trip:
            trip.passed("read")
            raise ZeroDivisionError
    found = [s for s in memory.get_finished_spans() if s.name == "flide.read"]
    expected = ["answered", "internal"] if provider.sampler is ALWAYS_ON else []
    assert [dict(s.attributes or {})["flide.outcome"] for s in found] == expected
