"""README tables drawn from result files: `python -m benchmarks.tables` rewrites them in place.

A table stands between `<!-- results: NAME -->` and `<!-- end -->`; `--check` only says whether any
would change.
"""

import json
import re
import sys
from collections.abc import Callable
from typing import Any

from benchmarks.results_file import RESULTS

ROOT = RESULTS.parents[1]
FILES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))

Rows = list[dict[str, Any]]


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def tiny_model(rows: Rows) -> list[str]:
    """Accuracy of the embedded model, from full runs."""
    lines = [
        "| workload | questions | accuracy | AUC | chance | bag of words |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in (r for r in rows if r["mode"] == "full"):
        name = f"{row['work']}, {'yes/no' if row['type'] == 'noul' else 'choice'}"
        numbers = [_number(row[key]) for key in ("accuracy", "auc", "chance", "bag_of_words")]
        lines.append(f"| {name} | {row['questions']:,} | {' | '.join(numbers)} |")
    return lines


def engine(rows: Rows) -> list[str]:
    """One request at a time on a GPU: milliseconds of each engine and of the floor."""
    lines = [
        "| shape | workload | products alone | flide 0.1.4, GPU | ours, GPU | ours, p50 |",
        "|---|---|---:|---:|---:|---:|",
    ]
    alone = [r for r in rows if r.get("loop") == "single" and r["mode"] == "default"]
    for shape, work in dict.fromkeys((r["shape"], r["work"]) for r in alone):
        of = {r["engine"]: r for r in alone if (r["shape"], r["work"]) == (shape, work)}
        cells = [_number(of.get(e, {}).get("replay_ms"), 2) for e in ("floor", "flide", "ours")]
        cells.append(_number(of.get("ours", {}).get("p50_ms"), 2))
        lines.append(f"| {shape} | {work} | {' | '.join(cells)} |")
    return lines


def engine_loops(rows: Rows) -> list[str]:
    """Closed loops on a GPU."""
    lines = [
        "| shape | workload | clients | engine | requests/s | p50 ms | p99 ms |",
        "|---|---|---:|---|---:|---:|---:|",
    ]
    for row in (r for r in rows if r.get("loop") == "closed"):
        numbers = [_number(row[key], 1) for key in ("rps", "p50_ms", "p99_ms")]
        head = (row["shape"], row["work"], str(row["clients"]), row["engine"])
        lines.append(f"| {' | '.join([*head, *numbers])} |")
    return lines


def engine_cpu(rows: Rows) -> list[str]:
    """Whole requests of the embedded model on the reference kernels of a CPU."""
    lines = ["| mode | request | p50 ms | CPU |", "|---|---|---:|---|"]
    for row in (r for r in rows if r["shape"] == "embedded"):
        mode = row["mode"].removeprefix("reference, ")
        lines.append(f"| {mode} | {row['work']} | {row['p50_ms']:.1f} | {row['card']} |")
    return lines


def checkpoints(rows: Rows) -> list[str]:
    """Computed tokens over the oracle's by budget and policy."""
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    lines = [f"| budget, GB | {' | '.join(policies)} |", f"|---:|{'---:|' * len(policies)}"]
    for budget in dict.fromkeys(row["budget_gb"] for row in rows):
        cells = {r["policy"]: r["computed_over_oracle"] for r in rows if r["budget_gb"] == budget}
        lines.append(f"| {budget} | {' | '.join(f'{cells[p]:.2f}' for p in policies)} |")
    return lines


def simulation(rows: Rows) -> list[str]:
    """The largest simulated fleet by policy."""
    lines = [
        "| policy | steps answered | computed / needed tokens | over the oracle's | p50 ms | p99 ms"
        " | work in 60 s, p99 / mean |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    large = [r for r in rows if r["work"] == "1,000 replicas, 40% busy"]
    most = max((r["answered"] for r in large), default=1)
    keys = (
        "computed_over_needed",
        "computed_over_oracle",
        "p50_ms",
        "p99_ms",
        "work_p99_over_mean",
    )
    for row in large:
        numbers = [f"{row['answered'] / most:.0%}", *(_number(row.get(key), 2) for key in keys)]
        lines.append(f"| {row['policy']} | {' | '.join(numbers)} |")
    return lines


TABLES: dict[str, Callable[[Rows], list[str]]] = {
    "tiny_model": tiny_model,
    "engine": engine,
    "engine_loops": engine_loops,
    "engine_cpu": engine_cpu,
    "checkpoints": checkpoints,
    "simulation": simulation,
}


FILE_OF = {"engine_loops": "engine", "engine_cpu": "engine"}


def redrawn(text: str) -> str:
    """A document with every table drawn anew."""

    def draw(found: re.Match[str]) -> str:
        name = found[1]
        rows = json.loads((RESULTS / f"{FILE_OF.get(name, name)}.json").read_text())
        return "\n".join([f"<!-- results: {name} -->", *TABLES[name](rows), "<!-- end -->"])

    return re.sub(r"<!-- results: (\w+) -->.*?<!-- end -->", draw, text, flags=re.DOTALL)


def main() -> None:
    """Rewrites, or with `--check` exits with 1 if a table is out of date."""
    for path in FILES:
        before = path.read_text()
        after = redrawn(before)
        if "--check" in sys.argv and before != after:
            sys.exit(f"{path.name} has a table that differs from its result file")
        path.write_text(after)


if __name__ == "__main__":
    main()
