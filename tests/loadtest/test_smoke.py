"""Real time and real sockets, counts only: the command and locust against a small server."""

import io
import json
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import loadtest.__main__ as command
from loadtest.local import Server
from loadtest.plan import Plan
from loadtest.processes import Target, run_processes
from loadtest.runner import Progress
from loadtest.workloads import Options, load

ROOT = Path(__file__).parents[2]


class Counting(ThreadingHTTPServer):
    """Answers every decision request; each seventh is refused, each eleventh cut off."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()
        self.questions = 0
        self.asked: Counter[str] = Counter()
        self.lock = threading.Lock()
        self.keys: set[str] = set()
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.server_port}"

    def outcome(self, questions: int, key: str) -> str:
        """Counts a request and says what becomes of it."""
        with self.lock:
            number = sum(self.seen.values()) + 1
            kind = "refused" if number % 7 == 0 else "cut" if number % 11 == 0 else "answered"
            self.seen[kind] += 1
            self.questions += questions
            self.keys.add(key)
            return kind


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Counting

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        key = self.headers.get("authorization", "")
        kind = self.server.outcome(len(body["questions"]), key)
        self.server.asked[body["state"]] += 1
        if kind == "cut":
            self.close_connection = True
            self.connection.close()
        elif kind == "refused":
            self._send(429, {"detail": {"error_type": "rate_limit_error", "message": "full"}})
        else:
            answers = {name: {"type": "noul", "noul": 0.5} for name in body["questions"]}
            usage = {"input_tokens": 10, "output_tokens": len(answers)}
            timing = {"queue_ms": 1.0, "total_ms": 2.5}
            self._send(200, {"model": "m", "usage": usage, "answers": answers, "x_timing": timing})

    def do_GET(self) -> None:
        self._send(200, {"version": "9"})

    def _send(self, status: int, data: dict[str, Any]) -> None:
        content = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        del format, args


@contextmanager
def serving(server: Counting) -> Iterator[Counting]:
    """While it listens on a port of its own."""
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def server() -> Iterator[Counting]:
    """A counting server."""
    with serving(Counting()) as made:
        yield made


def run(*words: str) -> subprocess.CompletedProcess[str]:
    """A finished command."""
    return subprocess.run(
        [sys.executable, "-m", *words],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def run_until_seen(server: Counting, count: int, *words: str) -> subprocess.CompletedProcess[str]:
    """A command that is told to end once the server has seen so many requests."""
    with subprocess.Popen(
        [sys.executable, "-m", *words],
        cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        deadline = time.monotonic() + 120
        while sum(server.seen.values()) < count and process.poll() is None:
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        process.terminate()
        out, err = process.communicate(timeout=120)
        return subprocess.CompletedProcess(words, process.returncode, out, err)


def agree(data: dict[str, Any], server: Counting) -> None:
    """The run's counts are the server's own."""
    totals = data["totals"]
    assert totals["requests"] == sum(server.seen.values())
    assert totals["answered"] == server.seen["answered"] > 0
    assert totals["questions"] == server.questions
    assert totals["usage"]["input_tokens"] == 10 * server.seen["answered"]
    errors = totals["errors"]
    assert errors["429 rate_limit_error"] == server.seen["refused"]
    cut = {k: n for k, n in errors.items() if k.startswith("transport ")}
    assert sum(cut.values()) == server.seen["cut"]
    assert set(errors) == {"429 rate_limit_error", *cut}
    stages = totals["stages"]
    assert stages["total_ms"]["count"] == server.seen["answered"]
    assert stages["total_ms"]["sum_ms"] == pytest.approx(2.5 * server.seen["answered"])


@pytest.mark.parametrize("load", [("--rate", "20,40"), ("--clients", "2,8")], ids=lambda x: x[0])
def test_the_command(server: Counting, tmp_path: Path, load: tuple[str, str]) -> None:
    """Open and closed loop: counts equal the server's, the files are there, progress is shown."""
    done = run(
        "loadtest", "--host", server.url, "--out", str(tmp_path), "--seconds", "4", *load,
        "--warmup", "0.5", "--think", "0.1", "--key", "secret",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    data = json.loads((tmp_path / "run.json").read_text())
    agree(data, server)
    assert server.keys == {"Bearer secret"}
    assert data["server"] == {"version": "9"}
    assert len(data["levels"]) == 2
    assert "secret" not in (tmp_path / "run.json").read_text()
    assert "Mean time by stage" in (tmp_path / "report.html").read_text()
    assert "answered" in done.stderr
    assert "in all, warm-up included" in done.stdout


@pytest.mark.parametrize("load", [("--rate", "20,40"), ("--clients", "2,8")], ids=lambda x: x[0])
def test_clients_in_several_processes(
    server: Counting, tmp_path: Path, load: tuple[str, str]
) -> None:
    """What they have seen together is what the server has, and nothing is lost between levels."""
    done = run(
        "loadtest", "--host", server.url, "--out", str(tmp_path), "--seconds", "3", *load,
        "--warmup", "0.2", "--think", "0.1", "--key", "secret", "--processes", "3",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    data = json.loads((tmp_path / "run.json").read_text())
    agree(data, server)
    assert server.keys == {"Bearer secret"}
    assert data["client"]["processes"] == 3
    assert all(level["answered"] for level in data["levels"])
    assert "Client in 3 processes" in (tmp_path / "report.html").read_text()
    assert "answered" in done.stderr


def test_processes_send_what_one_would(server: Counting) -> None:
    """A closed loop's clients are the same ones, each once, however they are shared. Here each has
    time for one request, and thinks for the rest.
    """
    options = Options(think_s=1000.0)
    plan = Plan("agents", "closed", (4,), 0.5, 0.0, data=Path("none"), options=options)
    clients = load("agents", None, options)
    firsts = Counter(next(clients.client(0, n)).request.body["state"] for n in range(4))
    for processes in (1, 3):
        server.asked.clear()
        target = Target(server.url, "", 10.0)
        levels, _ = run_processes(plan, target, processes, Progress(io.StringIO()))
        assert server.asked == firsts
        assert len(levels[0].samples) == 4


def test_a_process_that_ends_is_told(server: Counting, tmp_path: Path) -> None:
    """Here, as it finds no file of the workload."""
    plan = Plan("race", "closed", (2,), 1.0, 0.0, data=tmp_path)
    with pytest.raises(RuntimeError, match="a process of clients has ended"):
        run_processes(plan, Target(server.url, "", 10.0), 2, Progress(io.StringIO()))
    assert not server.seen


def test_several_workloads(server: Counting, tmp_path: Path) -> None:
    """A run each, in a folder each, written when it ends; a page of all."""
    done = run(
        "loadtest", "--host", server.url, "--out", str(tmp_path), "--seconds", "0.6",
        "--clients", "2", "--warmup", "0.1", "--workload", "race,routing", "--name", "here",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    runs = [json.loads((tmp_path / w / "run.json").read_text()) for w in ("race", "routing")]
    assert [data["workload"] for data in runs] == ["race", "routing"]
    assert [data["name"] for data in runs] == ["here", "here"]
    assert [list(data["levels"][0]["by_work"]) for data in runs] == [["race"], ["routing"]]
    assert sum(data["totals"]["requests"] for data in runs) == sum(server.seen.values())
    html = (tmp_path / "report.html").read_text()
    assert re.findall("<h2>Workload (.*?)</h2>", html) == ["race", "routing"]
    assert (tmp_path / "race" / "report.html").is_file()


def test_options_of_a_server_that_is_started_here(
    server: Counting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They reach it."""
    given: list[tuple[str, ...]] = []

    @contextmanager
    def started(log: Path, *words: str) -> Iterator[Server]:
        del log
        given.append(words)
        yield Server(server.url, "", None)  # type: ignore[arg-type]

    monkeypatch.setattr(command, "serving", started)
    words = ["--out", str(tmp_path), "--clients", "1", "--seconds", "0.3", "--warmup", "0.1"]
    command.run(command.parser().parse_args([*words, "--serve", "model=nano", "num_replicas=2"]))
    assert given == [("model=nano", "num_replicas=2")]
    assert server.seen


@pytest.mark.parametrize("loop", ["open", "closed"])
def test_locust_asks_the_same_workloads(server: Counting, tmp_path: Path, loop: str) -> None:
    """Headless: its report counts what the server counted, by workload, errors by kind."""
    if find_spec("locust") is None:  # importing it would patch this process's threads
        pytest.skip("no locust here")
    done = run_until_seen(
        server, 40,
        "locust", "-f", "loadtest/locustfile.py", "--host", server.url, "--headless",
        "-u", "2", "-r", "2", "--loop", loop, "--rate", "15", "--think", "0.1",
        "--warmup", "0", "--api-key", "secret", "--report", str(tmp_path),
    )  # fmt: skip
    # locust exits with 1 when requests failed, as they do here
    assert done.returncode == 1, done.stderr
    data = json.loads((tmp_path / "run.json").read_text())
    agree(data, server)
    assert data["loop"] == loop
    assert server.keys == {"Bearer secret"}
    assert "429 rate_limit_error" in done.stderr + done.stdout
    assert "routing" in done.stderr + done.stdout


def test_mistakes_are_said_in_a_sentence(tmp_path: Path) -> None:
    """No traceback for a wrong option."""
    out = ("--out", str(tmp_path))
    done = run("loadtest", "--host", "x", *out, "--rate", "0")
    assert done.returncode == 1
    assert done.stderr.strip() == "loadtest: levels (0.0,); each must be above 0"
    for words, said in (
        (("--workload", "race,rice"), "--workload 'rice'; there are race, race_all"),
        (("--workload", "all", "--check"), "--check takes one workload, not 8"),
        (("--serve", "model=nano"), "--serve is for a server that is started here"),
        (("--processes", "0"), "0 processes of clients; at least 1"),
        (("--processes", "2", "--workers", "1"), "2 processes of clients; at least 1, and without"),
    ):
        with pytest.raises(ValueError, match=re.escape(said)):
            command.plan_of(command.parser().parse_args(["--host", "x", *out, *words]))
    done = run("loadtest", "report", str(tmp_path / "none.json"), *out)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
