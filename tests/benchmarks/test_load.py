"""Rows of load tests, and what a benchmark leaves that is cut short."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import load, serving
from loadtest.output import write_run
from tests.loadtest.test_report import run


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """What two load tests have left: one of two workloads, one of one."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    write_run(run("a"), ours / "mixed")
    write_run({**run("a"), "workload": "race"}, ours / "race")
    write_run(run("b", 2.0), theirs)
    return ours, theirs


def called(monkeypatch: pytest.MonkeyPatch, main: Any, *words: str) -> None:
    """A command."""
    monkeypatch.setattr(sys, "argv", ["command", *words])
    main()


def test_rows_are_the_levels_of_the_runs(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One for each; an old row of the same load is replaced; a folder without runs is left out."""
    ours, theirs = folders
    out = tmp_path / "results"
    words = ["0.8B", f"ours={ours}", f"flide:sessions={theirs}", f"ours={tmp_path / 'none'}"]
    for _ in range(2):
        called(monkeypatch, load.main, *words, "--out", str(out))
    rows = json.loads((out / "load.json").read_text())
    heads = [(r["engine"], r["mode"], r["work"], r["offered"], r["unit"]) for r in rows]
    assert heads == [
        (engine, mode, work, offered, "requests/s")
        for engine, mode, work in (
            ("ours", "default", "mixed"),
            ("ours", "default", "race"),
            ("flide", "sessions", "mixed"),
        )
        for offered in (10, 20)
    ]
    first = rows[0]
    assert first["requests"] == 102
    assert first["answered"] == 100
    assert first["errors"] == {"429 rate_limit_error": 1, "timeout": 1}
    assert first["seconds"] == 8
    assert first["reuse_share"] == pytest.approx(0.4)
    assert first["p50_ms"] == pytest.approx(51)
    assert rows[4]["p50_ms"] == pytest.approx(102)
    assert all(r["shape"] == "0.8B" and r["card"] for r in rows)


def test_the_table_has_servers_side_by_side(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By workload and load, whichever was measured first."""
    ours, theirs = folders
    called(
        monkeypatch, load.main, "nano", f"ours={ours}", f"flide={theirs}", "--out", str(tmp_path)
    )
    lines = load.table(json.loads((tmp_path / "load.json").read_text()))[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [c[1:4] for c in cells] == [
        ["mixed, synthetic", "10 requests/s", "ours"],
        ["mixed, synthetic", "10 requests/s", "flide"],
        ["mixed, synthetic", "20 requests/s", "ours"],
        ["mixed, synthetic", "20 requests/s", "flide"],
        ["race, synthetic", "10 requests/s", "ours"],
        ["race, synthetic", "20 requests/s", "ours"],
    ]
    assert cells[0][6:10] == ["51.0", "100.0", "0.40", "2"]


def test_nothing_to_keep_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And leaves no file."""
    with pytest.raises(SystemExit, match="no rows"):
        called(monkeypatch, load.main, "nano", f"ours={tmp_path}", "--out", str(tmp_path))
    with pytest.raises(SystemExit, match="is not of the form"):
        called(monkeypatch, load.main, "nano", str(tmp_path), "--out", str(tmp_path))
    assert not (tmp_path / "load.json").exists()


def test_serving_keeps_what_it_has_when_it_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ways that are done."""

    def measured(mode: str, *_: object) -> list[dict[str, Any]]:
        if mode == "proxy":
            raise KeyboardInterrupt
        return [{"mode": mode}]

    monkeypatch.setattr(serving, "rows_of_mode", measured)
    with pytest.raises(KeyboardInterrupt):
        called(monkeypatch, serving.main, "nano", "--out", str(tmp_path))
    rows = json.loads((tmp_path / "serving.json").read_text())
    assert [row["mode"] for row in rows] == ["engine", "handle", "haproxy"]
