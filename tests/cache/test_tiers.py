"""Host memory and disk hold what the device held, bit for bit, and refuse what is not theirs."""

import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from flide_engine.cache.disk import DiskTier
from flide_engine.cache.disk_file import SUFFIX
from flide_engine.cache.host import HostTier
from flide_engine.cache.index import grain_keys
from flide_engine.cache.names import Named
from flide_engine.cache.pool import Pool
from flide_engine.cache.rows import move_rows
from flide_engine.errors import ConfigError
from flide_engine.layout.plan import Ints
from flide_engine.layout.state_shape import StateShape
from tests.cache.machine import Machine
from tests.waiting import PATIENCE_S

SHAPE = StateShape(2, 1, 8, 3, 2, 16, 16, 20, 3)
CPU = torch.device("cpu")


def full_pool(dtype: torch.dtype = torch.bfloat16) -> Pool:
    """Random contents everywhere; pages 0 .. 11 and slots 0 .. 3 are held."""
    pool = Pool(SHAPE, 32, dtype, CPU)
    pool.rows.copy_(torch.randint(0, 256, pool.rows.shape, dtype=torch.uint8))
    pages, slots = pool.take(12, 4)
    assert (sorted(pages), sorted(slots)) == (list(range(12)), list(range(4)))
    return pool


def text(grains: int, seed: int = 0) -> Ints:
    """Tokens of some whole grains; equal seeds begin alike."""
    return np.random.default_rng(seed).integers(0, 99, 64 * 9).astype(np.int32)[: 64 * grains]


