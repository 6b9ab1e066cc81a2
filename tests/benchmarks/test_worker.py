"""An engine's process between its turns."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.results_file import commit
from benchmarks.worker import Worker, started
from tests.waiting import until

ENGINE = """
import threading, time

class Counting:
    def __init__(self):
        self.count = 0
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        while True:
            self.count += 1
            time.sleep(0.001)

    def counted(self):
        return {"count": self.count}

    def fail(self):
        raise ValueError("no")

def start(shape, mode):
    return Counting()
"""


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    """An engine whose thread never rests by itself, in a module that only its process finds."""
    package = tmp_path / "benchmarks"
    (package / "engines").mkdir(parents=True)
    real = Path(__file__).parents[2] / "benchmarks" / "engines"
    for folder in (package, package / "engines"):
        (folder / "__init__.py").touch()
    for name in ("__main__.py", "protocol.py"):
        (package / "engines" / name).write_text((real / name).read_text())
    (package / "engines" / "counting.py").write_text(ENGINE)
    monkeypatch.chdir(tmp_path)  # first on the path of `python -m`
    made = Worker("counting", "test", [])
    yield made
    made.stop()


def wait_until_stopped(worker: Worker) -> None:
    """Until the process has been stopped; a signal takes a moment to arrive."""
    stat = Path(f"/proc/{worker._process.pid}/stat")
    until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "it does not rest")


def test_a_worker_rests_between_commands(worker: Worker) -> None:
    """Also after a command that fails; it answers, and ends, as if it had not."""
    assert started([worker]) == [worker]
    wait_until_stopped(worker)
    first = worker.do("counted")["count"]
    wait_until_stopped(worker)
    assert worker.do("fail") == {"error": "ValueError: no"}
    wait_until_stopped(worker)
    assert worker.do("counted")["count"] >= first
    worker.stop()
    assert worker._process.returncode == 0


def test_a_worker_that_ends_is_told(worker: Worker) -> None:
    """Also one that rested then."""
    started([worker])
    worker._process.kill()
    worker._process.wait()
    assert worker.do("counted") == {"error": "the engine has ended"}


def test_the_commit_of_a_copy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The environment's word, also where git has one of its own; without it git's, or nothing."""
    monkeypatch.setenv("BENCHMARK_COMMIT", "abc1234")
    assert commit() == "abc1234"
    monkeypatch.delenv("BENCHMARK_COMMIT")
    assert commit() not in {"", "abc1234"}
    monkeypatch.setattr("benchmarks.results_file.__file__", str(tmp_path / "a_file.py"))
    assert commit() == ""
