"""Accuracy of the embedded model on held-out workloads.

`python -m benchmarks.tiny_model --data DIR`: every question goes through the engine as a caller's
would. By default a seeded sample of at most 80,000 tokens a file; `--full` takes every record. A
trajectory is asked at its last step, and with `--full` at three more.
"""

import argparse
import gzip
import json
import random
import sys
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.results_file import Row, stamp, write
from flide_engine import DecisionResponse, Engine, EngineConfig

SAMPLE_TOKENS = 80_000
SEED = 0
IN_FLIGHT = 128

# Accuracy, or AUC, of a bag-of-words dual encoder trained on the same data in three minutes.
FLOORS = {
    ("banking77", "choice"): 0.830,
    ("clinc150", "choice"): 0.778,
    ("hwu64", "choice"): 0.789,
    ("snips", "choice"): 0.982,
    ("dialogue_multi", "choice"): 0.745,
    ("dialogue_multi", "noul"): 0.918,
    ("guard", "noul"): 0.594,
    ("tool_choice", "choice"): 0.424,
    ("tool_choice", "noul"): 0.571,
    ("boolq_like", "noul"): 0.571,
    ("race_like", "choice"): 0.292,
}


@dataclass
class Tally:
    """Answers of one kind of question from one source."""

    hits: int = 0
    asked: int = 0
    chance: float = 0.0
    scores: list[tuple[float, bool]] = field(default_factory=list)

    def add(self, question: dict[str, Any], answer: Any) -> None:
        """One answer beside its label."""
        self.asked += 1
        if question["type"] == "noul":
            self.scores.append((answer.noul, question["label"]))
            self.hits += (answer.noul > 0.5) == question["label"]
            return
        names = list(question["criteria"])
        p = list(answer.probabilities.values())
        self.hits += names[p.index(max(p))] == question["label"]
        self.chance += 1 / len(names)

    def auc(self) -> float | None:
        """Probability that a yes scores above a no, ties counting half; None without both."""
        ranked = sorted(self.scores)
        yes = sum(label for _, label in ranked)
        if not yes or yes == len(ranked):
            return None
        total, at = 0.0, 0
        while at < len(ranked):
            end = at
            while end < len(ranked) and ranked[end][0] == ranked[at][0]:
                end += 1
            total += sum(label for _, label in ranked[at:end]) * (at + end + 1) / 2
            at = end
        return (total - yes * (yes + 1) / 2) / (yes * (len(ranked) - yes))


def records(path: Path, full: bool) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """(state, questions with a label) of a workload file, in seeded order."""
    with gzip.open(path, "rt") as lines:
        rows = [json.loads(line) for line in lines]
    rng = random.Random(SEED)
    rng.shuffle(rows)
    for row in rows:
        if "steps" not in row:
            yield row["state"], [q | {"source": row["id"]} for q in row["questions"]]
            continue
        texts = [step["append"] for step in row["steps"]]
        last = len(texts) - 1
        chosen = {last, *(rng.randrange(last) for _ in range(3))} if full else {last}
        for i in sorted(chosen):
            asked = [q | {"source": row["id"]} for q in row["steps"][i]["questions"]]
            yield "".join(texts[: i + 1]), asked


def as_request(state: str, questions: list[dict[str, Any]]) -> dict[str, Any]:
    """A decision request; a score's levels become an array."""
    asked = {}
    for q in questions:
        criteria = q["criteria"]
        if q["type"] == "score":
            criteria = list(criteria.values())
        asked[q["id"]] = {
            "type": q["type"],
            "instructions": q["instructions"],
            "criteria": criteria,
        }
    return {"state": state, "questions": asked}


def source_of(file: str, question: dict[str, Any]) -> str:
    """Intent sets are reported apart, other files whole."""
    return str(question["source"]).split("-")[0] if file == "intent_routing" else file


def evaluate(engine: Engine, path: Path, full: bool) -> tuple[dict[tuple[str, str], Tally], int]:
    """Tallies of a file by (source, type), and the tokens asked."""
    file = path.name.removesuffix(".jsonl.gz")
    tallies: dict[tuple[str, str], Tally] = defaultdict(Tally)
    waiting: deque[tuple[list[dict[str, Any]], Future[DecisionResponse]]] = deque()
    tokens, largest = 0, 0

    def collect() -> int:
        questions, future = waiting.popleft()
        response = future.result()
        for q in questions:
            if q["label"] is not None:
                kind = "noul" if q["type"] == "noul" else "choice"
                tallies[source_of(file, q), kind].add(q, response.answers[q["id"]])
        return response.usage.input_tokens

    for state, questions in records(path, full):
        # a sample stops while one more record of the largest size seen would still fit
        if not full and tokens + (len(waiting) + 1) * largest > SAMPLE_TOKENS:
            break
        waiting.append((questions, engine.submit(as_request(state, questions))))
        if len(waiting) >= (IN_FLIGHT if full else 2):
            asked = collect()
            tokens, largest = tokens + asked, max(largest, asked)
    while waiting:
        tokens += collect()
    return tallies, tokens


def report(tallies: dict[tuple[str, str], Tally], full: bool) -> list[Row]:
    """Result rows, printed as a table's lines."""
    rows: list[Row] = []
    for (source, kind), tally in sorted(tallies.items()):
        auc, chance = tally.auc(), tally.chance / tally.asked if kind == "choice" else None
        floor = FLOORS.get((source, kind))
        rows.append(
            {
                "engine": "ours",
                "mode": "full" if full else "sample",
                "work": source,
                "type": kind,
                "questions": tally.asked,
                "accuracy": round(tally.hits / tally.asked, 4),
                "auc": None if auc is None else round(auc, 4),
                "chance": None if chance is None else round(chance, 4),
                "bag_of_words": floor,
            }
        )
        shown = [
            f"{v:.3f}" if v is not None else "-" for v in (tally.hits / tally.asked, auc, chance)
        ]
        print(f"{source:<20} {kind:<7} {tally.asked:>6} " + " ".join(f"{s:>8}" for s in shown)
              + f" {floor if floor is not None else '-':>8}", flush=True)  # fmt: skip
    return rows


def main() -> None:
    """Evaluates all files of a folder and writes benchmarks/results/tiny_model.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of workload files")
    parser.add_argument("--model", help="weights folder or hub name; none: the embedded model")
    parser.add_argument("--full", action="store_true", help="every record instead of a sample")
    parser.add_argument("--kernels", choices=("auto", "reference", "triton"), default="auto")
    args = parser.parse_args()
    files = sorted(args.data.glob("*.jsonl.gz"))
    if not files:
        sys.exit(f"no *.jsonl.gz in {args.data}")
    engine = Engine(
        EngineConfig(
            model=args.model,
            dtype="float32",
            kernels=args.kernels,
            max_prompt_tokens=65536,
            max_request_tokens=262144,
            max_queued_tokens=1 << 30,
        )
    )
    names = ("workload", "type", "asked", "accuracy", "AUC", "chance", "words")
    print("{:<20} {:<7} {:>6} {:>8} {:>8} {:>8} {:>8}".format(*names))
    rows: list[Row] = []
    began = time.monotonic()
    tokens = 0
    for path in files:
        tallies, asked = evaluate(engine, path, args.full)
        rows += report(tallies, args.full)
        tokens += asked
    seconds = time.monotonic() - began
    print(f"{tokens} tokens in {seconds:.0f} s, {tokens / seconds:.0f} tokens/s")
    engine.close()
    print("written to", write("tiny_model", stamp(rows), ("work", "type", "mode")))


if __name__ == "__main__":
    main()
