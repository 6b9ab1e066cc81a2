"""Checkpoints of an engine: what to resume from, what to keep after a round, what to give up.

Puts the index, the pool's counts and the mark policy together. Only the engine's thread uses it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from flide_engine.cache.index import Freed, PrefixIndex
from flide_engine.cache.marks import MarkPolicy
from flide_engine.cache.pool import Pool
from flide_engine.errors import PoolExhausted
from flide_engine.layout.plan import Anchor
from flide_engine.work import RequestWork, Resume


@dataclass
class Counters:
    """Tokens since the start: asked for, found in checkpoints, computed."""

    asked: int = 0
    reused: int = 0
    computed: int = 0


class Checkpoints:
    """What an engine remembers between rounds."""

    def __init__(
        self, pool: Pool, policy: MarkPolicy, keep: bool, clock: Callable[[], float]
    ) -> None:
        """keep: whether anything is remembered at all."""
        self._pool, self._policy, self._keep, self._clock = pool, policy, keep, clock
        self.index = PrefixIndex()
        self.version = 0
        self.counters = Counters()

    def plan(self, work: RequestWork, limit: int) -> None:
        """Plans work that has not begun, from the longest checkpoint of its state there is now."""
        if work.seen == self.version or work.at:
            return
        self.release(work)
        rendered = work.rendered
        # a branch keeps at least one token, so the checkpoint ends before the shortest prompt does
        longest = min(len(p) for p in rendered.prompts[: rendered.state_prompts]) - 1
        match = self.index.match(
            work.tenant, rendered.prompts[0], work.keys, min(rendered.state_tokens, longest)
        )
        resume = None
        if match.checkpoint is not None:
            match.checkpoint.locks += 1
            anchor = Anchor(match.checkpoint.position, match.checkpoint.slot, match.pages)
            resume = Resume(match.checkpoint, anchor)
        start = resume.anchor.position if resume else 0
        marks = (
            self._policy.positions(rendered.state_tokens, start, match.agreed, rendered.turns)
            if self._keep
            else ()
        )
        work.plan(resume, marks, limit, self.version)

    def release(self, work: RequestWork) -> None:
        """Work no longer needs the checkpoint it resumed from."""
        if work.resume is not None:
            work.resume.checkpoint.locks -= 1
            work.resume = None

    def began(self, work: RequestWork) -> None:
        """Work is about to run its first step: its checkpoint has been of use."""
        self.counters.asked += work.rendered.input_tokens
        if work.resume is not None:
            work.resume.checkpoint.hits += 1
            work.resume.checkpoint.used = self._clock()
            self.counters.reused += work.resume.anchor.position

    def keep(self, work: RequestWork, anchor: Anchor) -> None:
        """Remembers a checkpoint of work's state; the anchor itself stays the caller's to drop."""
        if not self._keep or anchor.position > work.rendered.state_tokens:
            return
        text = work.rendered.prompts[0]
        _, pages, slot_taken = self.index.insert(
            work.tenant, text, work.keys, anchor.pages, anchor.slot, self._clock()
        )
        self._pool.pages.retain(pages)
        if slot_taken:
            self._pool.slots.retain(np.array([anchor.slot], np.int32))
            self.version += 1

    def make_room(self, error: PoolExhausted) -> bool:
        """Evicts until what a round lacked is free. False if not enough can be."""
        counted = self._pool.pages if error.kind == self._pool.pages.kind else self._pool.slots
        while counted.free < error.needed:
            freed = self.index.evict(self._clock())
            if freed is None:
                return False
            self._free(freed)
        return True

    def drop_all(self) -> None:
        """Forgets every checkpoint that is not in use."""
        for checkpoint in list(self.index):
            if not checkpoint.locks:
                self._free(self.index.remove(checkpoint))

    def _free(self, freed: Freed) -> None:
        self._pool.pages.release(freed.pages)
        self._pool.slots.release(freed.slots)
        self.version += 1
