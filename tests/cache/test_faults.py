"""What goes wrong on the way leaves nothing taken and nothing locked."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load, save

from flide_engine.cache.index import Checkpoint
from flide_engine.cache.transfer import _checksum, read
from flide_engine.errors import CheckpointRefused, PoolExhausted
from flide_engine.states import States
from tests.cache.late_copies import LateCopies
from tests.cache.machine import ORIGIN, Machine, mark

TEXT = np.arange(4 * 64, dtype=np.int32)


def machine_with_a_copy(folder: Path) -> tuple[Machine, Checkpoint]:
    """A state on the host and not on the device."""
    machine = Machine(folder, 40, 40)
    machine.run(machine.ask(TEXT, "run"))
    machine.checkpoints.copy_some(1 << 20)
    machine.tiers.settle(copies=True, writes=True)
    for checkpoint in list(machine.checkpoints.index):
        machine.checkpoints.free(machine.checkpoints.index.remove(checkpoint))
    (held,) = machine.tiers.host.index
    return machine, held


def states_of(machine: Machine) -> States:
    """The states of a machine by name."""
    return States(machine.checkpoints, machine.pool, machine.tiers, machine.clock, 0.5, 1)


def assert_balanced(machine: Machine) -> None:
    """With its checkpoints forgotten nothing is held, on the device and on the host."""
    machine.checkpoints.drop_all()
    assert machine.pool.free == machine.pool.units
    assert machine.tiers.host.bytes_held == 0
    machine.tiers.close()


def test_a_copy_that_the_device_has_got_meanwhile_takes_nothing(tmp_path: Path) -> None:
    """It was listed when only the host had it, and is asked for after a request brought it back."""
    machine, _ = machine_with_a_copy(tmp_path)
    states = states_of(machine)
    (leaf,) = states.leaves()
    assert machine.run(machine.ask(TEXT, "run")) == len(TEXT)
    (here,) = machine.checkpoints.index
    used = here.used
    parcel = states.copied_leaf(leaf)
    data = parcel and states.write(parcel, ORIGIN)
    assert data is not None
    assert read(data, machine.pool, ORIGIN).position == len(TEXT)
    assert list(machine.checkpoints.index) == [here]
    assert here.used == used
    assert_balanced(machine)


def test_a_copy_that_cannot_be_made_keeps_nothing_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither on its way for a request nor for another engine."""
    machine, held = machine_with_a_copy(tmp_path)

    def broken(*_: object) -> None:
        raise OSError("injected")

    with monkeypatch.context() as patched:
        patched.setattr(machine.tiers, "restore", broken)
        with pytest.raises(OSError, match="injected"):
            machine.ask(TEXT, "run")
        with pytest.raises(OSError, match="injected"):
            machine.checkpoints.bring_copy(held)
    assert held.locks == 0
    assert machine.pool.free == machine.pool.units
    assert machine.run(machine.ask(TEXT, "run")) == len(TEXT)
    assert_balanced(machine)


def more_than(machine: Machine, units: int) -> PoolExhausted:
    """A round that lacks so many units."""
    pool = machine.pool
    return PoolExhausted("units", pool.free + units, pool.free, pool.units)


def full(machine: Machine) -> None:
    """The device gives up every checkpoint that is not in use."""
    while machine.checkpoints.make_room(more_than(machine, 1)):
        pass
    machine.tiers.settle(copies=True, writes=True)


def test_what_is_given_up_before_it_is_trusted_leaves_no_copy(tmp_path: Path) -> None:
    """Its request has rounds to come, and only the last one tells whether it is sound."""
    machine = Machine(tmp_path, 40, 40)
    work = machine.ask(TEXT, "run")
    machine.round(work)
    assert len(machine.checkpoints.index) == 1
    full(machine)
    assert not machine.checkpoints.index
    machine.checkpoints.trust(work)
    machine.checkpoints.copy_some(1 << 20)
    assert not machine.tiers.host.index
    assert machine.tiers.fetch("t", TEXT, work.keys, len(TEXT)) is None
    machine.run(machine.ask(TEXT, "run"))
    full(machine)
    assert len(machine.tiers.host.index) == 1
    assert machine.tiers.fetch("t", TEXT, work.keys, len(TEXT)) is not None
    assert_balanced(machine)


