"""A report held to the server's counters, on scrapes written by hand."""

from collections.abc import Iterator
from typing import Any

import pytest

from loadtest import agreement
from loadtest.agreement import LOOKS, Check, Scrape, compare, dashboard_names, occasional
from loadtest.report import agreement_lines, page
from tests.loadtest.test_report import run

OTHER = 'ray_flide_questions_total{application="another"} 1000'
BEFORE = [
    'ray_flide_gateway_requests_total{application="default",outcome="answered",via="http"} 5',
    'ray_flide_questions_total{application="default",tenant="a"} 7',
    'ray_flide_stage_seconds_count{application="default",stage="queue"} 5',
    'ray_flide_stage_spent_seconds_total{application="default",stage="queue"} 2.5',
]
AFTER = """
ray_flide_gateway_requests_total{application="default",outcome="answered",via="http",replica="x"} 9
ray_flide_gateway_requests_total{application="default",outcome="answered",via="http",replica="y"} 6
ray_flide_gateway_requests_total{application="default",outcome="answered",via="handle"} 90
ray_flide_gateway_requests_total{application="default",outcome="Overloaded",via="http"} 2
ray_flide_gateway_requests_total{application="default",outcome="InvalidRequest",via="http"} 1
ray_flide_gateway_requests_total{application="default",outcome="RequestQuarantined",via="http"} 1
ray_flide_gateway_requests_total{application="default",outcome="UnknownModel",via="http"} 1
ray_flide_gateway_requests_total{application="default",outcome="cancelled",via="http"} 2
ray_flide_gateway_requests_total{application="default",outcome="internal",via="http"} 1
ray_flide_requests_total{application="default",outcome="answered",tenant="a"} 10
ray_flide_requests_total{application="default",outcome="cancelled",tenant="a"} 3
ray_flide_requests_total{application="default",outcome="Overloaded",tenant="a"} 2
ray_flide_questions_total{application="default",tenant="a"} 20
ray_flide_questions_total{application="default",tenant="b"} 7
ray_flide_input_tokens_total{application="default",tenant="a"} 1000
ray_flide_request_reused_tokens_total{application="default"} 64
ray_flide_stage_seconds_count{application="default",stage="queue"} 15
ray_flide_stage_spent_seconds_total{application="default",stage="queue"} 3.5
""".strip().split("\n")
TOTALS: dict[str, Any] = {
    "requests": 18,
    "answered": 10,
    "answers": 20,
    "usage": {"input_tokens": 1000, "x_reused_tokens": 64},
    "errors": {
        "429 rate_limit_error": 2,
        "422 invalid_request_error": 1,
        "422 api_usage_error": 1,
        "400 api_usage_error": 1,
        "500 internal_error": 1,
        "timeout": 1,
        "transport ServerDisconnectedError": 1,
    },
    "stages": {"queue": {"count": 10, "sum_ms": 1000.0}},
}


def differing(after: list[str], totals: dict[str, Any], transport: str = "http") -> list[str]:
    """What does not agree."""
    rows = compare(scraped(BEFORE), scraped(after), totals, transport)
    return [row.what for row in rows if not row.agrees]


def scraped(lines: list[str]) -> Scrape:
    """A look at two endpoints."""
    return Scrape(["\n".join([*lines, OTHER]) + "\n", "other_metric 1\n"])


def test_equal_counts_agree() -> None:
    """By outcome in a client's words, what was there before and other applications left out."""
    assert differing(AFTER, TOTALS) == []


@pytest.mark.parametrize(
    ("line", "value", "what"),
    [
        (0, "10", ["requests", "answered"]),
        (2, "91", []),
        (3, "3", ["requests", "429 rate_limit_error"]),
        (4, "0", ["requests", "422 invalid_request_error"]),
        (7, "1", ["requests", "given up"]),
        (9, "11", ["answered by engines"]),
        (12, "21", ["questions"]),
        (14, "1001", ["input tokens"]),
        (15, "63", ["reused tokens"]),
        (16, "16", ["queue, times measured", "queue, mean ms"]),
        (17, "3.509", []),
        (17, "3.511", ["queue, mean ms"]),
    ],
)
def test_every_difference_is_found(line: int, value: str, what: list[str]) -> None:
    """One more, one less, and a mean off by more than 1%."""
    changed = [*AFTER]
    changed[line] = f"{changed[line].rpartition(' ')[0]} {value}"
    assert differing(changed, TOTALS) == what


