"""Tables of results/fleet.json, for `benchmarks.tables`. Imports no Ray."""

from typing import Any

Rows = list[dict[str, Any]]


def _cell(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def agents(rows: Rows) -> list[str]:
    """Agents' trajectories against real fleets."""
    lines = [
        "| what | shape | size | policy | replicas | requests | failed | changed"
        " | computed / one engine's | busiest replica's work | lost by hand-over, tokens | card |",
        "|---|---|---|---|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    names = {"trajectory_replay": "replay", "kill": "{} killed", "scale_1_3_1": "1 to 3 to 1"}
    for row in (r for r in rows if r["work"] in names):
        what = names[row["work"]].format(row.get("killed"))
        on = f" on {row['gpus']} GPU" if row.get("gpus") else ""
        size = row["size"] + ", synthetic" * (row.get("records") == "synthetic")
        head = (what, row["shape"], size, row["policy"], f"{row['replicas']}{on}")
        counts = (f"{row['requests']:,}", str(row["failed"]), str(row["changed"]))
        shares = [_cell(row.get(k), 2) for k in ("computed_over_oracle", "max_work_share")]
        cells = (*head, *counts, *shares, _cell(row.get("most_tokens_lost"), 0), row["card"])
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def mixed(rows: Rows) -> list[str]:
    """The mixed workload on fleets of GPUs, closed loops."""
    lines = [
        "| shape | GPUs | replicas | way | clients | requests/s | p50 ms | p99 ms | tokens reused"
        " | GPUs busy | card |",
        "|---|---:|---:|---|---:|---:|---:|---:|---:|---|---|",
    ]
    for row in (r for r in rows if r["work"] == "mixed"):
        head = (row["shape"], row["gpus"], row["replicas"], row["way"], row["clients"])
        numbers = [_cell(row.get(key), 1) for key in ("requests_per_s", "p50_ms", "p99_ms")]
        numbers.append(_cell(row.get("reuse_share"), 2))
        shares = [row.get(f"gpu_busy_{which}") for which in ("least", "most")]
        numbers.append(" to ".join(_cell(share, 2) for share in shares))
        lines.append(f"| {' | '.join([*map(str, head), *numbers, row['card']])} |")
    return lines


def drains(rows: Rows) -> list[str]:
    """What a leaving replica handed over."""
    lines = [
        "| shape | GPUs | replicas before | states moved | tokens not computed again | seconds"
        " | card |",
        "|---|---:|---:|---:|---:|---:|---|",
    ]
    for row in (r for r in rows if r["work"] == "drain"):
        head = (row["shape"], row["gpus"], row["replicas"], row["states_moved"])
        share = "-" if row["share_saved"] is None else f"{row['share_saved']:.1%}"
        cells = [*map(str, head), share, _cell(row["drain_s"], 1), row["card"]]
        lines.append(f"| {' | '.join(cells)} |")
    return lines
