"""A thousand agents on a tenth of the memory they need, killed and restarted from disk."""

import shutil
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import torch

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

SHAPE = StateShape(1, 1, 4, 1, 1, 4, 4, 12, 3)
AGENTS, STEPS, GRAINS = 1000, 4, 2


class Machine:
    """Checkpoints and tiers with a null model: a page holds what its prefix hashes to."""

    def __init__(self, folder: Path, units: int, host_rows: int) -> None:
        self.now = 0.0
        self.pool = Pool(SHAPE, units, torch.float32, torch.device("cpu"))
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

    def step(self, tokens: Ints, name: str) -> int:
        """One request: what it resumes from is checked, the rest is computed and kept. Tokens that
        were not computed.
        """
        keys = grain_keys(tokens)
        prompt = np.append(tokens, 7).astype(np.int32)
        read = Read(0, np.zeros(1, np.int32), "q")
        rendered = Rendered((prompt,), (read,), len(prompt), len(prompt), 1, len(tokens), None)
        work = RequestWork(rendered, Future(), None, None, "t", name, keys)
        if self.checkpoints.longest("t", tokens, keys, len(tokens)) == 0:
            work.loaded = self.tiers.fetch("t", tokens, keys, len(tokens))
        self.checkpoints.plan(work, 10**6)
        self.checkpoints.began(work)
        anchor = work.resume.anchor if work.resume else Anchor(0, -1, np.zeros(0, np.int32))
        for page, key in zip(self.pool.places(anchor.pages), keys, strict=False):
            assert self.pool.tensors.keys[0, page, 0, 0, 0] == mark(key), "a wrong page was served"
        if anchor.position:
            state = self.pool.tensors.recurrent_state[0, anchor.slot, 0, 0, 0]
            assert state == mark(keys[anchor.position // 64 - 1]), "a wrong state was served"
        pages, slots = self.checkpoints.take(len(keys) - len(anchor.pages), 1)
        slot = int(slots[0])
        self.pool.tensors.keys[0, self.pool.places(pages), 0, 0, 0] = torch.tensor(
            [mark(key) for key in keys[len(anchor.pages) :]]
        )
        self.pool.tensors.recurrent_state[0, slot, 0, 0, 0] = mark(keys[-1])
        every = np.concatenate([anchor.pages, pages]).astype(np.int32)
        self.checkpoints.keep(work, Anchor(len(tokens), slot, every))
        self.pool.pages.release(pages)
        self.pool.slots.release(slots)
        self.checkpoints.release(work)
        self.checkpoints.copy_some(1 << 20)
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
        resumed += machine.step(tokens, f"agent {agent}")
    assert resumed > 0.5 * sum(64 * GRAINS * (1 + d) for n in done for d in range(n))
    machine.checkpoints.drop_all()
    machine.tiers.close()
    assert machine.pool.free == machine.pool.units
    assert machine.tiers.host.bytes_held == 0