def test_who_goes_on_from_what_was_left_unfinished_tells_that_it_is_sound(tmp_path: Path) -> None:
    """A request that ends early leaves checkpoints nothing was read after. They, and those before
    them, are copied once another was answered from them.
    """
    machine = Machine(tmp_path, 60, 60)
    for grains in (2, 4):
        left = machine.ask(TEXT[: 64 * grains], "run")
        machine.round(left)
        machine.checkpoints.release(left)
    machine.checkpoints.copy_some(1 << 20)
    assert not machine.tiers.host.index
    longer = np.append(TEXT, TEXT[:64])
    assert machine.run(machine.ask(longer, "run")) == len(TEXT)
    machine.checkpoints.copy_some(1 << 20)
    assert sorted(c.position for c in machine.tiers.host.index) == [128, 256, 320]
    assert_balanced(machine)


def test_a_checkpoint_at_fault_is_dropped_on_every_tier(tmp_path: Path) -> None:
    """Else each request of its state would find the copy, and be computed twice."""
    machine, held = machine_with_a_copy(tmp_path)
    (here,) = tmp_path.rglob("*.checkpoint")
    work = machine.ask(TEXT, "run")
    machine.round(work)
    machine.checkpoints.distrust(work)
    assert held in machine.tiers.host.index
    machine.run(work)
    assert not machine.checkpoints.index
    assert not machine.tiers.host.index
    assert machine.tiers.fetch("t", TEXT, work.keys, len(TEXT)) is None
    machine.tiers.flush()
    assert not here.exists()
    assert machine.run(machine.ask(TEXT, "run")) == 0
    machine.checkpoints.copy_some(1 << 20)
    machine.tiers.settle(copies=True, writes=True)
    assert here.exists()
    assert_balanced(machine)


def test_what_is_forgotten_while_it_is_in_use_keeps_its_pages(tmp_path: Path) -> None:
    """A longer one continues it, takes its pages over and is given up, while a request of several
    rounds still reads them: another tenant's round must not get them.
    """
    machine = Machine(tmp_path, 40, 40)
    checkpoints, pool = machine.checkpoints, machine.pool
    at_fault = machine.ask(TEXT, "a")
    machine.round(at_fault)
    longer = machine.ask(np.append(TEXT, TEXT), "b")
    machine.round(longer)
    checkpoints.release(longer)
    reading = machine.ask(np.append(TEXT, TEXT[::-1]), "c")
    assert reading.resume is not None
    anchor = reading.resume.anchor
    assert anchor.position == len(TEXT)
    checkpoints.distrust(at_fault)
    full(machine)
    assert not checkpoints.index
    pages, slots = pool.take(pool.free, 0)
    pool.tensors.keys[:, pool.places(pages)] = -1
    held = pool.tensors.keys[0, pool.places(anchor.pages), 0, 0, 0].tolist()
    assert held == [mark(key) for key in reading.keys[: len(anchor.pages)]]
    pool.pages.release(pages)
    pool.slots.release(slots)
    checkpoints.release(reading)
    assert_balanced(machine)


def test_what_cannot_be_met_gives_up_nothing(tmp_path: Path) -> None:
    """A round that does not fit beside what is in use, pinned, or held by a long request."""
    machine = Machine(tmp_path, 60, 60)
    checkpoints, pool = machine.checkpoints, machine.pool
    for i in range(6):
        machine.run(machine.ask(TEXT + 1000 * i, f"run {i}"))
    locked, pinned, held, *_ = checkpoints.index
    each = len(TEXT) // 64 + pool.slot_units
    locked.locks += 1
    pinned.pinned = True
    pool.slots.retain(np.array([held.slot], np.int32))
    pool.pages.retain(checkpoints.index.pages_of(held))
    assert not checkpoints.make_room(more_than(machine, 3 * each + 1))
    assert len(checkpoints.index) == 6
    assert checkpoints.make_room(more_than(machine, 3 * each))
    assert {locked, pinned} <= set(checkpoints.index)
    machine.tiers.close()


