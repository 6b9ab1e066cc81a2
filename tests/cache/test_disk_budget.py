"""What the disk tier keeps of a folder: no more than its budget, whoever wrote the files."""

import os
from pathlib import Path

import pytest
import torch

from flide_engine.cache.disk_file import NAMES
from flide_engine.cache.index import grain_keys
from tests.cache.test_tiers import disk_of, saved, text


def size_of(folder: Path) -> int:
    """Bytes of all files."""
    return sum(path.stat().st_size for path in folder.iterdir())


def test_files_of_other_weights_count_and_go_first_the_oldest_before(tmp_path: Path) -> None:
    """They stay while there is room; then they make way for ours, one after the other."""
    theirs = disk_of(tmp_path, weights="old")
    ages = {}
    for seed in range(3):
        before = set(tmp_path.iterdir())
        saved(theirs, 4, seed)
        (path,) = set(tmp_path.iterdir()) - before
        os.utime(path, (1000 - seed, 1000 - seed))  # the last one written is the oldest
        ages[seed] = path
    theirs.pin("t", "s", None, True)
    theirs.flush()
    one = size_of(tmp_path) // 3
    ours = disk_of(tmp_path, budget=5 * one)
    assert ours.bytes_held >= 3 * (one - 300)
    saved(ours, 4, 10)
    assert all(path.exists() for path in ages.values())
    for seed in (11, 12):
        saved(ours, 4, seed)
    assert [path.exists() for path in ages.values()] == [True, True, False]
    assert not ages[2].with_suffix(NAMES).exists()
    for seed in (13, 14, 15):
        saved(ours, 4, seed)
    assert not any(path.exists() for path in ages.values())
    assert ours.bytes_held <= ours.budget
    assert ours.bytes_held + ours.of("t")[0].size > ours.budget  # no more than need be has gone


def test_a_smaller_budget_holds_from_the_start(tmp_path: Path) -> None:
    """Files of ours and of others that are too many are removed then."""
    saved(disk_of(tmp_path, weights="old"), 4)
    first = disk_of(tmp_path)
    for seed in range(4):
        saved(first, 4, seed)
    again = disk_of(tmp_path, budget=size_of(tmp_path) // 2)
    assert 0 < size_of(tmp_path) <= again.budget
    assert len(again) == 2


@pytest.mark.parametrize("at", [5, -43], ids=["header", "pages"])
def test_what_was_refused_counts_and_goes_first(tmp_path: Path, at: int) -> None:
    """Until it does it lies there for whoever wants to look; a good file may take its name."""
    disk = disk_of(tmp_path)
    saved(disk, 4)
    (path,) = tmp_path.iterdir()
    saved(disk, 5)
    held = disk.bytes_held
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)
    keys = grain_keys(text(5))
    assert disk.load("t", keys, text(5)) is None
    assert len(disk) == 0
    assert disk.bytes_held == held == size_of(tmp_path)
    pages = saved(disk, 4)
    loaded = disk.load("t", keys[:4], text(4))
    assert loaded is not None
    assert torch.equal(loaded.pages, pages)
    assert disk.bytes_held == size_of(tmp_path)
    tight = disk_of(tmp_path, budget=path.stat().st_size)
    assert tight.bytes_held == size_of(tmp_path) == path.stat().st_size


def test_a_file_that_comes_again_is_kept_for_whom_it_is_written_for(tmp_path: Path) -> None:
    """Not for those whom an earlier one of the same name was kept for, also after a restart."""
    disk = disk_of(tmp_path)
    saved(disk, 4)
    disk.pin("t", "s", None, True)
    disk.branch("t", "s", 256, "twin", "")
    disk.flush()
    assert disk.forget("t", "s") == disk.forget("t", "twin") == 1
    saved(disk, 4, name="new")  # before the folder knows
    for tier in (disk, disk_of(tmp_path)):
        (file,) = tier.of("t")
        assert (file.names(), file.pinned) == ([("new", "")], False)
    assert disk.forget("t", "new") == 1
    assert list(tmp_path.iterdir())
    disk.flush()
    assert not list(tmp_path.iterdir())
