"""Checkpoints and tiers around a null model."""

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
from tests.cache.late_copies import LateCopies

SHAPE = StateShape(1, 1, 4, 1, 1, 4, 4, 12, 3)
ORIGIN = {"weights": "w", "stack": "s"}


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
        tiers = Tiers.of(config, self.pool, ORIGIN, self.clock)
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
        """A request of one round: tokens that were not computed."""
        reused = self.round(work)
        self.checkpoints.trust(work)
        self.checkpoints.release(work)
        return reused

    def round(self, work: RequestWork) -> int:
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
        return anchor.position


def mark(key: bytes) -> float:
    """What a page of this prefix holds."""
    return float(int.from_bytes(key[:3], "little"))
