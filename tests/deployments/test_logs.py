"""The engine's lines in Serve's log, and how a deployment's logs are set; no cluster."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from ray.serve.context import _RequestContext, _serve_request_context

from deployments import logs
from deployments.app import build
from deployments.config import AppArgs
from deployments.local import parse_args

LIBRARY = "a_library"


class Kept(logging.Handler):
    """Keeps records."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kept]:
    """What reaches the handler of Serve's logger, with Serve's own filter before it."""
    from ray.serve._private.logging_utils import ServeContextFilter

    handler = Kept()
    handler.addFilter(ServeContextFilter())
    monkeypatch.setattr(logs.SERVE, "handlers", [handler])
    level = logs.SERVE.level
    logs.SERVE.setLevel(logging.INFO)
    yield handler
    logs.SERVE.setLevel(level)
    logging.getLogger(LIBRARY).handlers.clear()


def test_a_library_joins_once_and_has_the_request_id(kept: Kept) -> None:
    """At Serve's level, also when that changes, and when Serve changes its handlers."""
    logs.join(LIBRARY)
    logs.join(LIBRARY)
    log = logging.getLogger(f"{LIBRARY}.module")
    token = _serve_request_context.set(_RequestContext(request_id="id 1"))  # type: ignore[arg-type]
    try:
        log.info("a line of %s", "it")
        log.debug("not this")
    finally:
        _serve_request_context.reset(token)
    logs.SERVE.setLevel(logging.ERROR)
    log.info("nor this")
    (record,) = kept.records
    assert record.getMessage() == "a line of it"
    assert record.request_id == "id 1"  # type: ignore[attr-defined]
    other = Kept()
    logs.SERVE.handlers[:] = [other]
    log.error("to the new one")
    assert len(other.records) == len(kept.records) == 1


def configs(**options: Any) -> list[Any]:
    """Serve's `logging_config` of both deployments of an app."""
    gateway: Any = build(AppArgs(**options))
    (engine, *_) = gateway._bound_deployment.init_args
    deployments = (gateway._bound_deployment, engine._bound_deployment)
    return [d._deployment_config.logging_config for d in deployments]


def test_logs_are_as_serve_has_them_unless_set() -> None:
    """By the names that Serve gives them."""
    assert configs() == [None, None]
    for config in configs(log_encoding="JSON"):
        assert config["encoding"] == "JSON"
        assert config["log_level"] == "INFO"
    assert [c["log_level"] for c in configs(log_level="DEBUG")] == ["DEBUG", "DEBUG"]
    with pytest.raises(SystemExit, match="log_encoding: Input should be 'TEXT' or 'JSON'"):
        parse_args(["log_encoding=XML"])
