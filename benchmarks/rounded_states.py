"""What bfloat16 states beyond the device cost: `python -m benchmarks.rounded_states --data DIR`.

Agent trajectories through the embedded model: after every step the state leaves the device, and the
next step resumes from the host's copy, so that errors add up as they would. Each step's answers are
compared with those of an engine that never gives a state up. A difference of logits is that of the
log odds of a yes/no answer, and of the centred log probabilities of a choice.
"""

import argparse
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.results_file import Row, stamp, write
from flide_engine import Engine, EngineConfig

RUNS, STEPS = 25, 8
HOST = 1 << 30


def probabilities(answer: Any) -> NDArray[np.float64]:
    """Of an answer's options."""
    if answer.type == "noul":
        return np.array([answer.noul, 1 - answer.noul], np.float64)
    return np.array(list(answer.probabilities.values()), np.float64)


def logits(chances: NDArray[np.float64]) -> NDArray[np.float64]:
    """What they are the softmax of, but for a constant: of two options their difference."""
    logs = np.log(chances)
    return np.asarray(logs[:1] - logs[1:] if len(logs) == 2 else logs - logs.mean())


def leave_device(engine: Engine) -> None:
    """Copies every checkpoint to the host and takes it off the device."""

    def leave() -> None:
        kept, tiers = engine._checkpoints, engine._tiers
        assert tiers is not None
        kept.copy_some(1 << 60)
        tiers.settle(copies=True)
        for checkpoint in list(kept.index):
            kept.free(kept.index.remove(checkpoint))

    engine._loop.call(leave)


def trajectories(path: Path) -> list[list[dict[str, Any]]]:
    """Requests of each run's first steps, in order."""
    found = []
    with gzip.open(path, "rt") as lines:
        for line, _ in zip(lines, range(RUNS), strict=False):
            state, requests = "", []
            for step in json.loads(line)["steps"][:STEPS]:
                state += step["append"]
                questions = {
                    f"q{i}": {k: q[k] for k in ("type", "instructions", "criteria") if k in q}
                    for i, q in enumerate(step["questions"])
                    if q["type"] != "score"
                }
                requests.append({"state": state, "questions": questions})
            found.append(requests)
    return found


def differences(runs: list[list[dict[str, Any]]], dtype: str) -> Row:
    """Of all answers but those of first steps, which nothing is resumed for."""
    exact = Engine(EngineConfig())
    tiered = Engine(EngineConfig.model_validate({"host_bytes": HOST, "tier_state_dtype": dtype}))
    by_logit, by_probability = [], []
    try:
        for requests in runs:
            for i, request in enumerate(requests):
                want, got = exact.decide(request), tiered.decide(request)
                leave_device(tiered)
                if not i:
                    continue
                for name in want.answers:
                    a, b = (probabilities(r.answers[name]) for r in (want, got))
                    by_logit.append(float(np.abs(logits(a) - logits(b)).max()))
                    by_probability.append(float(np.abs(a - b).max()))
        back = tiered.counters().from_host
    finally:
        exact.close()
        tiered.close()
    return {
        "engine": "ours", "shape": "embedded", "mode": dtype, "work": "agent_trajectories",
        "answers": len(by_logit), "tokens_from_host": back,
        "logit_median": float(np.median(by_logit)), "logit_p99": float(np.quantile(by_logit, 0.99)),
        "logit_largest": max(by_logit), "probability_largest": max(by_probability),
    }  # fmt: skip


def main() -> None:
    """Writes benchmarks/results/rounded_states.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of workload files")
    args = parser.parse_args()
    runs = trajectories(args.data / "agent_trajectories.jsonl.gz")
    rows = [differences(runs, dtype) for dtype in ("float32", "bfloat16")]
    for row in rows:
        print(row)
    print("written to", write("rounded_states", stamp(rows), ("work", "mode")))


if __name__ == "__main__":
    main()
