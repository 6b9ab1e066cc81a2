"""What may leave the device: nothing with pages of a request that may yet turn out at fault."""

from pathlib import Path

import numpy as np
import torch

from flide_engine.layout.plan import Anchor
from flide_engine.work import RequestWork
from tests.cache.machine import Machine, mark

TEXT = np.arange(4 * 64, dtype=np.int32)


def left(machine: Machine, work: RequestWork) -> None:
    """A request computes all of its state itself, as if it had begun before others left theirs."""
    machine.checkpoints.release(work)
    pages, slots = machine.checkpoints.take(len(work.keys), 1)
    held = torch.tensor([mark(key) for key in work.keys])
    machine.pool.tensors.keys[0, machine.pool.places(pages), 0, 0, 0] = held
    machine.pool.tensors.recurrent_state[0, int(slots[0])] = mark(work.keys[-1])
    machine.checkpoints.keep(work, Anchor(64 * len(work.keys), int(slots[0]), pages))
    machine.pool.pages.release(pages)
    machine.pool.slots.release(slots)


def two_at_once(machine: Machine) -> tuple[RequestWork, RequestWork]:
    """Requests about one beginning, of which each computed it; the pages of the first are kept."""
    first, second = machine.ask(TEXT[:128], "first"), machine.ask(TEXT, "second")
    left(machine, first)
    left(machine, second)
    return first, second


def copied(machine: Machine) -> list[int]:
    """Tokens of what is on the host once copies are made."""
    machine.checkpoints.copy_some(1 << 20)
    machine.tiers.settle(copies=True, writes=True)
    return sorted(c.position for c in machine.tiers.host.index)


def test_who_is_done_first_waits_for_the_other(tmp_path: Path) -> None:
    """Its own values say nothing of pages that it did not read."""
    machine = Machine(tmp_path, 40, 40)
    first, second = two_at_once(machine)
    machine.checkpoints.trust(second)
    assert copied(machine) == []
    machine.checkpoints.trust(first)
    assert copied(machine) == [128, 256]
    machine.tiers.close()


def test_what_holds_pages_at_fault_stays_until_somebody_reads_it(tmp_path: Path) -> None:
    """Also after whoever computed them was told, and theirs were forgotten."""
    machine = Machine(tmp_path, 40, 40)
    first, second = two_at_once(machine)
    machine.checkpoints.distrust(first)
    machine.checkpoints.trust(second)
    assert copied(machine) == []
    machine.run(machine.ask(np.append(TEXT, TEXT[:64]), "third"))
    assert copied(machine) == [256, 320]
    machine.tiers.close()


def test_a_copy_that_is_joined_to_pages_of_others_is_not_sound_before_they_are(
    tmp_path: Path,
) -> None:
    """It comes back from the host without the grains that the device knows."""
    machine = Machine(tmp_path, 40, 40)
    machine.run(machine.ask(TEXT, "run"))
    assert copied(machine) == [256]
    machine.checkpoints.free(
        machine.checkpoints.index.remove(next(iter(machine.checkpoints.index)))
    )
    other = machine.ask(TEXT[:128], "other")
    left(machine, other)
    work = machine.ask(TEXT, "run")
    assert work.resume is not None
    back = work.resume.checkpoint
    assert back.position == 256
    assert not back.trusted
    machine.checkpoints.trust(other)
    assert back.trusted
    machine.checkpoints.release(work)
    machine.tiers.close()
