"""Spans of a request's stages, for OpenTelemetry.

Serve itself makes the spans of proxies and replicas and carries their context through handle calls,
once its tracing is on. These stand below the span at hand; where there is none that is recorded,
nothing is made.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

try:
    from opentelemetry import context, propagate, trace
except ImportError:  # it comes with Ray Serve, and tracing is off without it
    trace = None  # type: ignore[assignment]

Attributes = Mapping[str, str | int]


def record_stages(began_ns: int, stages: Mapping[str, float], attributes: Attributes) -> None:
    """A span `flide.<stage>` for each, one after the other.

    began_ns: when the first began, Unix time. stages: seconds by name; a stage that a request went
    through several times is one span of all its time.
    """
    if trace is None or not trace.get_current_span().is_recording():
        return
    tracer, at = trace.get_tracer("flide"), began_ns
    for stage, seconds in stages.items():
        end = at + round(1e9 * seconds)
        span = tracer.start_span(f"flide.{stage}", start_time=at, attributes=attributes)
        span.end(end)
        at = end


def carried() -> dict[str, str]:
    """The span at hand, for another process; empty where none is recorded."""
    told: dict[str, str] = {}
    if trace is not None and trace.get_current_span().is_recording():
        propagate.inject(told)
    return told


@contextmanager
def under(told: Mapping[str, str]) -> Iterator[None]:
    """A block that is a span `flide.replica` below the one that `carried` told of."""
    if trace is None or not told:
        yield
        return
    token = context.attach(propagate.extract(told))
    try:
        with trace.get_tracer("flide").start_as_current_span("flide.replica"):
            yield
    finally:
        context.detach(token)