def host_of(pool: Pool, rows: int) -> HostTier:
    """A host tier of so many rows."""
    row = SHAPE.unit_bytes(pool.dtype.itemsize)
    return HostTier(pool, rows * row, clock=iter(range(10**6)).__next__)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pages_and_slots_survive_as_bytes(dtype: torch.dtype) -> None:
    """Out of one pool and into another, in another place: the kernels' tensors hold the same."""
    ours, theirs = full_pool(dtype), full_pool(dtype)
    a, b = np.array([3, 9], np.int32), np.array([7, 2], np.int32)
    move_rows(theirs.rows, theirs.places(b), ours.rows, ours.places(a))
    assert torch.equal(ours.page_bytes(a), theirs.page_bytes(b))
    theirs.slot_bytes(1).copy_(ours.slot_bytes(2))
    for name in ("keys", "values"):
        from_, to = getattr(ours.tensors, name), getattr(theirs.tensors, name)
        assert same_bits(from_[:, ours.places(a)], to[:, theirs.places(b)])
    for name in ("recurrent_state", "conv_state"):
        from_, to = getattr(ours.tensors, name), getattr(theirs.tensors, name)
        assert same_bits(from_[:, 2], to[:, 1])


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Also where both are NaN."""
    return torch.equal(*(t.contiguous().view(torch.uint8) for t in (a, b)))


def test_a_copy_holds_what_it_was_made_of_and_shares_what_it_can() -> None:
    """The longer of two checkpoints adds its own page and state only."""
    pool = full_pool()
    host = host_of(pool, 20)
    tokens = text(3)
    keys = grain_keys(tokens)
    pages = np.array([4, 8, 1], np.int32)
    assert host.store("t", "", tokens[:128], keys[:2], pool, pages[:2], 0)
    held = host.bytes_held
    stored = host.store("t", "s", tokens, keys, pool, pages, 3)
    assert stored is not None
    longer = stored.copy
    stored.event.wait()
    assert stored.moved == SHAPE.page_bytes(2) + SHAPE.slot_bytes(2)
    assert host.bytes_held - held == held - host._row  # a page less than the first took
    copied = host.read(*host.rows_of(longer))
    assert torch.equal(copied.pages, pool.page_bytes(pages))
    assert torch.equal(copied.state, pool.slot_bytes(3))
    assert host.match("other", tokens, keys, 192).checkpoint is None
    again = host.store("t", "s", tokens, keys, pool, pages, 3)
    assert again is not None
    assert again.copy is longer
    assert again.moved == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rounded_states_take_half_and_round_once(dtype: torch.dtype) -> None:
    """Recurrent states come back as the nearest bfloat16, convolution rows and pages as they were;
    a second way there and back changes nothing.
    """
    pool = full_pool(dtype)
    pool.tensors.recurrent_state.normal_(std=30.0)
    want = pool.tensors.recurrent_state[:, 2].clone()
    conv, keys = pool.tensors.conv_state[:, 2].clone(), pool.page_bytes(np.array([5], np.int32))
    host = HostTier(pool, 1 << 20, iter(range(10**6)).__next__, rounded=True)
    states = want.numel() * 4
    assert host.format.size == SHAPE.slot_bytes(dtype.itemsize) - states // 2
    pages = np.array([5], np.int32)
    for seed, (slot, back) in enumerate(((2, 3), (3, 1))):
        tokens = text(1, seed)
        stored = host.store("t", "", tokens, grain_keys(tokens), pool, pages, slot)
        assert stored is not None
        pool.slot_bytes(back).fill_(255)
        host.restore(stored[0], 0, pool, np.array([6], np.int32), back)
        assert torch.equal(pool.tensors.recurrent_state[:, back], want.bfloat16().float())
        assert not torch.equal(pool.tensors.recurrent_state[:, back], want)
        assert same_bits(pool.tensors.conv_state[:, back], conv)
        assert torch.equal(pool.page_bytes(np.array([6], np.int32)), keys)
        copied = host.read(*host.rows_of(stored[0]))
        assert len(copied.state) == host.format.size


def test_a_full_host_gives_up_what_is_not_locked() -> None:
    """The old one goes; with everything locked the new one is not taken."""
    pool = full_pool()
    host = host_of(pool, 2 * (2 + pool.slot_units))
    made = []
    for seed in range(3):
        tokens = text(2, seed)
        pages = np.array([1, 2], np.int32)
        stored = host.store("t", "", tokens, grain_keys(tokens), pool, pages, seed)
        assert stored is not None
        made.append(stored[0])
    assert made[2] in host.index
    assert made[0] not in host.index
    for checkpoint in host.index:
        checkpoint.locks += 1
    tokens = text(2, 9)
    keys = grain_keys(tokens)
    assert host.store("t", "", tokens, keys, pool, np.array([1, 2], np.int32), 0) is None
    for checkpoint in host.index:
        checkpoint.locks -= 1
    tokens, pages = text(9), np.arange(9, dtype=np.int32)
    assert len(pages) + pool.slot_units > len(host._rows)
    assert host.store("t", "", tokens, grain_keys(tokens), pool, pages, 0) is None
    assert len(host.index) == 2, "others went for what cannot fit"
    with pytest.raises(ConfigError, match="host_bytes 5000 holds 1 rows of 4096 bytes"):
        HostTier(pool, 5000, clock=lambda: 0.0)


def disk_of(
    folder: Path, weights: str = "w1", budget: int = 1 << 30, stack: str = "s1"
) -> DiskTier:
    """A disk tier."""
    made = {"weights": weights, "stack": stack, "layout": "layout"}
    return DiskTier(folder, budget, made, clock=iter(range(10**6)).__next__)


def saved(disk: DiskTier, grains: int, seed: int = 0, name: str = "s") -> torch.Tensor:
    """Saves a checkpoint of random contents: its pages."""
    tokens = text(grains, seed)
    pages = torch.arange(9 * 16, dtype=torch.uint8).reshape(9, 16)[:grains] + seed
    state = torch.full((40,), grains, dtype=torch.uint8)
    coming = disk.announce("t", Named(name=name), len(tokens))
    disk.save(coming, grain_keys(tokens), tokens, lambda first: (pages[first:], state))
    return pages


def test_disk_outlives_the_process_and_writes_what_is_new_only(tmp_path: Path) -> None:
    """Two steps of a state are two files, the second without the first's pages."""
    disk = disk_of(tmp_path)
    saved(disk, 4)
    first = disk.bytes_held
    pages = saved(disk, 5)
    assert disk.bytes_held < 2 * first
    again = disk_of(tmp_path)
    tokens = text(5)
    keys = grain_keys(tokens)
    assert again.longest("t", keys, 10**6) == 320
    assert again.longest("t", keys, 319) == 256
    assert again.longest("other", keys, 10**6) == 0
    loaded = again.load("t", keys, tokens)
    assert loaded is not None
    assert torch.equal(loaded.pages, pages)
    assert loaded.state.tolist() == [5] * 40
    assert sorted((f.name, f.position) for f in again.of("t"))[0] == ("s", 256)
    assert sum(f.size for f in again.of("t", "s")) == again.bytes_held


def test_of_what_a_file_continues_no_state_is_read(tmp_path: Path) -> None:
    """A history of many steps is read once, not with the state of each step; that of an earlier one
    is looked at when it is asked for.
    """
    disk = disk_of(tmp_path)
    saved(disk, 4)
    path = next(tmp_path.iterdir())
    pages = saved(disk, 5)
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)
    again, tokens = disk_of(tmp_path), text(5)
    keys = grain_keys(tokens)
    loaded = again.load("t", keys, tokens)
    assert loaded is not None
    assert torch.equal(loaded.pages, pages)
    assert loaded.state.tolist() == [5] * 40
    assert again.load("t", keys[:4], tokens[:256]) is None
    assert again.refused == 1
    assert again.longest("t", keys, 10**6) == 0


