"""One self-contained page about a run, or comparing several: every number is one of its JSON's."""

import json
from collections.abc import Callable, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from loadtest.figures import figures
from loadtest.plots import number
from loadtest.stats import Run

Cell = str | float | int | None

LEVEL_COLUMNS: tuple[tuple[str, str], ...] = (
    ("due /s", "due_per_s"),
    ("answered /s", "answered_per_s"),
    ("questions /s", "questions_per_s"),
    ("p50 ms", "latency_ms.p50"),
    ("p90 ms", "latency_ms.p90"),
    ("p95 ms", "latency_ms.p95"),
    ("p99 ms", "latency_ms.p99"),
    ("max ms", "latency_ms.max"),
    ("requests", "requests"),
    ("generator late, p99 ms", "lag_ms.p99"),
)
WORK_COLUMNS: tuple[tuple[str, str], ...] = (
    ("requests", "requests"),
    ("questions", "questions"),
    ("mean ms", "latency_ms.mean"),
    ("p50 ms", "latency_ms.p50"),
    ("p90 ms", "latency_ms.p90"),
    ("p99 ms", "latency_ms.p99"),
)
COMPARED = ("answered_per_s", "latency_ms.p50", "latency_ms.p90", "latency_ms.p99")
LATE_MS = 20.0
"""A generator later than this at p99 is named as a limit of the measurement."""


def look_up(data: Any, path: str) -> Any:
    """The value at a path of keys and indices joined by dots; None where there is none."""
    for key in path.split("."):
        if isinstance(data, list):
            data = data[int(key)]
        elif isinstance(data, dict):
            data = data.get(key)
        else:
            return None
    return data


def headline(run: Run) -> list[str]:
    """A line a level, for a terminal."""
    lines = []
    for level in run["levels"]:
        ms = level["latency_ms"]
        errors = sum(level["errors"].values())
        times = (
            f"p50 {number(ms['p50'])} p90 {number(ms['p90'])} p99 {number(ms['p99'])} ms"
            if ms["count"]
            else "no answer"
        )
        lines.append(
            f"{level['offered']:g} {level['unit']}: answered {level['answered_per_s']}/s, "
            f"{level['questions_per_s']} questions/s, {times}, errors {errors}"
        )
    total = run["totals"]
    lines.append(
        f"in all, warm-up included: requests {total['requests']}, answered {total['answered']}, "
        f"questions {total['questions']}, errors {sum(total['errors'].values())}"
    )
    return lines + agreement_lines(run)


def agreement_lines(run: Run) -> list[str]:
    """For a terminal: each number of the report beside the server's, if it was held to them."""
    check = run.get("check")
    if check is None:
        return []
    lines = [f"{'':34}{'report':>14}{'server':>14}"]
    lines += [
        f"{row['what']:34}{number(row['report']):>14}{number(row['server']):>14}"
        f"{'' if row['agrees'] else '  DIFFERS'}"
        for row in check["rows"]
    ]
    lines += [f"dashboard: no series {name}" for name in check["dashboard"]["missing"]]
    return lines


def page(runs: Sequence[Run]) -> str:
    """The HTML page, by workload if there are several; the first run of a workload is what its
    others are compared with.
    """
    groups = by_workload(runs)
    ordered = [run for group in groups for run in group]
    several = len(groups) > 1
    called = dict.fromkeys(str(r["name"]) for r in ordered) if several else unique_names(ordered)
    title = " and ".join(called)
    body = [f"<h1>Load test: {escape(title)}</h1>"]
    first = 0
    for group in groups:
        if several:
            body.append(f"<h2>Workload {escape(group[0]['workload'])}</h2>")
        body += _sections(group, first, "h3" if several else "h2")
        first += len(group)
    body += ["<h2>How to read this</h2>", _notes(ordered)]
    # within a script element "<" may begin a tag; in JSON it only stands in strings
    data = json.dumps(ordered).replace("<", "\\u003c")
    template = files("loadtest").joinpath("report_template.html").read_text("utf-8")
    return (
        template.replace("{{title}}", escape(title))
        .replace("{{body}}", "\n".join(body))
        .replace("{{data}}", data)
    )


