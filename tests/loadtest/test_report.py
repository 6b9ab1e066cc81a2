"""Statistics and the page: numbers that can be checked by hand, and a page that shows no other."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from loadtest.__main__ import report as report_command
from loadtest.driver import TIMEOUT, Reply, Sample
from loadtest.output import read_run, write_run
from loadtest.plan import Level, Plan
from loadtest.plots import linear, logarithmic, number
from loadtest.report import headline, look_up, page
from loadtest.stats import Run, percentile, summary

USAGE = {"input_tokens": 100, "x_reused_tokens": 40}


def sample(due: float, ms: float, error: str = "", work: str = "race") -> Sample:
    """One request sent 1 ms after it was due, with two questions and two stages."""
    stages = {"queue": ms / 4, "round": ms / 2}
    reply = Reply(error) if error else Reply("", 2, USAGE, stages)
    return Sample(work, 2, due, due + 0.001, due + ms / 1000, reply)


def run(name: str = "first", scale: float = 1.0, levels: tuple[float, ...] = (10, 20)) -> Run:
    """Two levels of 10 s; in each 100 answers of 1 to 100 ms after 2 s of warm-up, and errors."""
    plan = Plan("mixed", levels=levels, seconds=10 * len(levels), warmup_s=2, data=Path("none"))
    found = []
    for i, offered in enumerate(levels):
        warm = [sample(0.5, 5000.0)]
        main = [sample(2 + k * 0.05, scale * (k + 1), work="race") for k in range(100)]
        refused = [sample(3, 1, "429 rate_limit_error", "agents")] * (i + 1)
        failed = [*refused, sample(4, 900, TIMEOUT, "agents")]
        found.append(Level(offered, 12.0 * i, [*warm, *main, *failed]))
    about = {"name": "<b>model</b>", "version": "0"}
    return summary(plan, found, name, "http", about, [(0.0, 1), (5.0, 2)])


def test_percentiles_are_nearest_rank() -> None:
    """By definition, also at the ends."""
    values = [float(v) for v in range(1, 101)]
    assert [percentile(values, p) for p in (0.0, 0.5, 0.9, 0.99, 1.0)] == [1, 50, 90, 99, 100]
    assert percentile([3.0], 0.99) == 3.0
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)


def test_a_run_is_what_its_samples_say() -> None:
    """Warm-up is out of the level and in the totals; refusals are no latencies, timeouts are."""
    data = run()
    level = data["levels"][0]
    assert level["requests"] == 102
    assert level["answered"] == 100
    assert level["errors"] == {"429 rate_limit_error": 1, TIMEOUT: 1}
    assert level["latency_ms"]["count"] == 101
    assert level["latency_ms"]["p50"] == pytest.approx(51)
    assert level["latency_ms"]["max"] == pytest.approx(900)
    assert level["due_per_s"] == pytest.approx(102 / 8, abs=1e-3)
    # the 5 s answer of the warm-up also came within the window
    assert level["answered_per_s"] == pytest.approx(101 / 8, abs=1e-3)
    assert level["questions_per_s"] == pytest.approx(202 / 8)
    assert level["usage_per_s"]["x_reused_tokens"] == pytest.approx(101 * 40 / 8)
    assert level["lag_ms"]["p99"] == pytest.approx(1)
    assert level["by_work"]["agents"]["latency_ms"]["count"] == 1
    assert level["stages_ms"]["queue"]["mean"] == pytest.approx(50.5 / 4)
    totals = data["totals"]
    assert totals["requests"] == 207
    assert totals["answered"] == 202
    assert totals["questions"] == 414
    assert totals["answers"] == 404
    assert totals["usage"]["input_tokens"] == 20200
    assert totals["stages"]["round"]["sum_ms"] == pytest.approx(2 * (5050 + 5000) / 2)
    assert sum(data["series"]["due"]) == sum(data["series"]["answered"]) + 5 == 207
    assert sum(data["series"]["usage"]["input_tokens"]) == 20200


def cells(html: str) -> dict[str, str]:
    """Shown text of every cell by its path in the JSON."""
    return dict(re.findall(r'<td data-path="([^"]+)">([^<]*)</td>', html))


def embedded(html: str) -> Any:
    """The JSON inside the page."""
    found = re.search(r'<script type="application/json" id="runs">(.*?)</script>', html, re.DOTALL)
    assert found
    return json.loads(found[1])


def test_every_number_on_the_page_is_one_of_the_json(tmp_path: Path) -> None:
    """Each cell's path leads to the value it shows; the page holds the JSON itself."""
    data, report = write_run(run(), tmp_path / "new")
    html = report.read_text()
    assert embedded(html) == [json.loads(data.read_text())]
    shown = cells(html)
    assert len(shown) > 40
    for path, text in shown.items():
        value = look_up([read_run(data)], path)
        assert text == ("-" if value is None else number(value)), path
    for title in (
        "Latency against offered load, requests/s",
        "Share of requests answered within a time",
        "Tokens a second",
        "Mean time by stage",
        "Engine replicas running",
        "Errors by kind",
    ):
        assert title in html


