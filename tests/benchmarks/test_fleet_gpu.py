"""`python -m benchmarks.fleet_gpu` as a whole, on a CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SMALL = "--gpus 2 --clients 3 --seconds 3 --agents 6 --steps 6"


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_command_measures_every_part(tmp_path: Path) -> None:
    """One replica and two; two lose one and get it back, then hand over to one."""
    out = tmp_path / "rows.json"
    command = [sys.executable, "-m", "benchmarks.fleet_gpu", "--device", "cpu", "--model", "nano"]
    done = subprocess.run(
        [*command, *SMALL.split(), "--out", str(out)],
        # HAProxy would listen on all interfaces
        cwd=ROOT, env=os.environ | {"RAY_SERVE_ENABLE_HA_PROXY": "0"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows: list[dict[str, Any]] = json.loads(out.read_text())
    works = {(row["work"], row["replicas"], row.get("way")) for row in rows}
    ways = {("mixed", count, way) for count in (1, 2) for way in ("handle", "http")}
    replays = {("trajectory_replay", count, None) for count in (1, 2)}
    assert works >= ways | replays | {("kill", 2, None), ("drain", 2, None)}
    assert all(row.get("failed", 0) == row.get("changed", 0) == 0 for row in rows)
    of = {row["work"]: row for row in rows}
    assert of["trajectory_replay"]["hash_p50_ms"] > 0
    assert of["trajectory_replay"]["choose_p50_ms"] > 0
    assert of["kill"]["kills"] == 1
    assert of["kill"]["answered_by_new"] > 0
    assert of["drain"]["states_moved"] > 0
    assert of["drain"]["share_saved"] >= 0.9
