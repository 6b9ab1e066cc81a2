"""Result files: one list of flat rows each; the newest run of a command replaces its own rows."""

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"

Row = dict[str, Any]
"""Numbers and words by name; a count by kind is one level deeper."""


def commit() -> str:
    """What the environment variable BENCHMARK_COMMIT says, if it is set (in a copy of a checkout on
    another machine, which may have a git of its own); else the short hash of the checkout, with "+"
    if it has changes, or nothing outside of one.
    """
    if told := os.environ.get("BENCHMARK_COMMIT"):
        return told
    here = Path(__file__).parent
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty=+", "--exclude=*"],
        capture_output=True, text=True, cwd=here, check=False,
    )  # fmt: skip
    return done.stdout.strip()


def card() -> str:
    """Name of the GPU, or of the processor where there is none."""
    import torch

    if torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "cpu"


def stamp(rows: Sequence[Mapping[str, Any]]) -> list[Row]:
    """The rows with date, commit and card in front."""
    head: Row = {"date": datetime.now(UTC).date().isoformat(), "commit": commit(), "card": card()}
    return [{**head, **row} for row in rows]


def write(name: str, rows: Sequence[Row], same: Sequence[str], folder: Path = RESULTS) -> Path:
    """Writes `<name>.json`: old rows that agree with a new one in the fields `same` are dropped."""
    path = folder / f"{name}.json"
    old: list[Row] = json.loads(path.read_text()) if path.is_file() else []
    new = {tuple(row.get(k) for k in same) for row in rows}
    kept = [row for row in old if tuple(row.get(k) for k in same) not in new]
    lines = ",\n".join(json.dumps(row) for row in [*kept, *rows])
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"[\n{lines}\n]\n")
    return path
