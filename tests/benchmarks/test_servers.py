"""Servers beside each other, here small ones."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks.servers import (
    ENDING_S,
    SECONDS,
    WORKS,
    Load,
    Server,
    asked_in_turn,
    measured,
    parsed,
    servers_of,
)
from loadtest.local import free_port
from loadtest.workloads import NAMES


def small(name: str, out: Path) -> Server:
    """A server that answers at once."""
    port = free_port()
    command = [sys.executable, "-m", "tests.benchmarks.small_server", str(port)]
    return Server(name, command, f"http://127.0.0.1:{port}", out / name)


def test_two_servers_in_turn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs of both, rows that name them, a page; one that ends at once costs the other nothing."""
    broken = Server(
        "broken", [sys.executable, "-c", "exit(3)"], "http://127.0.0.1:9", tmp_path / "b"
    )
    servers = [small("ours", tmp_path), broken, small("flide", tmp_path)]
    words = ["nano", "--works", "race", "routing", "--clients", "2", "--seconds", "1.5"]
    words += ["--processes", "1", "--out", str(tmp_path), "--results", str(tmp_path / "results")]
    args = parsed([*words, "--data", str(tmp_path / "none")])
    assert not measured(servers, args)  # one did not come up
    rows = json.loads((tmp_path / "results" / "load.json").read_text())
    assert {(row["engine"], row["work"]) for row in rows} == {
        (engine, work) for engine in ("ours", "flide") for work in ("race", "routing")
    }
    assert all(row["answered"] > 0 and not row["errors"] for row in rows)
    page = (tmp_path / "report.html").read_text()
    assert all(f'"{name}"' in page for name in ("ours", "flide", "race", "routing"))
    assert "broken has ended with 3" in capsys.readouterr().out
    assert all(server.process.poll() is not None for server in servers)


class Fails(Load):
    """Loads that fail for one of the servers, each of ten seconds."""

    asked: list[tuple[str, str]]

    def ask(self, server: Server, work: str, out: Path) -> bool:
        """See Load."""
        self.asked.append((server.name, work))
        return server.name != "broken"


def load(left: float) -> Fails:
    """With so many seconds left, which do not pass."""
    made = Fails("1,2", {"race": 1.0, "mixed": 60.0}, [], lambda: left)
    object.__setattr__(made, "asked", [])
    return made


def test_who_fails_twice_is_asked_no_more(tmp_path: Path) -> None:
    servers = [small("ours", tmp_path), small("broken", tmp_path)]
    asked = load(1000.0)
    assert not asked_in_turn(servers, ["race", "routing", "mixed", "agents"], asked)
    assert [work for name, work in asked.asked if name == "broken"] == ["race", "routing"]
    assert [work for name, work in asked.asked if name == "ours"] == [
        "race", "routing", "mixed", "agents",
    ]  # fmt: skip


def test_what_does_not_fit_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = load(ENDING_S + 12.0)
    assert not asked_in_turn([small("ours", tmp_path)], ["mixed", "race"], asked)
    assert asked.asked == [("ours", "race")]
    assert "ours is not asked mixed" in capsys.readouterr().out
    assert asked_in_turn([small("ours", tmp_path)], ["race"], load(ENDING_S + 10.0))


def test_all_workloads_are_asked_and_both_servers_get_the_same_weights(tmp_path: Path) -> None:
    assert set(WORKS) == set(NAMES)
    assert set(SECONDS) < set(WORKS)
    words = ["nano", "--peer", str(tmp_path), "--out", str(tmp_path), "--peer-option", "a"]
    ours, flide = servers_of(parsed(words))
    assert "model=nano" in ours.command
    assert flide.command[flide.command.index("--model") + 1] == "nano"
    assert flide.environment["PYTHONPATH"].startswith(str(tmp_path))
    assert ours.url != flide.url
    (alone,) = servers_of(parsed(["nano", "--out", str(tmp_path)]))
    assert alone.name == "ours"
