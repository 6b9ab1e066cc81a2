"""A thousand agents on a tenth of the memory they need, killed and restarted from disk."""

import shutil
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from flide_engine.cache.index import grain_keys
from flide_engine.cache.marks import MarkPolicy
from flide_engine.cache.pool import Pool
from flide_engine.checkpoints import Checkpoints
from flide_engine.config import EngineConfig
from flide_engine.families.base import Read, Rendered
from flide_engine.layout.plan import Anchor, Ints
from flide_engine.layout.state_shape import StateShape
from flide_engine.tiers import Tiers
from flide_engine.work import RequestWork
from tests.cache.late_copies import LateCopies

SHAPE = StateShape(1, 1, 4, 1, 1, 4, 4, 12, 3)
AGENTS, STEPS, GRAINS = 1000, 4, 2


class Machine:
    """Checkpoints and tiers with a null model: a page holds what its prefix hashes to."""

    def __init__(
        self,
        folder: Path,
        units: int,
        host_rows: int,
        shape: StateShape = SHAPE,
        late: LateCopies | None = None,
    ) -> None:
        self.now = 0.0
        self.pool = Pool(shape, units, torch.float32, torch.device("cpu"), late)
        config = EngineConfig(
            host_bytes=host_rows * 4096, disk_folder=folder, disk_bytes=200_000_000
        )
        tiers = Tiers.of(config, self.pool, "weights", self.clock)
        assert tiers is not None
        self.tiers = tiers
        self.checkpoints = Checkpoints(self.pool, MarkPolicy(), True, self.clock, self.tiers)

    def clock(self) -> float:
        """Time passes with every look."""
        self.now += 1.0
        return self.now

    def ask(self, tokens: Ints, name: str) -> RequestWork:
        """One request, planned once."""
        keys = grain_keys(tokens)
        prompt = np.append(tokens, 7).astype(np.int32)
        read = Read(0, np.zeros(1, np.int32), "q")
        rendered = Rendered((prompt,), (read,), len(prompt), len(prompt), 1, len(tokens), None)
        work = RequestWork(rendered, Future(), None, None, "t", name, keys)
        if self.checkpoints.longest("t", tokens, keys, len(tokens)) == 0:
            work.loaded = self.tiers.fetch("t", tokens, keys, len(tokens))
        self.checkpoints.plan(work, 10**6)
        return work

    def run(self, work: RequestWork) -> int:
        """One round: what it resumes from is checked, the rest is computed and kept. Tokens that
        were not computed.
        """
        keys = work.keys
        self.checkpoints.plan(work, 10**6)
        self.checkpoints.await_arrival(work)
        self.checkpoints.began(work)
        anchor = work.resume.anchor if work.resume else Anchor(0, -1, np.zeros(0, np.int32))
        for page, key in zip(self.pool.places(anchor.pages), keys, strict=False):
            assert self.pool.tensors.keys[0, page, 0, 0, 0] == mark(key), "a wrong page was served"
        if anchor.position:
            state = self.pool.tensors.recurrent_state[0, anchor.slot]
            assert (state == mark(keys[anchor.position // 64 - 1])).all(), (
                "a wrong state was served"
            )
        pages, slots = self.checkpoints.take(len(keys) - len(anchor.pages), 1)
        slot = int(slots[0])
        self.pool.tensors.keys[0, self.pool.places(pages), 0, 0, 0] = torch.tensor(
            [mark(key) for key in keys[len(anchor.pages) :]]
        )
        self.pool.tensors.recurrent_state[0, slot] = mark(keys[-1])
        every = np.concatenate([anchor.pages, pages]).astype(np.int32)
        self.checkpoints.keep(work, Anchor(64 * len(keys), slot, every))
        self.pool.pages.release(pages)
        self.pool.slots.release(slots)
        self.checkpoints.trust(work)
        self.checkpoints.release(work)
        return anchor.position


def mark(key: bytes) -> float:
    """What a page of this prefix holds."""
    return float(int.from_bytes(key[:3], "little"))


def test_nothing_wrong_is_served_and_the_counts_balance(tmp_path: Path) -> None:
    """Steps at random; the machine is killed twice, once while files are being written."""
    rng = np.random.default_rng(0)
    opening = rng.integers(0, 50, 64 * GRAINS)
    texts = [
        np.concatenate([opening, rng.integers(0, 50, 64 * GRAINS * STEPS)]).astype(np.int32)
        for _ in range(AGENTS)
    ]
    need = AGENTS * (GRAINS * STEPS + 1)
    folder = tmp_path / "disk"
    machine = Machine(folder, need // 10, need // 10)
    order = rng.permutation(np.repeat(np.arange(AGENTS), STEPS))
    done = np.zeros(AGENTS, int)
    resumed = 0
    for i, agent in enumerate(order):
        if i in (len(order) // 3, 2 * len(order) // 3):
            # as a kill leaves it: what is renamed is there, a part of a file may be, too
            copied = tmp_path / f"after-{i}"
            shutil.copytree(folder, copied, ignore=shutil.ignore_patterns("*.part"))
            (copied / "torn.checkpoint.1-1.part").write_bytes(b"half")
            machine.tiers.close()
            folder = copied
            machine = Machine(folder, need // 10, need // 10)
        done[agent] += 1
        tokens = texts[agent][: 64 * GRAINS * (1 + done[agent])]
        resumed += machine.run(machine.ask(tokens, f"agent {agent}"))
        machine.checkpoints.copy_some(1 << 20)
    assert machine.checkpoints.counters.recomputed > 0
    assert resumed > 0.5 * sum(64 * GRAINS * (1 + d) for n in done for d in range(n))
    check_accounting(machine)
    machine.checkpoints.drop_all()
    machine.tiers.close()
    check_accounting(machine)
    assert machine.pool.free == machine.pool.units
    assert machine.tiers.host.bytes_held == 0
    assert machine.checkpoints.distinct_tokens()["device"] == 0


def check_accounting(machine: Machine) -> None:
    """What is told of a tier is what its checkpoints come to, each grain once."""
    machine.tiers.settle(copies=True, writes=True)
    sizes = machine.pool.accounting().by_kind() | machine.tiers.sizes()
    tokens = machine.checkpoints.distinct_tokens()
    for tier, index in (
        ("device", machine.checkpoints.index),
        ("host", machine.tiers.host.index),
    ):
        grains = {key for c in index for key in index.keys_of(c)}
        assert tokens[tier] == 64 * len(grains)
        assert sizes[tier, "page"][0] == 4096 * len(grains)
        assert sizes[tier, "slot"][0] == 4096 * len(index) * machine.pool.slot_units
    total = machine.pool.units * 4096
    assert sum(total for (tier, _), (_, total) in sizes.items() if tier == "device") == total
    disk = machine.tiers.disk
    assert disk is not None
    assert sizes["disk", "file"][0] == sum(p.stat().st_size for p in disk._folder.iterdir())
    files = [load_file(path)["tokens"] for path in disk._folder.iterdir()]
    assert tokens["disk"] == sum(map(len, files)) > 0


@pytest.mark.parametrize("seed", range(6))
def test_late_copies_serve_nothing_wrong_either(tmp_path: Path, seed: int) -> None:
    """Copies to and from the host end when they like, requests wait for each other, histories turn
    back: what a round reads was waited for, what it overwrites has been copied, and pages that
    make way for a slot take their copies along.
    """
    rng = np.random.default_rng(seed)
    shape = StateShape(1, 1, 4, 1, 1, 48, 48, 12, 3)
    agents, late = 40, LateCopies()
    texts = [rng.integers(0, 50, 64 * GRAINS * STEPS).astype(np.int32) for _ in range(agents)]
    for text in texts[::2]:
        text[: 64 * GRAINS] = texts[0][: 64 * GRAINS]
    need = agents * GRAINS * STEPS + agents * shape.slot_units(4)
    machine = Machine(tmp_path, need // 4, 2 * need, shape, late)
    assert machine.pool.slot_units == 3
    waiting: list[RequestWork] = []
    for agent in rng.permutation(np.repeat(np.arange(agents), 3 * STEPS)):
        length = 64 * int(rng.integers(1, GRAINS * STEPS + 1))
        waiting.append(machine.ask(texts[agent][:length], f"agent {agent}"))
        if len(waiting) > 3:
            machine.run(waiting.pop(int(rng.integers(len(waiting)))))
        if rng.random() < 0.3:
            machine.checkpoints.copy_some(1 << 15)
        late.advance(min(late.begun, late.done + int(rng.integers(0, 3))))
    for work in waiting:
        machine.run(work)
    counters = machine.checkpoints.counters
    assert counters.from_host > 0.2 * counters.reused
    machine.checkpoints.drop_all()
    machine.tiers.close()
    assert machine.pool.free == machine.pool.units
    assert machine.tiers.host.bytes_held == 0


def test_a_checkpoint_on_pages_that_are_still_coming_is_coming_too(tmp_path: Path) -> None:
    """A long state is on its way; a shorter one is computed meanwhile and shares its pages: whoever
    resumes from that waits for them.
    """
    late = LateCopies()
    machine = Machine(tmp_path, 100, 100, late=late)
    text = np.arange(8 * 64, dtype=np.int32)
    machine.run(machine.ask(text, "long"))
    machine.checkpoints.copy_some(1 << 20)
    late.join()
    for checkpoint in list(machine.checkpoints.index):
        machine.tiers.settle(copies=True)
        machine.checkpoints.free(machine.checkpoints.index.remove(checkpoint))
    machine.pool.rows.fill_(0)
    first = machine.ask(text, "long")
    assert first.resume is not None
    assert first.is_coming
    assert machine.run(machine.ask(text[:256], "short")) == 0
    second = machine.ask(text[:256], "short")
    assert second.is_coming
    assert machine.run(second) == 256
    assert late.done == late.begun
    assert not first.is_coming
    assert machine.run(first) == 512
