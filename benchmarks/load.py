"""Rows of load tests: `python -m benchmarks.load 0.8B ours=FOLDER flide=FOLDER`.

Each folder is what `python -m loadtest --workload all --out FOLDER` has left, or as much of it as
there is when it is cut short: a folder with a run.json for each workload. Run it on the machine of
the tests, whose card the rows name. Writes benchmarks/results/load.json.
"""

import argparse
import json
import sys
from pathlib import Path

from benchmarks.results_file import RESULTS, Row, stamp, write
from loadtest.output import read_run
from loadtest.stats import Run

SAME = ("engine", "shape", "mode", "work", "unit", "offered", "records", "card")


def rows_of(run: Run, engine: str, shape: str, mode: str) -> list[Row]:
    """A row for each level of a run. Rates of tokens are those of answers within the level."""
    rows: list[Row] = []
    for level in run["levels"]:
        ms, usage = level["latency_ms"], level["usage_per_s"]
        asked = usage.get("input_tokens", 0.0)
        rows.append(
            {
                "engine": engine,
                "shape": shape,
                "mode": mode,
                "work": run["workload"],
                "unit": level["unit"],
                "offered": level["offered"],
                "seconds": level["seconds"] - run["warmup_s"],
                "think_s": run["think_s"],
                "records": run["records"],
                "transport": run["transport"],
                "requests": level["requests"],
                "answered": level["answered"],
                "errors": level["errors"],
                "answered_per_s": level["answered_per_s"],
                "questions_per_s": level["questions_per_s"],
                "input_tokens_per_s": asked,
                "reuse_share": _share(usage.get("x_reused_tokens"), asked),
                **{f"{share}_ms": ms.get(share) for share in ("p50", "p90", "p99")},
                "client_late_p99_ms": level["lag_ms"].get("p99"),
            }
        )
    return rows


def _share(part: float | None, whole: float) -> float | None:
    return None if part is None or not whole else round(part / whole, 4)


def runs_in(folder: Path) -> list[Run]:
    """The runs of a folder and of those in it. Raises ValueError if there is none."""
    found = sorted([*folder.glob("run.json"), *folder.glob("*/run.json")])
    if not found:
        raise ValueError(f"{folder} has no run.json, nor has a folder in it")
    return [read_run(path) for path in found]


def table(rows: list[Row]) -> list[str]:
    """Engines side by side, by workload and load; for `benchmarks.tables`."""
    lines = [
        "| shape | workload | offered | server | answered/s | questions/s | p50 ms | p99 ms"
        " | tokens reused | errors | card |",
        "|---|---|---|---|---:|---:|---:|---:|---:|---:|---|",
    ]

    def cell(value: float | None, digits: int) -> str:
        return "-" if value is None else f"{value:,.{digits}f}"

    order = {key: i for i, key in enumerate(dict.fromkeys(_place(row) for row in rows))}
    for row in sorted(rows, key=lambda row: order[_place(row)]):
        server = row["engine"] + ("" if row["mode"] == "default" else f", {row['mode']}")
        work = row["work"] + ", synthetic" * (row["records"] == "synthetic")
        head = (row["shape"], work, f"{row['offered']:g} {row['unit']}", server)
        keys = ("answered_per_s", "questions_per_s", "p50_ms", "p99_ms")
        numbers = [cell(row[key], 1) for key in keys] + [cell(row["reuse_share"], 2)]
        errors = str(sum(row["errors"].values()))
        lines.append(f"| {' | '.join([*head, *numbers, errors, row['card']])} |")
    return lines


def _place(row: Row) -> tuple[object, ...]:
    return tuple(row[key] for key in ("card", "shape", "work", "unit", "offered"))


def main() -> None:
    """Writes the rows of what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", help="of the model that was asked")
    parser.add_argument("folders", nargs="+", metavar="ENGINE=FOLDER", help="ENGINE:MODE=, too")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    rows: list[Row] = []
    for word in args.folders:
        name, equals, folder = word.partition("=")
        if not equals:
            sys.exit(f"{word!r} is not of the form ENGINE=FOLDER")
        engine, _, mode = name.partition(":")
        try:
            for run in runs_in(Path(folder)):
                rows += rows_of(run, engine, args.shape, mode or "default")
        except (ValueError, OSError) as error:
            print(error, file=sys.stderr)  # what the others have left is kept
    for row in rows:
        print(json.dumps(row))
    if rows:
        print("written to", write("load", stamp(rows), SAME, args.out))
    else:
        sys.exit("no rows")


if __name__ == "__main__":
    main()
