"""Checkpoints of an engine: what to resume from, what to keep after a round, what to give up.

Puts the index, the pool's counts and the mark policy together. Only the engine's thread uses it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from flide_engine.cache.index import Checkpoint, Freed, PrefixIndex, grain_keys
from flide_engine.cache.marks import MarkPolicy
from flide_engine.cache.pool import Counted, Pool
from flide_engine.cache.transfer import put_in, read, take_out
from flide_engine.config import GRAIN
from flide_engine.errors import PoolExhausted
from flide_engine.layout.plan import Anchor, Ints
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
        checkpoint, pages, slot_taken = self.index.insert(
            work.tenant, text, work.keys, anchor.pages, anchor.slot, self._clock(), work.name
        )
        self._pool.pages.retain(pages)
        if slot_taken:
            work.kept.append(checkpoint)
            self._pool.slots.retain(np.array([anchor.slot], np.int32))
            self.version += 1

    def disown(self, work: RequestWork) -> None:
        """Forgets what work left, unless another request is using it: its values were not finite.

        What another uses is the same computation, and fails there too.
        """
        for checkpoint in work.kept:
            if not checkpoint.locks and checkpoint in self.index:
                self._free(self.index.remove(checkpoint))
        work.kept.clear()

    def make_room(self, error: PoolExhausted) -> bool:
        """Evicts until what a round lacked is free. False if not enough can be."""
        counted = self._pool.pages if error.kind == self._pool.pages.kind else self._pool.slots
        while counted.free < error.needed:
            freed = self.index.evict(self._clock())
            if freed is None:
                return False
            self._free(freed)
        return True

    def export(self, tenant: str, name: str, weights: str) -> list[bytes]:
        """A tenant's checkpoints as bytes, of one name or of all, longest first."""
        return [
            take_out(
                self._pool,
                tenant,
                c.name,
                self.index.tokens_of(c),
                self.index.pages_of(c),
                c.slot,
                weights,
            )
            for c in self.of(tenant, name)
        ]

    def adopt(self, data: bytes, weights: str) -> int:
        """Takes in a checkpoint from elsewhere: its tokens, or 0 if it was known already.

        Raises CheckpointRefused, and PoolExhausted if no room can be made for it.
        """
        parcel = read(data, self._pool, weights)
        keys = grain_keys(parcel.tokens)
        match = self.index.match(parcel.tenant, parcel.tokens, keys, parcel.position)
        if match.checkpoint is not None and match.checkpoint.position == parcel.position:
            return 0
        pages = self._take(self._pool.pages, parcel.position // GRAIN)
        try:
            slot = self._take(self._pool.slots, 1)
        except PoolExhausted:
            self._pool.pages.release(pages)
            raise
        put_in(self._pool, parcel, pages, int(slot[0]))
        _, taken, _ = self.index.insert(
            parcel.tenant, parcel.tokens, keys, pages, int(slot[0]), self._clock(), parcel.name
        )
        # pages of grains that are known already hold the same: those that came are not needed
        self._pool.pages.release(np.setdiff1d(pages, taken).astype(np.int32))
        self.version += 1
        return parcel.position

    def _take(self, counted: Counted, count: int) -> Ints:
        while True:
            try:
                return counted.take(count)
            except PoolExhausted as error:
                if not self.make_room(error):
                    raise

    def of(self, tenant: str, name: str = "") -> list[Checkpoint]:
        """A tenant's checkpoints, of one name or of all, longest first."""
        found = [c for c in self.index if c.tenant == tenant and name in ("", c.name)]
        return sorted(found, key=lambda c: -c.position)

    def pin(self, tenant: str, name: str, pinned: bool) -> int:
        """Keeps checkpoints from eviction, or no longer: how many."""
        found = self.of(tenant, name)
        for checkpoint in found:
            checkpoint.pinned = pinned
        return len(found)

    def forget(self, tenant: str, name: str) -> int:
        """Drops a tenant's checkpoints of that name that are not in use: how many."""
        found = [c for c in self.of(tenant, name) if not c.locks]
        for checkpoint in found:
            self._free(self.index.remove(checkpoint))
        return len(found)

    def drop_all(self) -> None:
        """Forgets every checkpoint that is not in use."""
        for checkpoint in list(self.index):
            if not checkpoint.locks:
                self._free(self.index.remove(checkpoint))

    def _free(self, freed: Freed) -> None:
        self._pool.pages.release(freed.pages)
        self._pool.slots.release(freed.slots)
        self.version += 1
