"""Exporters of spans, by import path in Serve's `tracing_config` or
`RAY_SERVE_TRACING_EXPORTER_IMPORT_PATH`.
"""

from opentelemetry.sdk.trace import SpanProcessor
from opentelemetry.sdk.trace.export import BatchSpanProcessor


def otlp() -> list[SpanProcessor]:
    """Spans to a collector by OTLP over HTTP, as the `OTEL_EXPORTER_OTLP_*` variables say.

    Raises ImportError, saying what to install, without the extra `tracing`.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        needed = "spans by OTLP need: pip install opentelemetry-exporter-otlp-proto-http"
        raise ImportError(needed) from error
    return [BatchSpanProcessor(OTLPSpanExporter())]
