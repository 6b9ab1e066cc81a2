"""A copy that is asked for again while it is being made is not there before it is made."""

from pathlib import Path

import numpy as np

from tests.cache.late_copies import LateCopies
from tests.cache.machine import Machine

TEXT = np.arange(6 * 64, dtype=np.int32)


def assert_disk_is_right(folder: Path, grains: int) -> None:
    """Another process finds so many grains of the text there, and what they must hold."""
    again = Machine(folder, 80, 60)
    assert again.run(again.ask(TEXT[: 64 * grains], "again")) == 64 * grains
    again.tiers.close()


def test_what_two_requests_left_and_used_is_copied_once(tmp_path: Path) -> None:
    """One resumes from what the other has left so far, and is done first."""
    machine = Machine(tmp_path, 80, 60, late=LateCopies())
    first = machine.ask(TEXT[:192], "a")
    machine.round(first)
    second = machine.ask(TEXT, "b")
    assert machine.round(second) == 192
    for work in (second, first):
        machine.checkpoints.trust(work)
        machine.checkpoints.release(work)
    assert sorted(c.position for c in machine.checkpoints._to_copy) == [192, 384]
    machine.checkpoints.copy_some(1 << 20)
    machine.tiers.close()
    assert_disk_is_right(tmp_path, 6)


def test_a_copy_that_is_being_made_is_not_written_yet(tmp_path: Path) -> None:
    """Its file would hold what was in host memory before, with a checksum that agrees, and answers
    would be wrong over restarts.
    """
    late = LateCopies()
    machine = Machine(tmp_path, 80, 60, late=late)
    machine.run(machine.ask(TEXT, "a"))
    (checkpoint,) = machine.checkpoints.index
    assert machine.checkpoints._copy(checkpoint) > 0
    assert machine.checkpoints._copy(checkpoint) == 0
    assert (late.begun, late.done) == (1, 0)
    assert not machine.tiers._writes
    machine.tiers.close()
    assert_disk_is_right(tmp_path, 6)
