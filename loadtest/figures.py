"""The figures of a report, each drawn from the runs' JSON."""

from collections.abc import Callable, Sequence
from functools import partial
from html import escape
from typing import Any

from loadtest.plots import Axis, Line, bars, chart, legend, linear, logarithmic
from loadtest.stats import Run

PERCENTILES = ("p50", "p90", "p99")


def figures(names: Sequence[str], runs: Sequence[Run]) -> list[str]:
    """Figures that the runs have data for."""
    made = [_against_load(names, runs, unit) for unit in ("requests/s", "clients")]
    made += [
        _distribution(names, runs),
        _latency_over_time(names, runs),
        _throughput(names, runs),
        _tokens(names, runs),
        _replicas(names, runs),
        _stages(names, runs),
        _errors(names, runs),
    ]
    return [figure for figure in made if figure]


def _figure(title: str, lines: Sequence[Line], x: Axis, y: Axis, labels: tuple[str, str]) -> str:
    drawn = chart(title, lines, x, y, labels)
    return f"<figure><figcaption>{escape(title)}</figcaption>{legend(lines)}{drawn}</figure>"


def _colour(run: int, runs: int, line: int) -> int:
    """By run when several are compared, by line when there is one."""
    return run if runs > 1 else line


def _label(name: str, runs: int, line: str) -> str:
    return f"{name}, {line}" if runs > 1 else line


def _against_load(names: Sequence[str], runs: Sequence[Run], unit: str) -> str:
    lines = []
    for i, (name, run) in enumerate(zip(names, runs, strict=True)):
        levels = [lv for lv in run["levels"] if lv["unit"] == unit and lv["latency_ms"]["count"]]
        for j, key in enumerate(PERCENTILES):
            # what came due, not what was asked of chance
            load = "due_per_s" if unit == "requests/s" else "offered"
            points = sorted((lv[load], lv["latency_ms"][key]) for lv in levels)
            if points:
                at = _label(name, len(runs), key)
                lines.append(Line(at, points, _colour(i, len(runs), j), j))
    loads = {x for line in lines for x, _ in line.points}
    if len(loads) < 2:
        return ""
    x_axis = logarithmic(list(loads)) if max(loads) / min(loads) > 20 else linear(list(loads))
    y_axis = logarithmic([y for line in lines for _, y in line.points])
    title = f"Latency against offered load, {unit}"
    return _figure(title, lines, x_axis, y_axis, (f"offered load, {unit}", "ms"))


def _distribution(names: Sequence[str], runs: Sequence[Run]) -> str:
    lines = []
    for i, (name, run) in enumerate(zip(names, runs, strict=True)):
        for j, level in enumerate(run["levels"]):
            values = level["distribution_ms"]
            if values:
                at = _label(name, len(runs), f"{level['offered']:g} {level['unit']}")
                points = [(ms, k) for k, ms in enumerate(values)]
                lines.append(Line(at, points, _colour(i, len(runs), j), j % 4))
    if not lines:
        return ""
    x_axis = logarithmic([x for line in lines for x, _ in line.points])
    title = "Share of requests answered within a time"
    return _figure(title, lines, x_axis, linear([100.0]), ("ms", "% of requests"))


def _over_time(run: Run, key: str, scale: float = 1.0) -> list[tuple[float, float]]:
    data = run["series"]
    values = data["usage"].get(key) or data.get(key) or []
    return [(t, v * scale) for t, v in zip(data["t"], values, strict=False) if v is not None]


def _time_figure(
    title: str,
    lines: Sequence[Line],
    label: str,
    runs: Sequence[Run],
    y: Callable[[Sequence[float]], Axis] = linear,
) -> str:
    shown = [line for line in lines if line.points]
    if not shown:
        return ""
    ends = [t + run["series"]["bin_s"] for run in runs for t in run["series"]["t"]]
    values = [y for line in shown for _, y in line.points]
    return _figure(title, shown, linear(ends), y(values), ("seconds", label))


def _latency_over_time(names: Sequence[str], runs: Sequence[Run]) -> str:
    lines = [
        Line(_label(name, len(runs), key), _over_time(run, key), _colour(i, len(runs), j), j)
        for i, (name, run) in enumerate(zip(names, runs, strict=True))
        for j, key in enumerate(("p50", "p99"))
    ]
    title = "Latency by when requests were due"
    return _time_figure(title, lines, "ms", runs, logarithmic)


def _throughput(names: Sequence[str], runs: Sequence[Run]) -> str:
    lines = []
    for i, (name, run) in enumerate(zip(names, runs, strict=True)):
        per_s = 1 / run["series"]["bin_s"]
        for j, key in enumerate(("answered", "due", "errors")):
            points = _over_time(run, key, per_s)
            if key == "errors" and not any(y for _, y in points):
                continue
            colour = _colour(i, len(runs), j)
            lines.append(Line(_label(name, len(runs), key), points, colour, j, step=True))
    return _time_figure("Requests a second", lines, "requests/s", runs)


def _tokens(names: Sequence[str], runs: Sequence[Run]) -> str:
    lines = []
    for i, (name, run) in enumerate(zip(names, runs, strict=True)):
        per_s = 1 / run["series"]["bin_s"]
        for j, key in enumerate(run["series"]["usage"]):
            points = _over_time(run, key, per_s)
            label = _label(name, len(runs), key.removeprefix("x_").replace("_", " "))
            lines.append(Line(label, points, _colour(i, len(runs), j), j % 4, step=True))
    return _time_figure("Tokens a second, as the answers count them", lines, "tokens/s", runs)


def _replicas(names: Sequence[str], runs: Sequence[Run]) -> str:
    lines = [
        Line(name, [(t, n) for t, n in run["replicas"]], i, step=True)
        for i, (name, run) in enumerate(zip(names, runs, strict=True))
    ]
    counts = partial(linear, least_step=1.0)
    return _time_figure("Engine replicas running", lines, "replicas", runs, counts)


def _bars(title: str, rows: Sequence[tuple[str, float, int]], unit: str) -> str:
    if not rows:
        return ""
    drawn = bars(title, rows, unit)
    return f"<figure><figcaption>{escape(title)}</figcaption>{drawn}</figure>"


def _stages(names: Sequence[str], runs: Sequence[Run]) -> str:
    rows = []
    for i, (name, run) in enumerate(zip(names, runs, strict=True)):
        for stage, seen in run["totals"]["stages"].items():
            mean: Any = seen["sum_ms"] / seen["count"]
            rows.append((_label(name, len(runs), stage), mean, i))
    return _bars("Mean time by stage, as the answers say", rows, "ms")


def _errors(names: Sequence[str], runs: Sequence[Run]) -> str:
    rows = [
        (_label(name, len(runs), kind), count, i)
        for i, (name, run) in enumerate(zip(names, runs, strict=True))
        for kind, count in run["totals"]["errors"].items()
    ]
    return _bars("Errors by kind", rows, "")
