"""The fidelity benchmark finds what it is there to find."""

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import fidelity
from benchmarks.engines.ours import Ours, start
from benchmarks.engines.transformers import Transformers
from benchmarks.requests import request, text_works
from benchmarks.shapes import LABELS, WORKLOADS


def logits_of(engine: Any, works: dict[str, int]) -> fidelity.Logits:
    """Of request 0 of each workload, its first so many questions."""
    return {
        (work, 0): np.array(engine.logits(work, [0], most)["logits"][0])
        for work, most in works.items()
    }


def test_engines_are_held_to_transformers(weights: Path, ours: Ours) -> None:
    """float32 agrees to rounding, bfloat16 does not; label rows leave room for flips."""
    works = {"race_all": 4, "multirc": 12, "short36x9": 24}
    truth = logits_of(Transformers(str(weights), None), works)
    plain = start("test", "float32", str(weights), {"dtype": "float32"}, pool_gib=0.25)
    own = fidelity.rows_of({"mode": "float32"}, truth, logits_of(plain, works))[0]
    plain.engine.close()
    assert own["compared"] == 40
    assert own["tv_max"] < 1e-5 < fidelity.FLOAT32_TV
    assert [own[f"flips_{t}"] for t in fidelity.THRESHOLDS] == [0, 0, 0]
    assert own["top_p01"] < 0.5
    assert own["top_p99"] > 0.95
    rounded = fidelity.rows_of({}, truth, logits_of(ours, works))
    assert 1e-4 < rounded[0]["tv_median"] < 0.05
    assert [row["work"] for row in rounded] == ["all", *works]


def test_requests_that_come_together_are_answered_each(ours: Ours) -> None:
    """By request and question, whatever shares the round."""
    together = ours.logits("race_all", [0, 1, 2])["logits"]
    assert np.array(together).shape == (3, 4, len(LABELS))
    alone = ours.logits("race_all", [2])["logits"][0]
    assert np.allclose(together[2], alone, atol=0.3)
    assert not np.allclose(together[1], alone, atol=0.3)


def test_differences_of_two_distributions() -> None:
    """Total variation, the top option, thresholds that see other options."""
    found = fidelity.difference("w", np.array([0.79, 0.21]), np.array([0.81, 0.19]))
    assert found.tv == pytest.approx(0.02)
    assert (found.agrees, found.flips, found.top) == (True, (False, True, False), 0.79)
    assert found.near == (False, True, False)
    swapped = fidelity.difference("w", np.array([0.51, 0.49]), np.array([0.49, 0.51]))
    assert (swapped.agrees, swapped.flips) == (False, (True, False, False))


def test_a_value_that_is_not_finite_is_an_error() -> None:
    """It never counts as a difference."""
    good = {("race1", 0): np.zeros((1, len(LABELS)))}
    bad = {("race1", 0): np.full((1, len(LABELS)), np.nan)}
    with pytest.raises(ValueError, match="race1, request 0"):
        fidelity.differences(good, bad)


def test_a_run_that_means_nothing_is_told() -> None:
    """A float32 path that is off, too few questions, probabilities near no threshold."""
    good = {
        "engine": "ours", "work": "all", "mode": "float32", "against": "transformers",
        "compared": 300, "tv_max": 1e-6, "top_p01": 0.3, "top_p99": 0.99,
    }  # fmt: skip
    assert fidelity.faults([good], whole=True) == []
    for changes in (
        {"tv_max": 2e-3},
        {"tv_max": float("nan")},
        {"compared": 299},
        {"top_p99": 0.9},
        {"top_p01": 0.4},
    ):
        assert len(fidelity.faults([good | changes], whole=True)) == 1, changes
    assert fidelity.faults([good | {"compared": 10, "top_p99": 0.9}], whole=False) == []


def test_amounts_are_enough() -> None:
    """300 questions for transformers and 2,000 in all, from the workloads of random ids alone."""
    held = sum(min(WORKLOADS[w][1], a.questions) * a.held for w, a in fidelity.AMOUNTS.items())
    every = sum(WORKLOADS[w][1] * a.requests for w, a in fidelity.AMOUNTS.items())
    assert held >= fidelity.LEAST["transformers"]
    assert every >= fidelity.LEAST["float32"]
    assert list(fidelity.AMOUNTS) == list(WORKLOADS)


def test_no_prompt_holds_a_label() -> None:
    """Their rows are scaled: as tokens they would be other tokens than the rest."""
    for work in WORKLOADS:
        assert not any(np.isin(p, LABELS).any() for p in request(work, 0).prompts)


def test_texts_become_requests(tmp_path: Path) -> None:
    """A record, and a trajectory as it is halfway; every prompt begins with the state."""
    question = {"instructions": "Who?", "criteria": {"a": "one", "b": "two"}}
    yes_no = {"instructions": "Is it?", "criteria": None}
    records = {
        "plain": {"state": "The box was open.", "questions": [question, yes_no]},
        "grows": {
            "steps": [{"append": f"Step {i}. ", "questions": [yes_no]} for i in range(5)]
        },
    }  # fmt: skip
    for name, record in records.items():
        with gzip.open(tmp_path / f"{name}.jsonl.gz", "wt") as file:
            file.write(json.dumps(record) + "\n")
    assert text_works(tmp_path) == ["text:grows", "text:plain"]
    plain = request("text:plain", 7, tmp_path)
    assert len(plain.prompts) == 2
    assert (plain.prompts[0][: plain.state] == plain.prompts[1][: plain.state]).all()
    assert len(request("text:plain", 7, tmp_path, most=1).prompts) == 1
    records["plain"]["state"] = "Step 0. Step 1. Step 2. "
    with gzip.open(tmp_path / "halfway.jsonl.gz", "wt") as file:
        file.write(json.dumps(records["plain"]) + "\n")
    grown, whole = (request(f"text:{name}", 0, tmp_path) for name in ("grows", "halfway"))
    assert grown.state == whole.state
    assert (grown.prompts[0] == whole.prompts[1]).all()
    with pytest.raises(ValueError, match="folder of texts"):
        request("text:plain", 0)


@pytest.mark.slow
def test_processes_from_weights_to_rows(weights: Path, tmp_path: Path) -> None:
    """The commands as they are run on a GPU, at the test shape."""
    common = [
        "test",
        "--weights",
        str(weights.parent),
        "--out",
        str(tmp_path),
        "--pool-gib",
        "0.25",
    ]
    for module, more in {
        "fidelity": ["--scale", "0.05", "--works", "race1", "race_all"],
        "engine": ["--works", "race1", "--passes", "1", "--times", "1", "--clients", "2",
                   "--seconds", "0.5", "--ablations", "--check", "race1"],
    }.items():  # fmt: skip
        command = [sys.executable, "-m", f"benchmarks.{module}", *common, *more]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    held = json.loads((tmp_path / "fidelity.json").read_text())
    seen = {(r["engine"], r["mode"], r["against"]) for r in held if r["work"] == "all"}
    assert seen == {
        ("ours", "float32", "transformers"), ("ours", "default", "transformers"),
        ("ours", "default", "float32"),
    }  # fmt: skip
    rows = json.loads((tmp_path / "engine.json").read_text())
    single = {(r["engine"], r["mode"]) for r in rows if r["loop"] == "single"}
    assert single >= {("floor", "default"), ("ours", "default"), ("ours", "no_fork")}
    assert {r["mode"] for r in rows if r["loop"] == "closed"} >= {"default", "no_graphs", "padded"}