def test_room_waits_for_what_is_being_copied(tmp_path: Path) -> None:
    """A copy locks its checkpoint, also one that is forgotten meanwhile."""
    machine = Machine(tmp_path, 20, 60, late=LateCopies())
    work = machine.ask(TEXT, "run")
    machine.run(work)
    machine.checkpoints.copy_some(1 << 20)
    (checkpoint,) = machine.checkpoints.index
    assert checkpoint.locks
    work.suspect = checkpoint
    machine.checkpoints.trust(work)
    assert not machine.checkpoints.index
    assert machine.checkpoints.make_room(more_than(machine, len(TEXT) // 64))
    assert machine.pool.free == machine.pool.units
    machine.tiers.close()


def test_what_nothing_was_read_after_is_handed_to_nobody(tmp_path: Path) -> None:
    """Another engine would take it for sound: it gets the longest that is, and nothing else, also
    of what a state was before it was rewritten.
    """
    machine = Machine(tmp_path, 60, 60)
    machine.run(machine.ask(np.arange(1000, 1320, dtype=np.int32), "run"))
    machine.run(machine.ask(TEXT[:128], "run"))
    unread = machine.ask(TEXT, "run")
    machine.round(unread)
    states = states_of(machine)
    assert [c.position for c, _, _ in states.known("t", "run")] == [320, 256, 128]
    exported = [states.copied(*one) for one in states.known("t", "run")]
    assert [parcel and parcel.position for parcel in exported] == [320, None, 128]
    assert [leaf.tokens for leaf in states.leaves()] == [128, 320]
    machine.checkpoints.trust(unread)
    machine.checkpoints.release(unread)
    leaf, other = states.leaves()
    assert (leaf.tokens, other.tokens) == (256, 320)
    parcel = states.copied_leaf(leaf)
    assert parcel is not None
    assert parcel.position == 256
    assert_balanced(machine)


def parcel_of(machine: Machine) -> bytes:
    """The machine's state for another engine."""
    states = states_of(machine)
    (leaf,) = states.leaves()
    parcel = states.copied_leaf(leaf)
    data = parcel and states.write(parcel, ORIGIN)
    assert data is not None
    machine.checkpoints.drop_all()
    return data


def test_a_parcel_that_cannot_be_put_in_takes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the device fails."""
    machine, _ = machine_with_a_copy(tmp_path)
    parcel = read(parcel_of(machine), machine.pool, ORIGIN)

    def broken(*_: object) -> None:
        raise RuntimeError("injected")

    with monkeypatch.context() as patched:
        patched.setattr("flide_engine.states.put_in", broken)
        with pytest.raises(RuntimeError, match="injected"):
            states_of(machine).adopt(parcel)
    assert machine.pool.free == machine.pool.units
    assert states_of(machine).adopt(parcel) == len(TEXT)
    assert_balanced(machine)


@pytest.mark.parametrize("name", ["tokens", "keys", "values", "recurrent_state", "conv_state"])
@pytest.mark.parametrize("change", ["left out", "longer", "of another type"])
def test_a_parcel_of_other_tensors_is_refused(tmp_path: Path, name: str, change: str) -> None:
    """With a checksum that agrees: what it holds is looked at before anything is taken."""
    machine, _ = machine_with_a_copy(tmp_path)
    data = parcel_of(machine)
    tensors = load(data)
    if change == "left out":
        del tensors[name]
    elif change == "longer":
        tensors[name] = torch.cat([tensors[name], tensors[name]])
    else:
        tensors[name] = tensors[name].to(torch.float64)
    with pytest.raises(CheckpointRefused, match="it is damaged"):
        read(packed(data, tensors), machine.pool, ORIGIN)
    assert_balanced(machine)


def packed(data: bytes, tensors: dict[str, torch.Tensor]) -> bytes:
    """A parcel's header, with other tensors and their checksum."""
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])["__metadata__"]
    return bytes(save(tensors, metadata={**header, "checksum": _checksum(tensors)}))
