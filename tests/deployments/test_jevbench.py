"""Coherence without gold labels, by a suite that nobody here wrote (minutes: mark `slow`)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deployments.conftest import Served

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1800)]


def test_batching_never_changes_a_verdict(served: Served, tmp_path: Path) -> None:
    """BAT (batch isolation) is 100 and no request is refused; the other dimensions are printed.

    A uniform answerer scores REP 100, BAT 100 and 89.4 overall, so those say nothing by themselves.
    """
    out = tmp_path / "report.json"
    done = subprocess.run(
        [
            str(Path(sys.executable).parent / "jevbench"), "eval",
            "--url", f"{served.url}/v1/systemone", "--model", "jev-latest",
            "--suite", "jevbench-mini", "--concurrency", "8", "--out", str(out),
        ],
        cwd=tmp_path, capture_output=True, text=True, timeout=1700, check=False,
    )  # fmt: skip
    print(done.stdout[-3000:])
    assert done.returncode == 0, done.stdout + done.stderr
    scores = json.loads(out.read_text())["scores"]
    assert scores["pillars"]["BAT"] == 1.0
    assert scores["incomplete"] == []
    assert scores["skipped_outcomes"] == 0
