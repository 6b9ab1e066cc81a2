"""Plots drawn from result files: `python -m benchmarks.plots` writes them beside those.

`--check` only says whether any would change.
"""

import io
import json
import sys
from collections.abc import Callable
from typing import Any

from benchmarks.results_file import RESULTS
from benchmarks.shapes import WORKLOADS

Rows = list[dict[str, Any]]

BARS = {
    "floor": ("products alone", "#9aa5b1"),
    "flide": ("flide 0.1.4", "#e07b39"),
    "ours": ("ours", "#2a7ab0"),
}
SHAPE = "0.8B"


def _value(row: dict[str, Any] | None) -> float | None:
    """What a bar shows: p50 of single requests; of the floor, which has none, its replay."""
    if row is None:
        return None
    value = row.get("replay_ms") if row["engine"] == "floor" else row.get("p50_ms")
    return None if value is None else float(value)


def engine(rows: Rows) -> str:
    """Median milliseconds of single requests by workload, as SVG."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mine = [r for r in rows if r["shape"] == SHAPE and r.get("loop") == "single"]
    found = {(r["work"], r["engine"]): r for r in mine if r["mode"] == "default"}
    works = [work for work in WORKLOADS if (work, "ours") in found]
    with mpl.rc_context({"svg.hashsalt": "engine", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(7.2, 3.4))
        axes = figure.subplots()
        width = 0.8 / len(BARS)
        for i, (name, (label, colour)) in enumerate(BARS.items()):
            values = [_value(found.get((work, name))) for work in works]
            there = [(at, value) for at, value in enumerate(values) if value is not None]
            if not there:
                continue
            places = [at + (i - 1) * width for at, _ in there]
            bars = axes.bar(places, [v for _, v in there], width, label=label, color=colour)
            axes.bar_label(bars, fmt="%.3g", fontsize=6, rotation=90, padding=2)
        axes.set_yscale("log")
        axes.margins(y=0.15)
        axes.set_xticks(range(len(works)), works, rotation=25, ha="right")
        axes.set_ylabel("ms, median")
        card = next((r["card"] for r in mine), "")
        axes.set_title(f"One request, {SHAPE} shape, {card}: lower is better", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
        figure.subplots_adjust(left=0.08, right=0.99, top=0.92, bottom=0.2)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


PLOTS: dict[str, Callable[[Rows], str]] = {"engine": engine}
"""By the name of the result file, which is the plot's too."""


def drawn(name: str) -> str:
    """A plot of what its result file holds now."""
    return PLOTS[name](json.loads((RESULTS / f"{name}.json").read_text()))


def main() -> None:
    """Writes the plots, or with `--check` exits with 1 if one is out of date."""
    for name in PLOTS:
        path, now = RESULTS / f"{name}.svg", drawn(name)
        if "--check" in sys.argv and (not path.is_file() or path.read_text() != now):
            sys.exit(f"{path.name} differs from its result file")
        path.write_text(now)


if __name__ == "__main__":
    main()
