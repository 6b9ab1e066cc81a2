"""Checkpoints of an engine: what to resume from, what to keep after a round, what to give up.

Puts the index, the pool's counts and the mark policy together. Only the engine's thread uses it.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from flide_engine.cache.disk_file import Loaded
from flide_engine.cache.index import Checkpoint, Freed, PrefixIndex
from flide_engine.cache.leaving import Leaving
from flide_engine.cache.marks import MarkPolicy
from flide_engine.cache.names import Named
from flide_engine.cache.pool import Pool
from flide_engine.cache.room import can_free
from flide_engine.cache.seen import Seen
from flide_engine.cache.soundness import Soundness
from flide_engine.config import GRAIN
from flide_engine.counters import Counters
from flide_engine.errors import PoolExhausted
from flide_engine.layout.plan import Anchor, Ints
from flide_engine.tiers import Tiers
from flide_engine.work import RequestWork, Resume

log = logging.getLogger(__name__)

COPIES_WAIT_S = 0.01
"""How often an engine that has nothing else to do looks after copies under way."""


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
        self.index = PrefixIndex(pool.slot_units)
        self.soundness = Soundness(self.index, pool.units)
        self._leaving = Leaving(self.index, pool)
        self._seen = Seen()
        self.version = 0
        self.counters = Counters()

    def plan(self, work: RequestWork, limit: int) -> None:
        """Plans work that has not begun, from the longest checkpoint of its state there is now."""
        if work.seen == self.version or work.at:
            return
        self.release(work)
        rendered = work.rendered
        if work.suspect is not None:
            work.plan(None, (), limit, self.version)
            return
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
            self._leaving.let_go()

    def give_up_plans(self, works: Sequence[RequestWork]) -> bool:
        """Works that have not begun are planned again when their turn comes, so that they hold no
        checkpoints. False if none held any.
        """
        holding = [work for work in works if work.resume is not None and not work.at]
        for work in holding:
            self.release(work)
            work.seen = -1
        return bool(holding)

    def await_arrival(self, work: RequestWork) -> None:
        """Has the next round, and with it every later one, wait for the checkpoint that work starts
        from.
        """
        if work.resume is not None and work.at == 0:
            checkpoint = work.resume.checkpoint
            if checkpoint.coming is not None:
                checkpoint.coming.join()
                checkpoint.coming = None

    def began(self, work: RequestWork) -> None:
        """Work has begun its first step: its checkpoint has been of use."""
        if work.again:  # it is counted
            work.reused = work.resume.anchor.position if work.resume else 0
            return
        self.counters.asked += work.rendered.input_tokens
        if work.resume is not None:
            checkpoint = work.resume.checkpoint
            checkpoint.hits += 1
            checkpoint.used = self._clock()
            if work.rendered.state_tokens - checkpoint.position < GRAIN:
                checkpoint.keep_for(work.name, work.route)
            work.reused = work.resume.anchor.position
            self.counters.reused += work.reused
            self.counters.resumed += 1
        self.counters.recomputed += self._seen.tokens(
            work.tenant, work.keys[work.reused // GRAIN :]
        )

    def keep(self, work: RequestWork, anchor: Anchor) -> None:
        """Remembers a checkpoint of work's state; the anchor itself stays the caller's to drop.

        Nothing of work that is done again: its pages would be joined to those of its suspect.
        """
        if not self._keep or work.suspect or anchor.position > work.rendered.state_tokens:
            return
        self._seen.add(work.tenant, work.keys[: anchor.position // GRAIN])
        text = work.rendered.prompts[0]
        checkpoint, pages, slot_taken = self.index.insert(
            work.tenant, text, work.keys, anchor.pages, anchor.slot, self._clock(),
            work.name, work.route,
        )  # fmt: skip
        self._pool.pages.retain(pages)
        if slot_taken:
            self.soundness.left(checkpoint, anchor.pages, pages)
            work.kept.append(checkpoint)
            if self._tiers is not None:
                checkpoint.coming = self._tiers.last_arrival()  # it may share pages with one
            self._pool.slots.retain_one(anchor.slot)
            self.version += 1

    def trust(self, work: RequestWork) -> None:
        """All of work's values are finite, and so is what it left and resumed from, which may leave
        the device now: pieces that read nothing tell nothing. If it was done again without its
        checkpoint, that one is forgotten on every tier.
        """
        used = self.index.untrusted(work.resume.checkpoint) if work.resume else []
        trusted = self.soundness.read(used, work.kept)
        if self._tiers is not None:
            self._to_copy += trusted
        work.kept.clear()
        if work.suspect is not None:
            log.error(
                "a checkpoint of %d tokens gave values that are not finite, and is forgotten",
                work.suspect.position,
            )
            self._forget(work.suspect)
            if self._tiers is not None:
                text, grains = work.rendered.prompts[0], work.suspect.position // GRAIN
                self._tiers.refuse(work.tenant, text[: grains * GRAIN], work.keys[:grains])

    def distrust(self, work: RequestWork) -> bool:
        """Forgets what work left: its values were not finite. Whether it is done again: alone if it
        was in company, which may be at fault, and then without the checkpoint it resumed from.
        """
        for checkpoint in work.kept:
            self._forget(checkpoint)
        work.kept.clear()
        suspect = work.resume.checkpoint if work.resume and not work.had_company else None
        if suspect is None and not work.had_company:
            return False
        self.release(work)
        work.begin_again(suspect)
        return True

    def _forget(self, checkpoint: Checkpoint) -> None:
        """Nobody resumes from it any more; its memory is free once nobody uses it."""
        if checkpoint in self.index:
            self._leaving.add(checkpoint)
            self.version += 1
        self._leaving.let_go()

    def make_room(self, error: PoolExhausted) -> bool:
        """Evicts until what a round lacked is free. False, evicting none, if too little can be."""
        while (lacking := error.needed - self._pool.free) > 0:
            if not can_free(self.index, self._pool, lacking):
                # what is being copied is locked
                if self._tiers is None or not self._tiers.settle(copies=True):
                    return False
                self._leaving.let_go()
                continue
            for victim in self.index.victims(self._clock()):
                if self._tiers is not None and victim.trusted:
                    self._copy(victim, leaving=True)
                self.free(self.index.remove(victim))
                if self._pool.free >= error.needed:
                    break
        return True

    def copy_some(self, most: int) -> None:
        """Begins to copy checkpoints off the device that have not been, about `most` bytes of them;
        the rest another time.
        """
        if self._tiers is None:
            return
        self._tiers.settle()
        self._leaving.let_go()
        while self._to_copy and most > 0:
            checkpoint = self._to_copy.popleft()
            if checkpoint in self.index:
                most -= self._copy(checkpoint)

    @property
    def has_copies_to_make(self) -> bool:
        """Whether `copy_some` has something to do."""
        return bool(self._to_copy)

    @property
    def copies_wait_s(self) -> float | None:
        """Seconds after which `copy_some` may find that copies under way are made, and have them
        written; None if none is under way.
        """
        return COPIES_WAIT_S if self._tiers is not None and self._tiers.is_copying else None

    def close(self) -> None:
        """Copies what has not been, if it can outlive the process; to be called at the end."""
        if self._tiers is None:
            return
        try:
            if self._tiers.disk is not None:
                self.copy_some(1 << 62)
        except Exception:
            log.exception("checkpoints that had not been copied yet are lost")
        finally:
            self._tiers.close()

    def _copy(self, checkpoint: Checkpoint, leaving: bool = False) -> int:
        assert self._tiers is not None
        index = self.index
        return self._tiers.copy(
            checkpoint, index.tokens_of(checkpoint), index.keys_of(checkpoint),
            self._pool, index.pages_of(checkpoint), leaving,
        )  # fmt: skip

    def keys(self, tenant: str, tokens: Ints) -> list[bytes]:
        """`grain_keys` of a prompt, as `PrefixIndex.keys`. Any thread may ask."""
        return self.index.keys(tenant, tokens)

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
            tokens = tokens[: len(loaded.tokens)]
            if self._bring(work.tenant, tokens, keys, loaded, loaded.known):
                self.counters.from_disk += len(loaded.tokens)
        elif held is not None and position > (here.position if here else 0):
            held.locks += 1  # making room on the device may store what leaves there
            try:
                made = self._bring(work.tenant, tokens[:position], keys, held, held)
            finally:
                held.locks -= 1
            if made is not None:
                made.hits = held.hits
                self.counters.from_host += position
            held.used = self._clock()

    def bring_copy(self, held: Checkpoint) -> Checkpoint | None:
        """Copies a checkpoint of the host tier to the device, where it is complete on return, as
        long out of use as the copy. None if no room can be made for it.
        """
        assert self._tiers is not None
        index = self._tiers.host.index
        tokens, keys = index.tokens_of(held), index.keys_of(held)
        made = self.index.match(held.tenant, tokens, keys, held.position).checkpoint
        if made is None or made.position < held.position:
            held.locks += 1
            try:
                made = self._bring(held.tenant, tokens, keys, held, held)
            finally:
                held.locks -= 1
            if made is None:
                return None
            made.used = held.used
        self._tiers.settle(copies=True)
        return made

    def _bring(
        self,
        tenant: str,
        tokens: Ints,
        keys: Sequence[bytes],
        source: Checkpoint | Loaded,
        known_as: Named,
    ) -> Checkpoint | None:
        """Begins to copy a checkpoint of the state of these tokens to the device, which has none so
        long. None if no room can be made for it.

        known_as: for whom it is kept; that the device keeps it, too, is not what it was pinned for.
        """
        assert self._tiers is not None
        position = len(tokens)
        known = self.index.match(tenant, tokens, keys, position)
        base = known.checkpoint
        if base is not None:
            base.locks += 1
        first = base.position // GRAIN if base else 0
        try:
            pages, slots = self.take(position // GRAIN - first, 1)
        except PoolExhausted:
            return None
        finally:
            if base is not None:
                base.locks -= 1
        try:
            event = self._tiers.restore(source, first, self._pool, pages, int(slots[0]))
        except BaseException:
            self._pool.pages.release(pages)
            self._pool.slots.release(slots)
            raise
        every = np.concatenate([known.pages, pages]).astype(np.int32)
        made, taken, _ = self.index.insert(
            tenant, tokens, keys, every, int(slots[0]), self._clock(),
            known_as.name, known_as.anchor,
        )  # fmt: skip
        made.branches |= known_as.branches
        self.soundness.arrived(made, taken)
        self._tiers.arriving(made, source, event)
        if len(taken) < len(pages):  # pages of grains that are known hold the same
            event.join()
            self._pool.pages.release(np.setdiff1d(pages, taken).astype(np.int32))
        self.version += 1
        return made

    def counts(self) -> dict[str, int]:
        """How many checkpoints each tier holds. Any thread may ask."""
        counts = {"device": len(self.index)}
        if self._tiers is not None:
            counts["host"] = len(self._tiers.host.index)
            if self._tiers.disk is not None:
                counts["disk"] = len(self._tiers.disk)
        return counts

    def distinct_tokens(self) -> dict[str, int]:
        """Tokens that each tier's checkpoints hold, those that several share once; on disk they
        share whole files only. Any thread may ask.
        """
        tokens = {"device": GRAIN * self.index.grains}
        if self._tiers is not None:
            tokens["host"] = GRAIN * self._tiers.host.index.grains
            if self._tiers.disk is not None:
                tokens["disk"] = self._tiers.disk.distinct_tokens
        return tokens

    def take(self, pages: int, slots: int) -> tuple[Ints, Ints]:
        """As `Pool.take`, giving up checkpoints for it. Raises PoolExhausted if too few can be."""
        while True:
            try:
                return self._pool.take(pages, slots)
            except PoolExhausted as error:
                if not self.make_room(error):
                    raise

    def drop_all(self) -> None:
        """Forgets every checkpoint on device and host that is not in use; files stay."""
        if self._tiers is not None:
            self._tiers.settle(copies=True, writes=True)
            for copy in list(self._tiers.host.index):
                self._tiers.host.forget(copy)
        for checkpoint in list(self.index):
            if not checkpoint.locks:
                self.free(self.index.remove(checkpoint))

    def free(self, freed: Freed) -> None:
        """The index gave up pages and slots."""
        self._pool.pages.release(freed.pages)
        self._pool.slots.release(freed.slots)
        self.version += 1
