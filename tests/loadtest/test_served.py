"""The load generator against the real app: over HTTP, and by handle with worker actors."""

import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.deployments.conftest import Served

pytestmark = pytest.mark.ray

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("way", ["http", "handle"])
def test_real_answers_are_counted(served: Served, tmp_path: Path, way: str) -> None:
    """Every request is answered, tokens are counted, the server and its replica are known."""
    words = ["--host", served.url] if way == "http" else ["--workers", "2"]
    done = subprocess.run(
        [
            sys.executable, "-m", "loadtest", *words, "--cluster", served.address,
            "--out", str(tmp_path), "--workload", "race",
            "--seconds", "4", "--warmup", "1", "--clients", "2",
        ],
        cwd=ROOT, env=os.environ | {"RAY_AUTH_MODE": "token"},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    data = json.loads((tmp_path / "run.json").read_text())
    totals = data["totals"]
    assert totals["requests"] == totals["answered"] == totals["answers"] >= 2
    assert totals["usage"]["output_tokens"] == totals["answers"]
    assert totals["usage"]["input_tokens"] > 100 * totals["requests"]
    assert totals["errors"] == {}
    assert data["transport"] == way
    assert data["server"]["name"] == "flide-tiny"
    assert {n for _, n in data["replicas"]} == {1}


def test_the_playground_is_served_by_the_app(served: Served) -> None:
    """Through Serve, at the root."""
    answer = httpx.get(served.url + "/", timeout=60)
    assert answer.status_code == 200
    assert "<title>Decision playground</title>" in answer.text
    assert answer.headers["content-type"].startswith("text/html")