@pytest.mark.parametrize("at", ["length", "header", "places", "tokens", "pages", "end"])
def test_damage_is_refused_and_so_is_what_follows_from_it(tmp_path: Path, at: str) -> None:
    """A flipped bit before its state, or a missing end: neither the file nor one that continues it
    is used.
    """
    disk = disk_of(tmp_path)
    saved(disk, 4)
    path = next(tmp_path.iterdir())
    saved(disk, 5)
    data = bytearray(path.read_bytes())
    begin = 8 + int.from_bytes(data[:8], "little")
    places = {
        "length": 5, "header": 300, "places": data.index(b"data_offsets") + 15,
        "tokens": begin + 9, "pages": begin + 256 * 4 + 9, "end": 0,
    }  # fmt: skip
    if at == "end":
        del data[begin + 256 * 4 + 9 :]
    else:
        data[places[at]] ^= 4
    path.write_bytes(data)
    again = disk_of(tmp_path)
    tokens = text(5)
    assert again.load("t", grain_keys(tokens), tokens) is None
    assert again.refused
    assert again.longest("t", grain_keys(tokens), 10**6) == 0


def test_other_weights_other_tokens_and_torn_writes(tmp_path: Path) -> None:
    """Foreign files stay untouched and unused; leftovers of a stopped process go."""
    saved(disk_of(tmp_path), 4)
    (tmp_path / f"half{SUFFIX}.1-2.part").write_bytes(b"torn")
    foreign = disk_of(tmp_path, weights="w2")
    assert len(foreign) == 0
    assert foreign.refused == 1
    assert len(list(tmp_path.iterdir())) == 1
    ours = disk_of(tmp_path)
    other = text(4).copy()
    other[70] += 1
    assert ours.load("t", grain_keys(text(4)), other) is None


@pytest.mark.parametrize("other", ["stack", "format"])
def test_what_was_computed_otherwise_is_foreign(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, other: str
) -> None:
    """Of another version or card, or of before files told that."""
    if other == "stack":
        saved(disk_of(tmp_path, stack="s0"), 4)
    else:
        monkeypatch.setattr("flide_engine.cache.disk.FORMAT", "flide-disk-2")
        old = {"weights": "w1", "layout": "layout"}
        saved(DiskTier(tmp_path, 1 << 30, old, clock=iter(range(10**6)).__next__), 4)
        monkeypatch.undo()
    disk = disk_of(tmp_path)
    tokens = text(4)
    assert disk.longest("t", grain_keys(tokens), 10**6) == 0
    assert disk.load("t", grain_keys(tokens), tokens) is None
    assert disk.refused == 1
    assert disk.bytes_held > 0
    assert f"its {'stack' if other == 'stack' else 'format, stack'} differ" in caplog.text


def test_the_budget_removes_ends_of_chains_first_and_forgetting_removes_all(tmp_path: Path) -> None:
    """A file that others continue is never removed before them."""
    disk = disk_of(tmp_path)
    for grains in (2, 3, 4):
        saved(disk, grains)
    tight = disk_of(tmp_path, budget=disk.bytes_held)
    saved(tight, 2, seed=1, name="other")
    keys = grain_keys(text(4))
    assert 0 < tight.longest("t", keys, 10**6) < 256
    assert tight.load("t", grain_keys(text(2)), text(2)) is not None
    assert tight.bytes_held <= disk.bytes_held
    assert tight.forget("t", "s")
    assert not tight.forget("t", "s")
    tight.flush()
    assert tight.longest("t", keys, 10**6) == 0
    assert [p.suffix for p in tmp_path.iterdir()] == [SUFFIX]


def test_a_look_for_files_waits_for_nobody_and_goes_no_further_than_it_must(tmp_path: Path) -> None:
    """Whoever renders a request looks while files are being noted; what is no longer than what is
    known already is not found.
    """
    disk = disk_of(tmp_path)
    for grains in (2, 4):
        saved(disk, grains)
    keys, found = grain_keys(text(5)), list[int]()
    look = threading.Thread(
        target=lambda: found.extend(disk.longest("t", keys, 320, least) for least in (0, 255, 256)),
        daemon=True,
    )
    with disk._lock:
        look.start()
        look.join(PATIENCE_S)
        assert found == [256, 256, 0]


def test_copies_after_a_round_are_bounded_by_all_that_they_move(tmp_path: Path) -> None:
    """Pages and states; the rest is copied another time, and what two share once."""
    machine = Machine(tmp_path, 60, 60)
    texts = [np.arange(i, i + 4 * 64, dtype=np.int32) for i in range(3)]
    for i, tokens in enumerate(texts):
        machine.run(machine.ask(tokens, f"run {i}"))
    machine.run(machine.ask(np.append(texts[2], np.arange(64, dtype=np.int32)), "run 2"))
    page = machine.pool.shape.page_bytes(4)
    state = machine.pool.shape.slot_bytes(4)
    copied = []
    for most in (1, 4 * page + state, 4 * page + state + 1, page + state):
        machine.checkpoints.copy_some(most)
        copied.append(len(machine.tiers.host.index))
    assert copied == [1, 2, 4, 4]
    machine.tiers.close()