def test_what_only_one_side_has_is_found() -> None:
    """An error of a proxy that no Gateway saw; an outcome that no client did."""
    errors = {**TOTALS["errors"], "503": 1}
    assert differing(AFTER, {**TOTALS, "requests": 19, "errors": errors}) == ["requests", "503"]
    more = 'ray_flide_gateway_requests_total{application="default",outcome="NotReady",via="http"} 1'
    assert differing([*AFTER, more], TOTALS) == ["requests", "503 unavailable_error"]


def test_by_handle_the_engines_count() -> None:
    """In the names of the error tree."""
    errors = {"Overloaded": 2, "timeout": 3}
    assert differing(AFTER, {**TOTALS, "requests": 15, "errors": errors}, "handle") == []


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Scrape]]:
    """What the server's metrics are, one look after the other."""
    coming: list[Scrape] = []
    monkeypatch.setattr(agreement, "scrape", lambda urls, app: coming.pop(0))
    yield coming
    assert coming == []


def drawn() -> list[str]:
    """A series of every name of the dashboard but for occasional ones."""
    names = dashboard_names() - occasional()
    return [f'{name}{{application="default"}} 0' for name in names]


def test_the_dashboard_is_held_to_the_scrape(looks: list[Scrape]) -> None:
    """A name that nobody tells makes the check fail, unless it is told only at times."""
    slept: list[float] = []
    looks += [scraped(BEFORE), scraped([*AFTER, *drawn()])]
    result = Check(["url"], sleep=slept.append).result(TOTALS, "http")
    assert result["agrees"]
    assert slept == [12.0, 12.0]
    assert result["dashboard"]["missing"] == []
    lost = [line for line in drawn() if "ray_flide_rounds_total" not in line]
    looks += [scraped(BEFORE), *[scraped([*AFTER, *lost])] * LOOKS]
    result = Check(["url"], period_s=1, fresh=True, sleep=slept.append).result(TOTALS, "http")
    assert slept[2:] == [3.0] * LOOKS
    assert not result["agrees"]
    assert result["dashboard"]["missing"] == ["ray_flide_rounds_total"]
    assert occasional()


def test_a_server_that_tells_late_is_waited_for(looks: list[Scrape]) -> None:
    """A process that was held up exports what it has counted a period later."""
    slept: list[float] = []
    looks += [scraped(BEFORE), scraped([*BEFORE, *drawn()]), scraped([*AFTER, *drawn()])]
    result = Check(["url"], period_s=1, fresh=True, sleep=slept.append).result(TOTALS, "http")
    assert result["agrees"]
    assert slept == [3.0, 3.0]


def test_the_report_shows_both_sides(looks: list[Scrape]) -> None:
    """On the page and in the terminal, with what differs."""
    looks += [scraped(BEFORE), *[scraped([*AFTER, *drawn()])] * LOOKS]
    data = run()
    data["check"] = Check(["url"], fresh=True, sleep=lambda s: None).result(
        {**TOTALS, "answers": 21}, "http"
    )
    assert not data["check"]["agrees"]
    lines = agreement_lines(data)
    assert [line.split()[0] for line in lines if line.endswith("DIFFERS")] == ["questions"]
    html = page([data])
    assert "by the server's metrics" in html.replace("&#x27;", "'")
    cell = '<td data-path="0.check.rows.{}.server">{}</td><td>{}</td>'
    at = next(i for i, row in enumerate(data["check"]["rows"]) if row["what"] == "questions")
    assert cell.format(at, "20", "no") in html
    assert cell.format(at + 1, "1,000", "yes") in html
    assert agreement_lines(run()) == []
