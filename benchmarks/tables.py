"""README tables drawn from result files: `python -m benchmarks.tables` rewrites them in place.

A table stands between `<!-- results: NAME -->` and `<!-- end -->`; `--check` only says whether any
would change.
"""

import json
import re
import sys
from collections.abc import Callable
from typing import Any

from benchmarks import load
from benchmarks.fleet import tables as fleet
from benchmarks.results_file import RESULTS

ROOT = RESULTS.parents[1]
FILES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))

Rows = list[dict[str, Any]]

HEAD_LINES = 2
"""Lines of a table without rows."""


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _whole(row: dict[str, Any]) -> bool:
    """Whether a closed loop's latencies are those of all it asked. Rows without `timed` left out
    what was answered after the loop's end: where that was much, the median is far below the mean,
    which is the number of clients over the rate. One client can lose one request only.
    """
    if "timed" in row or row["clients"] == 1:
        return True
    return bool(row["p50_ms"] * row["rps"] >= 900 * row["clients"])


def _loop(row: dict[str, Any], *keys: str) -> list[float | None]:
    """Latencies of a closed loop; None where they are not known."""
    return [row.get(key) if _whole(row) else None for key in keys]


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
        "| shape | workload | products alone | flide 0.1.4, GPU | ours, GPU | flide, p50"
        " | ours, p50 |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    alone = [r for r in rows if r.get("loop") == "single" and r["mode"] == "default"]
    for shape, work in dict.fromkeys((r["shape"], r["work"]) for r in alone):
        of = {r["engine"]: r for r in alone if (r["shape"], r["work"]) == (shape, work)}
        cells = [_number(of.get(e, {}).get("replay_ms"), 2) for e in ("floor", "flide", "ours")]
        cells += [_number(of.get(e, {}).get("p50_ms"), 2) for e in ("flide", "ours")]
        lines.append(f"| {shape} | {work} | {' | '.join(cells)} |")
    return lines


def engine_modes(rows: Rows) -> list[str]:
    """What deterministic mode costs: milliseconds of both modes of each engine."""
    lines = [
        "| shape | workload | ours, GPU | deterministic | flide, GPU | batch-invariant | ours, p50"
        " | deterministic | flide, p50 | batch-invariant |",
        f"|---|---|{'---:|' * 8}",
    ]
    alone = {
        (r["shape"], r["work"], r["engine"], r["mode"]): r
        for r in rows
        if r.get("loop") == "single" and r["mode"] in {"default", "deterministic"}
    }
    both = dict.fromkeys(k[:2] for k in alone if k[2:] == ("ours", "deterministic"))
    for shape, work in both:
        cells = [
            _number(alone.get((shape, work, engine, mode), {}).get(key), 2)
            for key in ("replay_ms", "p50_ms")
            for engine in ("ours", "flide")
            for mode in ("default", "deterministic")
        ]
        lines.append(f"| {shape} | {work} | {' | '.join(cells)} |")
    return lines


SIDES = {
    ("ours", "deterministic"): "ours",
    ("ours", "default"): "ours, deterministic=false",
    ("flide", "deterministic"): "flide 0.1.4, batch-invariant",
}


