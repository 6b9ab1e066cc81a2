"""Engines that share a folder each have a part of it, and find it again."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from flide_engine.cache.own_folder import OwnFolder
from flide_engine.errors import ConfigError
from tests.cache.machine import Machine


def test_each_has_its_own_and_the_next_gets_what_was_left(tmp_path: Path) -> None:
    """The first free one, and of those the one with files of its kind."""
    a, b, c = (OwnFolder(tmp_path, kind) for kind in ("one", "two", "one"))
    assert len({a.path, b.path, c.path}) == 3
    for folder in (a, b, c):
        folder.release()
        folder.release()
    assert OwnFolder(tmp_path, "two").path == b.path
    again = [OwnFolder(tmp_path, "one") for _ in range(3)]
    assert [folder.path for folder in again] == [a.path, c.path, b.path]
    assert OwnFolder(tmp_path, "three").path not in {a.path, b.path, c.path}


def test_who_is_killed_leaves_its_folder_to_the_next(tmp_path: Path) -> None:
    """The lock goes with the process."""
    code = (
        "import sys, time; from pathlib import Path;"
        "from flide_engine.cache.own_folder import OwnFolder;"
        "mine = OwnFolder(Path(sys.argv[1]), 'one'); print(mine.path, flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    taken = Path(process.stdout.readline().decode().strip())
    beside = OwnFolder(tmp_path, "one")
    assert beside.path != taken
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert OwnFolder(tmp_path, "one").path == taken


def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    """As an option that does not fit the machine."""
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(ConfigError, match="disk_folder .*file"):
        OwnFolder(tmp_path / "file", "one")


def test_two_engines_on_one_folder(tmp_path: Path) -> None:
    """Neither touches what the other writes or counts it, and after a restart both go on."""
    texts = [np.arange(i, i + 256, dtype=np.int32) for i in range(2)]
    machines = [Machine(tmp_path, 40, 40) for _ in texts]
    for i, (machine, text) in enumerate(zip(machines, texts, strict=True)):
        machine.run(machine.ask(text, f"run {i}"))
        machine.checkpoints.copy_some(1 << 20)
        machine.tiers.settle(copies=True, writes=True)
    disk = machines[0].tiers.disk
    assert disk is not None
    file = next(disk._folder.glob("*.checkpoint"))
    part = file.with_name(f"{file.name}.1-1.part")
    part.write_bytes(b"half")
    third = Machine(tmp_path, 40, 40)
    assert part.exists()
    assert third.tiers.sizes()["disk", "file"][0] == 0
    for machine in (third, *machines):
        machine.tiers.close()
    again = [Machine(tmp_path, 40, 40) for _ in texts]
    assert not part.exists()
    for machine, text in zip(again, texts, strict=True):
        assert machine.run(machine.ask(text, "run")) == len(text)
        machine.tiers.close()
