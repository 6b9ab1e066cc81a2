"""Checkpoints of an engine: what to resume from, what to keep after a round, what to give up.

Puts the index, the pool's counts and the mark policy together. Only the engine's thread uses it.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from flide_engine.cache.host import Copied
from flide_engine.cache.index import Checkpoint, Freed, PrefixIndex, grain_keys
from flide_engine.cache.marks import MarkPolicy
from flide_engine.cache.pool import Counted, Pool
from flide_engine.cache.transfer import put_in, read, take_out
from flide_engine.config import GRAIN
from flide_engine.errors import PoolExhausted
from flide_engine.layout.plan import Anchor, Ints
from flide_engine.tiers import Tiers
from flide_engine.work import RequestWork, Resume


@dataclass
class Counters:
    """Since the start. Tokens: asked for, found in checkpoints, computed; and of those found, how
    many came back from host memory and from disk. Rounds, and seconds in which one was under way.
    """

    asked: int = 0
    reused: int = 0
    computed: int = 0
    from_host: int = 0
    from_disk: int = 0
    rounds: int = 0
    busy_seconds: float = 0.0


@dataclass(frozen=True)
class StateInfo:
    """One checkpoint: the name of its state, its tokens, how often it was resumed from, whether it
    is kept from eviction, where it is ("device", "host", "disk"), and the bytes it adds there to
    the one before it.
    """

    name: str
    tokens: int
    hits: int
    pinned: bool
    tier: str
    bytes: int


class Checkpoints:
    """What an engine remembers between rounds."""

    def __init__(
        self,
        pool: Pool,
        policy: MarkPolicy,
        keep: bool,
        clock: Callable[[], float],
        tiers: Tiers | None = None,
    ) -> None:
        """keep: whether anything is remembered at all."""
        self._pool, self._policy, self._keep, self._clock = pool, policy, keep, clock
        self._tiers = tiers
        self._to_copy: deque[Checkpoint] = deque()
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
        limit_here = min(rendered.state_tokens, longest)
        if self._tiers is not None:
            self._bring_back(work, limit_here)
        match = self.index.match(work.tenant, rendered.prompts[0], work.keys, limit_here)
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
            work.reused = work.resume.anchor.position
            self.counters.reused += work.reused

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
            if self._tiers is not None:
                self._to_copy.append(checkpoint)
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
            victim = self.index.victim(self._clock())
            if victim is None:
                if self._tiers is None or not self._tiers.settle(copies=True):
                    return False
                continue
            if self._tiers is not None:
                self._copy(victim)
                self._tiers.settle(copies=True)
            self._free(self.index.remove(victim))
        return True

    def copy_some(self, most: int) -> None:
        """Begins to copy checkpoints off the device that have not been, about `most` bytes of them;
        the rest another time.
        """
        if self._tiers is None:
            return
        self._tiers.settle()
        size = self._pool.shape.slot_bytes(self._pool.dtype.itemsize)
        while self._to_copy and most > 0:
            checkpoint = self._to_copy.popleft()
            if checkpoint in self.index:
                self._copy(checkpoint)
                most -= size

    @property
    def has_copies_to_make(self) -> bool:
        """Whether `copy_some` has something to do."""
        return bool(self._to_copy)

    def _copy(self, checkpoint: Checkpoint) -> None:
        assert self._tiers is not None
        index = self.index
        self._tiers.copy(
            checkpoint, index.tokens_of(checkpoint), index.keys_of(checkpoint),
            self._pool, index.pages_of(checkpoint),
        )  # fmt: skip

    def longest(self, tenant: str, tokens: Ints, keys: Sequence[bytes], limit: int) -> int:
        """Tokens of the longest checkpoint of a prompt on device or host. Any thread may ask: what
        it is told may have changed since.
        """
        found = self.index.match(tenant, tokens, keys, limit).checkpoint
        held = self._tiers.match(tenant, tokens, keys, limit).checkpoint if self._tiers else None
        return max(c.position if c else 0 for c in (found, held))

    def _bring_back(self, work: RequestWork, limit: int) -> None:
        """Puts a longer checkpoint than the device's there, from the host or as read from disk."""
        assert self._tiers is not None
        tokens, keys = work.rendered.prompts[0], work.keys
        here = self.index.match(work.tenant, tokens, keys, limit).checkpoint
        held = self._tiers.match(work.tenant, tokens, keys, limit).checkpoint
        loaded, work.loaded = work.loaded, None
        position = max(c.position if c else 0 for c in (here, held))
        if loaded is not None and len(loaded.tokens) > position:
            first = len(loaded.tokens) // GRAIN
            if self._bring(
                work, len(loaded.tokens), lambda at: Copied(loaded.pages[at:first], loaded.state)
            ):
                self.counters.from_disk += len(loaded.tokens)
        elif held is not None and position > (here.position if here else 0):
            pages, state = self._tiers.host.rows_of(held)
            held.locks += 1  # making room on the device may store what leaves there
            read = self._tiers.host.read
            if self._bring(work, position, lambda at: read(pages[at:], state)):
                self.counters.from_host += position
            held.locks -= 1
            held.used = self._clock()

    def _bring(self, work: RequestWork, position: int, read: Callable[[int], Copied]) -> bool:
        """Writes a checkpoint of work's state to the device. False if no room can be made for it.

        read: its contents, of pages from a grain on.
        """
        tokens, keys = work.rendered.prompts[0][:position], work.keys
        known = self.index.match(work.tenant, tokens, keys, position)
        base = known.checkpoint
        if base is not None:
            base.locks += 1
        try:
            first = base.position // GRAIN if base else 0
            pages = self._take(self._pool.pages, position // GRAIN - first)
            try:
                slot = int(self._take(self._pool.slots, 1)[0])
            except PoolExhausted:
                self._pool.pages.release(pages)
                raise
        except PoolExhausted:
            return False
        finally:
            if base is not None:
                base.locks -= 1
        contents = read(first)
        self._pool.put_pages(pages, contents.pages)
        self._pool.put_slot(slot, contents.state)
        every = np.concatenate([known.pages, pages]).astype(np.int32)
        _, taken, _ = self.index.insert(
            work.tenant, tokens, keys, every, slot, self._clock(), work.name
        )
        self._pool.pages.release(np.setdiff1d(pages, taken).astype(np.int32))
        self.version += 1
        return True

    def counts(self) -> dict[str, int]:
        """How many checkpoints each tier holds. Any thread may ask."""
        counts = {"device": len(self.index)}
        if self._tiers is not None:
            counts["host"] = len(self._tiers.host.index)
            if self._tiers.disk is not None:
                counts["disk"] = len(self._tiers.disk)
        return counts

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
        found = [c for c in self.index if c.tenant == tenant and c.goes_by(name)]
        return sorted(found, key=lambda c: -c.position)

    def pin(self, tenant: str, name: str, pinned: bool) -> int:
        """Keeps checkpoints from eviction, or no longer: how many."""
        found = self.of(tenant, name)
        for checkpoint in found:
            checkpoint.pinned = pinned
        return len(found)

    def forget(self, tenant: str, name: str, beyond: int = -1) -> int:
        """Drops a tenant's checkpoints of that name past `beyond` tokens, on every tier, that are
        not in use: how many of the device's. One that is kept for another name, too, stays.
        """
        if self._tiers is not None:
            self._tiers.forget(tenant, name, beyond)
        count = 0
        for checkpoint in self.of(tenant, name):
            if checkpoint.position <= beyond or checkpoint.locks:
                continue
            if name and checkpoint.branches:
                _rename(checkpoint, name)
                continue
            self._free(self.index.remove(checkpoint))
            count += 1
        return count

    def snapshot(self, tenant: str, name: str) -> int:
        """Pins the longest checkpoint of a named state: its tokens, or 0 if there is none."""
        found = self.of(tenant, name)
        if not found:
            return 0
        found[0].pinned = True
        return found[0].position

    def branch(self, tenant: str, name: str, new: str, tokens: int) -> int:
        """Keeps the longest checkpoint of a named state, at no more than `tokens`, for another name
        too: its tokens, or 0 if there is none.
        """
        found = [c for c in self.of(tenant, name) if c.position <= tokens]
        if not found:
            return 0
        found[0].branches.add(new)
        return found[0].position

    def states(self, tenant: str, name: str) -> list[StateInfo]:
        """What is remembered of a tenant's states, of one name or of all, longest first."""
        page = self._pool.shape.page_bytes(self._pool.dtype.itemsize)
        slot = self._pool.shape.slot_bytes(self._pool.dtype.itemsize)
        known = [("device", self.index, c) for c in self.of(tenant, name)]
        if self._tiers is not None:
            host = self._tiers.host
            known += [("host", host.index, c) for c in host.of(tenant, name)]
        infos = [
            StateInfo(
                c.name if name in ("", c.name) else name, c.position, c.hits, c.pinned, tier,
                slot + page * index.own_pages(c),
            )
            for tier, index, c in known
        ]  # fmt: skip
        if self._tiers is not None and self._tiers.disk is not None:
            infos += [
                StateInfo(n, tokens, 0, False, "disk", size)
                for n, tokens, size in self._tiers.disk.of(tenant, name)
            ]
        return sorted(infos, key=lambda i: -i.tokens)

    def drop_all(self) -> None:
        """Forgets every checkpoint on device and host that is not in use; files stay."""
        if self._tiers is not None:
            self._tiers.settle(copies=True, writes=True)
            for copy in list(self._tiers.host.index):
                self._tiers.host.forget(copy)
        for checkpoint in list(self.index):
            if not checkpoint.locks:
                self._free(self.index.remove(checkpoint))

    def _free(self, freed: Freed) -> None:
        self._pool.pages.release(freed.pages)
        self._pool.slots.release(freed.slots)
        self.version += 1


def _rename(checkpoint: Checkpoint, gone: str) -> None:
    """Takes one name off a checkpoint that has others."""
    if gone in checkpoint.branches:
        checkpoint.branches.discard(gone)
    elif checkpoint.branches:
        checkpoint.name = checkpoint.branches.pop()