def deterministic(rows: Rows) -> list[str]:
    """Comparisons of label logits, bit by bit."""
    lines = [
        "| shape | engine | questions compared | of them resumed | differ from the prompt alone"
        " | largest | differ from the request alone | processes that differ |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        counts = [f"{row[key]:,}" for key in ("compared", "resumed", "differing")]
        company = f"{row['in_company']:,}" if "in_company" in row else "-"
        others = "-"
        if "replicas" in row:
            others = f"{row['replicas_differing']} of {row['replicas']}"
        head = (row["shape"], SIDES[row["engine"], row["mode"]])
        cells = [*head, *counts, f"{row['largest']:.2g}", company, others]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def deterministic_paths(rows: Rows) -> list[str]:
    """By which paths the compared answers came; a question counts under each that it took."""
    sides = {
        (row["shape"], SIDES[row["engine"], row["mode"]]): row for row in rows if "by_path" in row
    }
    heads = [f"{shape}, {side}" for shape, side in sides]
    lines = [f"| path | {' | '.join(heads)} |", f"|---|{'---:|' * len(heads)}"]
    for path in sorted({path for row in sides.values() for path in row["by_path"]}):
        cells = []
        for row in sides.values():
            wrong, count = row["wrong"].get(path, 0), row["by_path"].get(path)
            cells.append("-" if count is None else f"{wrong:,} of {count:,}")
        lines.append(f"| {path} | {' | '.join(cells)} |")
    return lines


def engine_loops(rows: Rows) -> list[str]:
    """Closed loops on a GPU."""
    lines = [
        "| shape | workload | clients | engine | requests/s | p50 ms | p99 ms |",
        "|---|---|---:|---|---:|---:|---:|",
    ]
    for row in (r for r in rows if r.get("loop") == "closed" and r["mode"] == "default"):
        numbers = [_number(n, 1) for n in (row["rps"], *_loop(row, "p50_ms", "p99_ms"))]
        head = (row["shape"], row["work"], str(row["clients"]), row["engine"])
        lines.append(f"| {' | '.join([*head, *numbers])} |")
    return lines


def engine_ablations(rows: Rows) -> list[str]:
    """Our engine without one of its parts: medians of single requests, and rates of 64 clients."""
    modes = {"default": "whole", "no_fork": "no fork", "no_graphs": "no graphs", "padded": "padded"}
    lines = [
        f"| shape | workload | measured | {' | '.join(modes.values())} |",
        f"|---|---|---|{'---:|' * len(modes)}",
    ]
    mine = [r for r in rows if r["engine"] == "ours" and r["mode"] in modes]
    kinds = (("single", 1, "p50_ms", "p50, ms"), ("closed", 64, "rps", "64 clients, requests/s"))
    for loop, clients, key, measured in kinds:
        here = [r for r in mine if r.get("loop") == loop and r["clients"] == clients]
        ablated = [r for r in here if r["mode"] != "default"]
        for shape, work in dict.fromkeys((r["shape"], r["work"]) for r in ablated):
            of = {r["mode"]: r.get(key) for r in here if (r["shape"], r["work"]) == (shape, work)}
            cells = [_number(of.get(mode), 2) for mode in modes]
            lines.append(f"| {shape} | {work} | {measured} | {' | '.join(cells)} |")
    return lines


def fidelity(rows: Rows) -> list[str]:
    """Probabilities of each engine against float32."""
    lines = [
        "| shape | engine | mode | against | questions | top 1 | TV median | TV p99"
        " | flips at 0.5 | at 0.8 | at 0.95 |",
        "|---|---|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in (r for r in rows if r["work"] == "all"):
        head = (row["shape"], row["engine"], row["mode"], row["against"], f"{row['compared']:,}")
        tv = (f"{row['tv_median']:.2g}", f"{row['tv_p99']:.2g}")
        flips = [str(row[f"flips_{name}"]) for name in ("05", "08", "095")]
        cells = [*head, f"{row['top1_agreement']:.2%}", *tv, *flips]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def agents(rows: Rows) -> list[str]:
    """Steps of growing histories."""
    kinds = {
        ("agent_step", 1): ("one agent, p50 ms", "p50_ms", 2),
        ("agent_step", 8): ("8 in one round, p50 ms", "p50_ms", 2),
        ("agent_loop", 32): ("32 in a closed loop, steps/s", "rps", 1),
        ("agent_history", 1): ("1,000 tokens of history more, ms", "ms_per_1000", 3),
        ("agent_bytes", 1): ("left by a step, MB", "bytes_a_step", 1),
    }
    engines = [e for e in ("flide", "ours") if any(r["engine"] == e for r in rows)]
    lines = [f"| shape | measured | {' | '.join(engines)} |", f"|---|---|{'---:|' * len(engines)}"]
    whole = ("agent_history", "agent_bytes", "agent_loop")
    mine = [r for r in rows if r["mode"] == "default"]
    for shape in dict.fromkeys(r["shape"] for r in mine):
        for (work, clients), (measured, key, digits) in kinds.items():
            of = {
                r["engine"]: r[key] / 1e6 if key == "bytes_a_step" else r[key]
                for r in mine
                if (r["shape"], r["work"], r["clients"]) == (shape, work, clients)
                and (work in whole or r["history"] == 8400)
            }
            if of:
                cells = [_number(of.get(engine), digits) for engine in engines]
                lines.append(f"| {shape} | {measured} | {' | '.join(cells)} |")
    return lines


def kernels(rows: Rows) -> list[str]:
    """Operations beside their floors, products in one line."""
    lines = [
        "| shape | workload | operation | calls | us in all | floor, us | floor / time |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    whole = [r for r in rows if r["kernel"] == "all" and r["mode"] == "default"]
    for key in dict.fromkeys((r["shape"], r["work"], r["op"]) for r in whole if r["work"]):
        group = [r for r in whole if (r["shape"], r["work"], r["op"]) == key]
        spent, floor = (sum(r["calls"] * r.get(k, 0.0) for r in group) for k in ("us", "floor_us"))
        calls = sum(r["calls"] for r in group)
        share = _number(floor / spent if floor else None, 2)
        lines.append(f"| {' | '.join(key)} | {calls} | {spent:,.0f} | {floor:,.0f} | {share} |")
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


def rounded_states(rows: Rows) -> list[str]:
    """What states of each type on the host change of answers."""
    lines = [
        "| states on the host | answers | logit, median | p99 | largest | probability, largest |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    keys = ("logit_median", "logit_p99", "logit_largest", "probability_largest")
    for row in rows:
        numbers = [f"{row[key]:.1e}" if row[key] else "0" for key in keys]
        lines.append(f"| {row['mode']} | {row['answers']:,} | {' | '.join(numbers)} |")
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


def serving(rows: Rows) -> list[str]:
    """What each way of asking gives."""
    lines = [
        "| shape | workload | clients | way | p50 ms | p99 ms | requests/s | engine CPU ms"
        " | Gateways' CPU ms | proxy's CPU ms | card |",
        "|---|---|---:|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    for row in sorted(rows, key=lambda r: (r["shape"], r["work"], r["clients"])):
        numbers = [_number(n, 1) for n in (*_loop(row, "p50_ms", "p99_ms"), row["rps"])]
        asked = ("engine", "gateway", row["mode"]) if row["gateways"] else ("engine", "", "")
        numbers += [_number(row.get(f"{part}_cpu_ms"), 2) for part in asked]
        way = f"{row['mode']}, {row['gateways']} Gateways" if row["gateways"] else row["mode"]
        head = (row["shape"], row["work"], str(row["clients"]), way)
        lines.append(f"| {' | '.join([*head, *numbers, row['card']])} |")
    return lines


def serving_stages(rows: Rows) -> list[str]:
    """Where a request's time goes, with many clients."""
    stages = ("decode", "render", "tokenize", "queue", "pack", "device", "finish")
    lines = [
        f"| shape | workload | way | {' | '.join(stages)} | card |",
        f"|---|---|---|{'---:|' * len(stages)}---|",
    ]
    for row in (r for r in rows if r["clients"] == 64):
        spans = [
            " / ".join(_number(n, 2) for n in _loop(row, f"{s}_p50_ms", f"{s}_p99_ms"))
            for s in stages
        ]
        head = (row["shape"], row["work"], row["mode"])
        lines.append(f"| {' | '.join([*head, *spans, row['card']])} |")
    return lines


def soak(rows: Rows) -> list[str]:
    """Soaks and what was wrong."""
    lines = [
        "| shape | through | clients | seconds | asked | answered | refused, left or late | wrong"
        " | largest difference | card |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for row in rows:
        answered = row.get("ended_answered", 0)
        counts = (row["asked"], answered, row["asked"] - answered, row["wrong"] + row["problems"])
        numbers = [f"{row['seconds']:.0f}", *(f"{count:,}" for count in counts)]
        head = (row["shape"], row["mode"], str(row["clients"]))
        off = f"{row['worst_difference']:.1e}"
        lines.append(f"| {' | '.join([*head, *numbers, off, row['card']])} |")
    return lines


TABLES: dict[str, Callable[[Rows], list[str]]] = {
    "tiny_model": tiny_model,
    "engine": engine,
    "engine_loops": engine_loops,
    "engine_modes": engine_modes,
    "deterministic": deterministic,
    "deterministic_paths": deterministic_paths,
    "engine_ablations": engine_ablations,
    "engine_cpu": engine_cpu,
    "fidelity": fidelity,
    "agents": agents,
    "kernels": kernels,
    "checkpoints": checkpoints,
    "rounded_states": rounded_states,
    "simulation": simulation,
    "serving": serving,
    "serving_stages": serving_stages,
    "soak": soak,
    "load": load.table,
    "fleet": fleet.agents,
    "fleet_gpu": fleet.mixed,
    "fleet_drain": fleet.drains,
}


FILE_OF = dict.fromkeys(
    ("engine_loops", "engine_modes", "engine_cpu", "engine_ablations"), "engine"
)
FILE_OF["serving_stages"] = "serving"
FILE_OF |= dict.fromkeys(("fleet_gpu", "fleet_drain"), "fleet")
FILE_OF["deterministic_paths"] = "deterministic"


def redrawn(text: str) -> str:
    """A document with every table drawn anew."""

    def draw(found: re.Match[str]) -> str:
        name = found[1]
        path = RESULTS / f"{FILE_OF.get(name, name)}.json"
        rows = json.loads(path.read_text()) if path.is_file() else []
        lines = TABLES[name](rows)
        if len(lines) == HEAD_LINES:
            lines = ["Not measured yet."]
        return "\n".join([f"<!-- results: {name} -->", *lines, "<!-- end -->"])

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
