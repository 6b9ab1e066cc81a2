"""The exporter of spans without what it needs."""

import sys
import tomllib

import pytest

from deployments.tracing import otlp
from tests.deployments.conftest import ROOT


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the extra `tracing` has it: this project itself is on no index."""
    module = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match="pip install") as told:
        otlp()
    name = str(told.value).rpartition(" ")[2]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (needed,) = extras["optional-dependencies"]["tracing"]
    assert needed.startswith(f"{name}>=")
