"""`python -m benchmarks.fleet_gpu` as a whole, on a CPU."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SMALL = "--gpus 2 --clients 3 --seconds 3 --agents 8 --steps 8"


@pytest.fixture
def fleet_gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The benchmark, without what it tells Ray: that would hold for all tests of this process."""
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "0")  # read when Ray is imported
    before = set(os.environ)
    found = import_module("benchmarks.fleet_gpu")
    for name in set(os.environ) - before - {"RAY_CLIENT_MODE"}:  # which Ray sets itself
        del os.environ[name]
    return found


def test_a_fleet_that_fails_leaves_its_rows_and_the_next_one_its_own(
    fleet_gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are in the file as they come; the command's end says that something went wrong."""
    out = tmp_path / "rows.json"
    words = "--gpus 2 --replicas-per-gpu 2 4 --parts mixed kill --device cpu --model nano"
    monkeypatch.setattr(sys, "argv", ["fleet_gpu", *words.split(), "--out", str(out)])
    args = fleet_gpu.parse()
    run = object.__new__(fleet_gpu.Run)
    run.args, run.rows, run._cuda, run._records = args, [], True, "synthetic"
    run.asked = [SimpleNamespace(app={"gateway_replicas": 1}, size="1 x 1")] * 2  # type: ignore[list-item]
    shares = []

    @contextmanager
    def fleet(nodes: Any, count: int, share: float) -> Iterator[Any]:
        del nodes
        shares.append((count, share))
        yield count

    def loads(fleet: Any, count: int, gpus: int) -> None:
        assert fleet == count
        run._keep({"work": "mixed"}, count, gpus)
        assert [row["replicas"] for row in json.loads(out.read_text())][-1] == count
        if count == 4:
            raise TimeoutError("no fleet")

    def losses(fleet: Any, count: int) -> None:
        assert fleet == count
        run._keep({"work": "kill"}, count, 2)

    for name, stub in (("_fleet", fleet), ("_loads", loads), ("_losses", losses)):
        monkeypatch.setattr(run, name, stub)
    assert not run.all(None)  # type: ignore[arg-type]
    assert shares == [(1, 1.0), (4, 0.5), (8, 0.25)]
    rows = [(r["work"], r["replicas"], r["gpus"]) for r in json.loads(out.read_text())]
    assert rows == [("mixed", 1, 1), ("mixed", 4, 2), ("mixed", 8, 2), ("kill", 8, 2)]


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
