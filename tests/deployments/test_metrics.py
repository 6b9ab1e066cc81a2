"""Metrics of a running app, and what the dashboard and the alerts say of them."""

import json
import re
import subprocess
import sys
import time

import httpx
import pytest

from deployments.metrics import METRICS
from deployments.observability.dashboard import FILE, dashboard
from tests.deployments.conftest import Served

ALERTS = FILE.with_name("alerts.yaml").read_text()
USED = re.compile(r"\bray_flide_\w+")
ASK = {"state": "s", "questions": {"q": {"type": "noul", "instructions": "so?"}}}
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


PORT = """
import os
os.environ["RAY_AUTH_MODE"] = "token"
import ray
ray.init(address={address!r}, log_to_driver=False, logging_level="ERROR")
node = ray.nodes()[0]
print("AT", node["NodeManagerAddress"], node["MetricsExportPort"])
"""


@pytest.mark.ray
def test_a_scrape_has_what_is_declared_and_counts_right(
    served: Served, client: httpx.Client
) -> None:
    """After some requests: every name but those of what did not happen, and the right numbers."""
    for _ in range(3):
        client.post("/v1/systemone", json=ASK).raise_for_status()
    code = [sys.executable, "-c", PORT.format(address=served.address)]
    done = subprocess.run(code, capture_output=True, text=True, check=True, timeout=60)
    host, port = re.findall(r"AT (\S+) (\d+)", done.stdout)[0]
    # if nothing was reused, and no replica left
    wanted = declared() - {"ray_flide_request_reused_tokens_total", "ray_flide_handovers_total"}
    for _ in range(120):
        text = httpx.get(f"http://{host}:{port}/metrics", timeout=10).text
        found = set(re.findall(r"^(ray_flide_\w+)\{", text, re.MULTILINE))
        if wanted <= found:
            break
        time.sleep(0.5)
    assert wanted <= found, wanted - found
    counts = re.findall(
        r"^ray_flide_requests_total\{[^}]*outcome=\"answered\"[^}]*\} ([\d.]+)", text, re.MULTILINE
    )
    assert sum(map(float, counts)) >= 3
