"""Operations on states and the writing of files: neither waits for the other."""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flide_engine import Engine, EngineConfig
from flide_engine.cache import disk_file
from flide_engine.states import States
from tests.cache.machine import Machine
from tests.waiting import PATIENCE_S

TEXTS = [np.arange(i, i + 256, dtype=np.int32) for i in range(4)]


class HeldWriter:
    """Files whose writing waits until it is let go on; tells which one has begun."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        fsync = os.fsync

        def held(number: int) -> None:
            self.begun.set()
            assert self.go.wait(2 * PATIENCE_S)
            fsync(number)

        monkeypatch.setattr(disk_file.os, "fsync", held)


def at_once(function: Callable[[], Any]) -> Any:
    """What a function returns; fails if it waits for something."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function()), daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert found, "it waits"
    return found[0]


def left(machine: Machine) -> tuple[set[str], set[str], int]:
    """Names on host and disk, and files, once everything has been written."""
    machine.tiers.settle(copies=True, writes=True)
    disk = machine.tiers.disk
    assert disk is not None
    disk.flush()
    files = list(disk._folder.glob("*.checkpoint*"))
    return {c.name for c in machine.tiers.host.of("t")}, {f.name for f in disk.of("t")}, len(files)


@pytest.mark.parametrize("which", [0, 1, 3], ids=["being written", "next", "last"])
def test_forgetting_a_state_waits_for_no_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: int
) -> None:
    """Neither its own nor others'; once all are done nothing of it is there, and the rest is."""
    writer = HeldWriter(monkeypatch)
    machine = Machine(tmp_path, 80, 80)
    states = States(machine.checkpoints, machine.pool, machine.tiers, machine.clock, 0.5, 1)
    for i, text in enumerate(TEXTS):
        machine.run(machine.ask(text, f"run {i}"))
    machine.checkpoints.copy_some(1 << 20)
    machine.tiers.settle(copies=True)
    assert writer.begun.wait(PATIENCE_S)
    assert at_once(lambda: states.forget("t", f"run {which}")) >= 1
    assert not states.describe("t", f"run {which}")
    writer.go.set()
    rest = {f"run {i}" for i in range(4)} - {f"run {which}"}
    assert left(machine) == (rest, rest, 3)
    assert len(machine.tiers.host.index) == 3
    machine.tiers.close()
    again = Machine(tmp_path, 80, 80)
    assert left(again)[1] == rest
    again.tiers.close()


def test_a_branch_and_a_pin_reach_a_file_that_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is written as what it was; for whom it is kept stands beside it afterwards."""
    writer = HeldWriter(monkeypatch)
    machine = Machine(tmp_path, 80, 80)
    states = States(machine.checkpoints, machine.pool, machine.tiers, machine.clock, 0.5, 1)
    machine.run(machine.ask(TEXTS[0], "run"))
    machine.checkpoints.copy_some(1 << 20)
    machine.tiers.settle(copies=True)
    assert writer.begun.wait(PATIENCE_S)
    assert at_once(lambda: states.branch("t", "run", "twin", 1 << 30, "00ff")) == 256
    assert at_once(lambda: states.pin("t", "run", True)) == 2  # device and host so far
    at_once(lambda: states.forget("t", "run"))
    writer.go.set()
    assert left(machine)[:2] == ({"twin"}, {"twin"})
    machine.tiers.close()
    again = Machine(tmp_path, 80, 80)
    assert again.tiers.disk is not None
    (file,) = again.tiers.disk.of("t")
    assert (file.names(), file.pinned) == ([("twin", "00ff")], True)
    again.tiers.close()


def test_operations_on_states_leave_the_disk_to_other_threads(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's thread neither writes nor removes files, and they are as told when the call
    returns.
    """
    engine = Engine(
        EngineConfig(
            model=str(checkpoint), max_prompt_tokens=768, max_request_tokens=1024, pin_share=0.5,
            max_round_tokens=256, host_bytes=8 << 20, disk_folder=tmp_path,
        )
    )  # fmt: skip
    threads: set[str] = set()
    for where, name in ((disk_file.os, "fsync"), (Path, "unlink"), (Path, "replace")):
        called = getattr(where, name)

        def noted(*given: Any, called: Any = called, **more: Any) -> Any:
            threads.add(threading.current_thread().name)
            return called(*given, **more)

        monkeypatch.setattr(where, name, noted)
    try:
        question = {"type": "noul", "instructions": "Is it so?"}
        for words in (30, 60):
            state = " ".join(f"it says {i}" for i in range(words))
            engine.submit({"state": state, "questions": {"q": question}}, name="run").result(60)
        engine._loop.call(lambda: engine._checkpoints.copy_some(1 << 40))
        engine._loop.call(lambda: engine._tiers and engine._tiers.settle(copies=True, writes=True))
        written = list(tmp_path.rglob("*.checkpoint"))
        assert written
        last = engine.snapshot("run")
        names = list(tmp_path.rglob("*.names"))
        assert any('"pinned": true' in path.read_text() for path in names)
        assert engine.branch("run", "twin", last) == last
        assert any("twin" in path.read_text() for path in tmp_path.rglob("*.names"))
        assert engine.pin("run", pinned=False)
        assert engine.rollback("twin", last - 1) > 0
        assert engine.forget("run") > 0
        assert not list(tmp_path.rglob("*.checkpoint"))
    finally:
        engine.close()
    assert threads
    assert "flide-engine" not in threads
