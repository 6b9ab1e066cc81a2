"""Agents against a fleet that loses a node, grows and shrinks: `python -m benchmarks.fleet`, in a
process and a cluster of its own.
"""

import json
import subprocess
import sys
from typing import Any

import pytest

from flide_engine.config import GRAIN
from tests.deployments.conftest import ROOT

# two minutes on two cores, which is a seventh of all other tests together
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

DATA = ROOT.parent / "shared" / "workloads"

Rows = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """By work: three replicas; two, one a node, of which one is killed; one to three to one."""
    out = tmp_path_factory.mktemp("fleet") / "rows.json"
    works = ("replay", "kill-node", "scale")
    command = [sys.executable, "-m", "benchmarks.fleet", *works, "--size", "ci"]
    done = subprocess.run(
        [*command, "--data", str(DATA), "--out", str(out)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return {row["work"]: row for row in json.loads(out.read_text())}


def test_a_fleet_computes_little_more_than_one_replica(rows: Rows) -> None:
    """Half over HTTP and half by handle, without session ids but for a careless caller with one for
    everything; and the work is spread.
    """
    row = rows["trajectory_replay"]
    assert (row["failed"], row["changed"]) == (0, 0)
    assert row["computed_over_oracle"] <= 1.8
    assert row["max_work_share"] <= 0.6


def test_a_node_that_is_killed_costs_nobody_an_answer(rows: Rows) -> None:
    """One of two replicas dies with it, while requests are in it."""
    row = rows["kill"]
    assert (row["killed"], row["kills"]) == ("node", 1)
    assert (row["failed"], row["changed"]) == (0, 0)


def test_a_fleet_that_grows_and_shrinks_hands_its_states_over(rows: Rows) -> None:
    """One to three to one under a burst: a state that was handed over recomputes at most its last
    grain.
    """
    row = rows["scale_1_3_1"]
    assert (row["replicas"], row["failed"], row["changed"]) == (3, 0, 0)
    assert row["handed_over"] >= 1
    assert row["most_tokens_lost"] <= GRAIN
