"""Logs of a deployment's replicas: Serve's own, which the engine's join."""

import logging
from typing import Any

from ray.serve.schema import LoggingConfig

SERVE = logging.getLogger("ray.serve")
"""Serve gives its handlers the files, the format, and the id of the request at hand."""


class _ToServe(logging.Handler):
    """Hands records to Serve's logger, whatever handlers it has by then."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= SERVE.getEffectiveLevel():
            SERVE.handle(record)


def join(name: str = "flide_engine") -> None:
    """From now on what this library logs stands in this replica's log."""
    logger = logging.getLogger(name)
    if not any(isinstance(handler, _ToServe) for handler in logger.handlers):
        logger.addHandler(_ToServe())
    logger.propagate = False
    logger.setLevel(SERVE.getEffectiveLevel())


def options(encoding: str | None, level: str | None) -> dict[str, Any]:
    """Serve's `logging_config` of a deployment; empty where all is as the cluster has it."""
    given = {"encoding": encoding, "log_level": level}
    chosen = {name: value for name, value in given.items() if value is not None}
    return {"logging_config": LoggingConfig(**chosen).model_dump()} if chosen else {}