def by_workload(runs: Sequence[Run]) -> list[list[Run]]:
    """The runs of each workload, in the order of their first ones."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(run["workload"], []).append(run)
    return list(found.values())


def _sections(runs: Sequence[Run], first: int, heading: str) -> list[str]:
    """All about some runs. first: which of the page's runs the first of them is. heading: element
    of their headings.
    """
    names = unique_names(runs)
    each = list(enumerate(zip(names, runs, strict=True)))
    head = "<{0}>{1}</{0}>".format
    return [
        *(_about(name, run, i) for i, (name, run) in each),
        *_warnings(names, runs),
        head(heading, "Levels of load"),
        _levels(names, runs, first),
        _compared(names, runs) if len(runs) > 1 else "",
        '<div class="figures">',
        *figures(names, runs),
        "</div>",
        head(heading, "By workload"),
        *(_by_work(name, run, first + i) for i, (name, run) in each),
        head(heading, "All that was sent"),
        _totals(names, runs, first),
        *(_agreement(name, run, first + i) for i, (name, run) in each if "check" in run),
    ]


def unique_names(runs: Sequence[Run]) -> list[str]:
    """What each run is called; runs of one name are numbered."""
    names = [str(run["name"]) for run in runs]
    return [f"{n} ({i + 1})" if names.count(n) > 1 else n for i, n in enumerate(names)]


def _about(name: str, run: Run, index: int) -> str:
    server = ", ".join(f"{k} {v}" for k, v in run["server"].items()) or "does not say"
    how = f"{run['arrivals']} arrivals" if run["arrivals"] else "clients that wait"
    asked = "one question a request" if run["one_by_one"] else "all questions of a state at once"
    shared = run["client"].get("processes", 1)
    parts = f" in {shared} processes" if shared > 1 else ""
    facts = (
        f"{run['date']}, workload {run['workload']} ({run['records']}), {run['loop']} loop, {how}, "
        f"{asked}, {number(run['seconds'])} s in all, {number(run['warmup_s'])} s of each level "
        f"left out as warm-up, over {run['transport']}, seed {run['seed']}. "
        f"Client{parts}: {run['client']['cpus']} CPUs ({run['client']['processor']}). "
        f"Server: {server}."
    )
    swatch = f'<i class="swatch" style="background:var(--c{index % 6})"></i>'
    return f"<p>{swatch}<b>{escape(name)}</b>: {escape(facts)}</p>"


def _warnings(names: Sequence[str], runs: Sequence[Run]) -> list[str]:
    found = []
    for name, run in zip(names, runs, strict=True):
        for level in run["levels"]:
            late = level["lag_ms"].get("p99", 0.0)
            if late > LATE_MS:
                where = f"{name}, {level['offered']:g} {level['unit']}"
                found.append(
                    f'<p class="warn">{escape(where)}: the generator itself sent up to '
                    f"{number(late)} ms late (p99); that is in the latencies, and is not the "
                    "server's.</p>"
                )
    return found


def _cell(value: Cell, path: str) -> str:
    shown = "-" if value is None else value if isinstance(value, str) else number(value)
    return f'<td data-path="{escape(path)}">{escape(shown)}</td>'


def _table(caption: str, head: Sequence[str], rows: Sequence[str]) -> str:
    top = "".join(f'<th scope="col">{escape(h)}</th>' for h in head)
    return (
        f'<div class="wide"><table><caption>{escape(caption)}</caption><thead><tr>{top}</tr>'
        f"</thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _levels(names: Sequence[str], runs: Sequence[Run], first: int) -> str:
    rows = []
    for i, (name, run) in enumerate(zip(names, runs, strict=True), first):
        for j, level in enumerate(run["levels"]):
            cells = "".join(
                _cell(look_up(level, key), f"{i}.levels.{j}.{key}") for _, key in LEVEL_COLUMNS
            )
            errors = sum(level["errors"].values())
            rows.append(
                f'<tr><th scope="row">{escape(name)}</th>'
                f"<td>{level['offered']:g} {level['unit']}</td>{cells}"
                f"<td>{number(errors)}</td></tr>"
            )
    head = ["run", "offered", *(h for h, _ in LEVEL_COLUMNS), "errors"]
    return _table("Measured after the warm-up", head, rows)


def _compared(names: Sequence[str], runs: Sequence[Run]) -> str:
    """Each later run over the first, at equal levels."""
    base = {(lv["unit"], lv["offered"]): lv for lv in runs[0]["levels"]}
    rows = []
    for name, run in zip(names[1:], runs[1:], strict=True):
        for level in run["levels"]:
            first = base.get((level["unit"], level["offered"]))
            if first is None:
                continue
            cells = []
            for key in COMPARED:
                ours, theirs = look_up(level, key), look_up(first, key)
                cells.append(f"<td>{ours / theirs:.2f}</td>" if ours and theirs else "<td>-</td>")
            rows.append(
                f'<tr><th scope="row">{escape(name)}</th>'
                f"<td>{level['offered']:g} {level['unit']}</td>{''.join(cells)}</tr>"
            )
    if not rows:
        return "<p>The runs have no level in common.</p>"
    head = ["run", "offered", "answered /s", "p50", "p90", "p99"]
    return _table(f"Over {names[0]} (1.00 is equal)", head, rows)


def _by_work(name: str, run: Run, index: int) -> str:
    rows = []
    for j, level in enumerate(run["levels"]):
        for work, part in level["by_work"].items():
            cells = "".join(
                _cell(look_up(part, key), f"{index}.levels.{j}.by_work.{work}.{key}")
                for _, key in WORK_COLUMNS
            )
            errors = sum(part["errors"].values())
            rows.append(
                f'<tr><th scope="row">{escape(work)}</th>'
                f"<td>{level['offered']:g} {level['unit']}</td>{cells}"
                f"<td>{number(errors)}</td></tr>"
            )
    return _table(name, ["workload", "offered", *(h for h, _ in WORK_COLUMNS), "errors"], rows)


def _totals(names: Sequence[str], runs: Sequence[Run], first: int) -> str:
    keys = ["requests", "answered", "questions", "answers"]
    usage = list(dict.fromkeys(k for run in runs for k in run["totals"]["usage"]))
    errors = list(dict.fromkeys(k for run in runs for k in run["totals"]["errors"]))
    row: Callable[[str, str, str], str] = lambda label, group, key: (  # noqa: E731
        f'<tr><th scope="row">{escape(label)}</th>'
        + "".join(
            _cell(_total(run, group, key), ".".join(p for p in (str(i), "totals", group, key) if p))
            for i, run in enumerate(runs, first)
        )
        + "</tr>"
    )
    rows = [row(key, "", key) for key in keys]
    rows += [row(key.replace("_", " "), "usage", key) for key in usage]
    rows += [row(f"error: {key}", "errors", key) for key in errors]
    return _table("Warm-up included, as the server's own counters see it", ["", *names], rows)


def _total(run: Run, group: str, key: str) -> Cell:
    data = run["totals"]
    value: Cell = (data[group] if group else data).get(key, 0)
    return value


def _agreement(name: str, run: Run, index: int) -> str:
    """Beside the server's counters."""
    check = run["check"]
    rows = []
    for j, row in enumerate(check["rows"]):
        cells = "".join(
            _cell(row[side], f"{index}.check.rows.{j}.{side}") for side in ("report", "server")
        )
        mark = "yes" if row["agrees"] else "no"
        rows.append(f'<tr><th scope="row">{escape(row["what"])}</th>{cells}<td>{mark}</td></tr>')
    caption = (
        f"{name}: {number(check['period_s'])} s after the run, by the server's metrics; counts are "
        f"equal, mean times within 1%. {number(check['dashboard']['found'])} of the dashboard's "
        "series were there"
    )
    missing = check["dashboard"]["missing"]
    caption += f"; missing: {', '.join(missing)}" if missing else ""
    return _table(caption, ["", "report", "server", "agrees"], rows)


def _notes(runs: Sequence[Run]) -> str:
    notes = [
        "In the open loop latency counts from when a request was due, whatever the server or this "
        "client was doing then; in the closed loop from when its client was ready to send.",
        "Percentiles are nearest-rank over answers and requests that were given up (those with the "
        "time until then); refusals are counted as errors only.",
        "Answered per second counts what came back within the level, so a backlog shows as less "
        "than what was due.",
        "Latency as seen here holds the network, the proxy and this client, which may share the "
        "server's cores.",
    ]
    if not any(run["totals"]["stages"] for run in runs):
        notes.append("The server's answers carry no time by stage (x_timing), so none is shown.")
    return f"<ul>{''.join(f'<li>{escape(n)}</li>' for n in notes)}</ul>"
