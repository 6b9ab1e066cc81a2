"""Locust's web page over the workloads, started and stopped in a browser as its user does."""

import json
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest

from loadtest.local import free_port
from tests.loadtest.test_smoke import ROOT, Counting, serving
from tests.router.browser import Tab, browser_path, tab

KEY = "not-to-be-shown"
WITHIN_S = 60


class Willing(Counting):
    """Answers everything."""

    def outcome(self, questions: int, key: str) -> str:
        with self.lock:
            self.seen["answered"] += 1
            self.questions += questions
            self.keys.add(key)
        return "answered"


def opened(url: str, page: Tab) -> None:
    """Opens a page once its server listens."""
    deadline = time.monotonic() + WITHIN_S
    while True:
        try:
            assert httpx.get(url).status_code == 200
            break
        except httpx.TransportError:
            assert time.monotonic() < deadline, "locust's page never came"
            time.sleep(0.05)
    page.open(url)


def press(page: Tab, label: str) -> None:
    """Presses the button of this text."""
    button = f"[...document.querySelectorAll('button')].find(b => b.innerText.trim() == {label!r})"
    page.wait(f"{button} !== undefined")
    page.run(f"{button}.click()")


def counted(page: Tab) -> tuple[int, int]:
    """Requests and failures in the last row of the page's table."""
    row = "[...document.querySelectorAll('table tr')].at(-1)"
    cells = page.run(f"[...{row}.querySelectorAll('td')].map(cell => cell.innerText)")
    assert cells[1] == "Aggregated"
    return int(cells[2]), int(cells[3])


@pytest.mark.skipif(find_spec("locust") is None, reason="no locust here")
@pytest.mark.skipif(browser_path() is None, reason="no browser here")
def test_a_run_is_started_watched_and_stopped_on_the_page(tmp_path: Path) -> None:
    """Its form has our options and not the key; requests are counted and none fails; the report is
    written at the end, of exactly what the server saw.
    """
    port = free_port()
    report = tmp_path / "report"
    with serving(Willing()) as server, tab(tmp_path / "profile") as page:
        locust = subprocess.Popen(
            [
                sys.executable, "-m", "locust", "-f", "loadtest/locustfile.py",
                "--web-host", "127.0.0.1", "--web-port", str(port), "--host", server.url,
                "-u", "2", "-r", "2", "--rate", "20", "--warmup", "0", "--report", str(report),
                "--data", str(tmp_path / "none"), "--api-key", KEY,
            ],
            cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            opened(f"http://127.0.0.1:{port}/", page)
            page.wait("document.querySelector('input[name=rate]')?.value == '20'")
            assert page.run("document.querySelector('[name=workload]').value") == "mixed"
            assert KEY not in page.run("document.documentElement.outerHTML")
            press(page, "START")
            row = "[...document.querySelectorAll('table tr')].at(-1)?.children[2]?.innerText"
            page.wait(f"Number({row}) >= 10")
            assert counted(page)[1] == 0
            press(page, "Stop")
            deadline = time.monotonic() + WITHIN_S
            while not (report / "report.html").is_file():
                assert time.monotonic() < deadline, "no report was written"
                time.sleep(0.05)
            page.wait(f"Number({row}) == {sum(server.seen.values())}")
            assert counted(page)[1] == 0
        finally:
            locust.terminate()
            assert locust.wait(WITHIN_S) == 0
        problems = [e for e in page.events if e["method"] == "Runtime.exceptionThrown"]
        assert not problems
    totals = json.loads((report / "run.json").read_text())["totals"]
    assert totals["requests"] == totals["answered"] == server.seen["answered"] >= 10
    assert totals["questions"] == server.questions
    assert server.keys == {f"Bearer {KEY}"}