def test_the_page_is_self_contained() -> None:
    """No address in it, nothing loaded, names escaped, both colour schemes."""
    html = page([run("<script>alert(1)</script></script>")])
    assert not re.search(r"https?://|@import|url\(|<link|<img|src=", html)
    assert "<script>alert" not in html
    assert "<b>model</b>" not in html.split('<script type="application/json"', maxsplit=1)[0]
    assert embedded(html)[0]["name"] == "<script>alert(1)</script></script>"
    assert "prefers-color-scheme: dark" in html
    assert html.count('role="img"') == html.count("aria-label=") >= 8


def test_runs_are_compared_at_equal_levels(tmp_path: Path) -> None:
    """Ratios over the first run; a level that only one has is not compared."""
    paths = []
    for i, data in enumerate((run("a"), run("b", 2.0, (10, 40)), run("b"))):
        path, _ = write_run(data, tmp_path / str(i))
        paths.append(str(path))
    report_command([*paths, "--out", str(tmp_path / "page.html")])
    html = (tmp_path / "page.html").read_text()
    table = html[html.index("Over a (1.00 is equal)") :].split("</table>")[0]
    rows = re.findall(r"<tr><th scope=\"row\">(.*?)</th><td>(.*?)</td>(.*?)</tr>", table)
    assert [(name, at) for name, at, _ in rows] == [
        ("b (2)", "10 requests/s"),
        ("b (3)", "10 requests/s"),
        ("b (3)", "20 requests/s"),
    ]
    assert "<td>2.00</td>" in rows[0][2]
    assert set(re.findall(r"<td>(.*?)</td>", rows[1][2])) == {"1.00"}


def test_runs_of_several_workloads_are_compared_by_workload(tmp_path: Path) -> None:
    """Each workload has a part, in which its runs alone are compared; every number shown is that of
    its path in the page's own data.
    """
    runs = [run("a"), {**run("a", 3.0, (10,)), "workload": "race"}, run("b", 2.0), run("c", 4.0)]
    paths = [str(write_run(data, tmp_path / str(i))[0]) for i, data in enumerate(runs)]
    report_command([*paths, "--out", str(tmp_path / "page.html")])
    html = (tmp_path / "page.html").read_text()
    assert "<h1>Load test: a and b and c</h1>" in html
    mixed, race = html.split("<h2>Workload ")[1:]
    assert mixed.startswith("mixed</h2>")
    assert mixed.count("Over a (1.00 is equal)") == 1
    assert race.startswith("race</h2>")
    assert "(1.00 is equal)" not in race
    shown = re.findall(r'data-path="(.*?)">(.*?)</td>', html)
    assert {path.split(".")[0] for path, _ in shown} == set("0123")
    for path, text in shown:
        value = look_up(embedded(html), path)
        assert text == ("-" if value is None else number(value)), path
    assert 'data-path="3.' in race
    assert 'data-path="3.' not in mixed
    assert embedded(html)[3]["workload"] == "race"


def test_a_run_without_answers_still_has_a_page() -> None:
    """All refused, and nothing at all."""
    plan = Plan("race", levels=(1,), seconds=10, warmup_s=0, data=Path("none"))
    refused = Level(1, 0.0, [sample(1, 1, "503 overloaded_error")])
    for level in (refused, Level(1, 0.0)):
        data = summary(plan, [level], "none", "http", {})
        assert "no answer" in headline(data)[0]
        assert "Measured after the warm-up" in page([data])


@pytest.mark.parametrize(("top", "ticks"), [(1, 5), (7, 4), (99, 5), (0.03, 3), (0, 5)])
def test_axes_reach_past_their_data(top: float, ticks: int) -> None:
    """From 0 in round steps; logarithmic ones hold all values."""
    axis = linear([top])
    assert axis.high >= top
    assert len(axis.ticks) == ticks + 1
    assert axis.at(axis.low) == 0
    assert axis.at(axis.high) == 1
    wide = logarithmic([top, 300])
    assert all(0 <= wide.at(v) <= 1 for v in (top, 300) if v)


def test_other_files_are_refused(tmp_path: Path) -> None:
    """A file that is no run is named."""
    (tmp_path / "x.json").write_text("[]")
    with pytest.raises(ValueError, match=r"x\.json is not a run"):
        read_run(tmp_path / "x.json")


@pytest.mark.parametrize(
    "wrong",
    [
        {"levels": ()},
        {"levels": (0.0,)},
        {"levels": (257,), "loop": "closed"},
        {"levels": (1.5,), "loop": "closed"},
        {"levels": (1, 2), "seconds": 10, "warmup_s": 5},
    ],
)
def test_plans_that_measure_nothing_are_refused(wrong: dict[str, Any]) -> None:
    """With the value that is wrong."""
    with pytest.raises(ValueError, match=r"levels|clients|warm-up"):
        Plan(**wrong)


def test_the_committed_example_is_drawn_from_its_json() -> None:
    """`python -m loadtest report` of the two result files gives the page, which stays small."""
    root = Path(__file__).parents[2]
    results = root / "benchmarks" / "results"
    runs = [read_run(results / f"example-loadtest-{way}.json") for way in ("http", "handle")]
    example = (root / "docs" / "example-loadtest.html").read_text()
    assert example == page(runs)
    assert len(example) < 300_000
