"""States by name: what is remembered of them, kept, forgotten, branched, handed to other processes.

Only the engine's thread uses it, but for what says so.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from flide_engine.cache.disk_file import File
from flide_engine.cache.index import Checkpoint, PrefixIndex, grain_keys
from flide_engine.cache.names import MOST_BRANCHES
from flide_engine.cache.pool import Pool
from flide_engine.cache.transfer import Parcel, put_in, read, take_out, write
from flide_engine.checkpoints import Checkpoints
from flide_engine.config import GRAIN
from flide_engine.errors import TooManyBranches, TooMuchPinned
from flide_engine.tiers import Tiers

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StateInfo:
    """One checkpoint: whose it is, the name of its state ("" for none), the anchor that this was
    last routed on ("" for none), its tokens, how often it was resumed from, whether it is kept from
    eviction, where it is ("device", "host", "disk"), and the bytes it adds there to the one before.
    """

    tenant: str
    name: str
    anchor: str
    tokens: int
    hits: int
    pinned: bool
    tier: str
    bytes: int


@dataclass(frozen=True)
class Leaf:
    """A checkpoint that another engine needs to go on with a state: no longer one continues it that
    may be handed over, it is the state's longest (a branch that the first state has outgrown), or
    it is pinned.

    bytes: of its whole prefix and its slot.
    """

    tenant: str
    name: str
    anchor: str
    tokens: int
    bytes: int
    checkpoint: Checkpoint = field(repr=False)


class States:
    """The checkpoints of an engine, by tenant and name."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        pool: Pool,
        tiers: Tiers | None,
        clock: Callable[[], float],
        pin_share: float,
        least_units: int,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        """pin_share: part of a tier that may be kept from eviction. least_units: what of the pool
        must not be, or a request could find no room. weights: of tenants, 1 unless named.
        """
        self._kept, self._index = checkpoints, checkpoints.index
        self._pool, self._tiers, self._clock = pool, tiers, clock
        self._pin_share, self._least_units = pin_share, least_units
        self._weights = weights or {}

    def known(self, tenant: str, name: str) -> list[tuple[Checkpoint, str, str]]:
        """A tenant's checkpoints, of one name or of all, longest first; with each, a name it goes
        by and the anchor that goes with it.
        """
        return [
            (c, known_as, anchor)
            for c in self.of(tenant, name)
            for known_as, anchor in c.names()
            if name in ("", known_as or anchor)
        ]

    def copied(self, c: Checkpoint, name: str, anchor: str) -> Parcel | None:
        """A checkpoint on the device, copied to the host; None if it was evicted meanwhile, or
        nothing has been read after it yet.
        """
        if c not in self._index or not c.trusted:
            return None
        return take_out(
            self._pool, c.tenant, name, self._index.tokens_of(c), self._index.pages_of(c),
            c.slot, anchor, c.pinned, self._clock() - c.used,
        )  # fmt: skip

    def leaves(self) -> list[Leaf]:
        """What to hand over for every state of every tenant: of the device, then what only the
        host has, of either the last used first.

        A checkpoint with several names is told once for each: they may go to different engines.
        Those that nothing has been read after are left out, as the others would not know.
        """
        read_after = (c for c in self._index if c.trusted)
        here = [(c, name, anchor) for c in read_after for name, anchor in c.names()]
        copies = [] if self._tiers is None else list(self._tiers.host.index)
        there = [(c, name, anchor) for c in copies for name, anchor in c.names()]
        longest: dict[tuple[str, str], int] = {}
        for c, name, anchor in (*here, *there):
            state = c.tenant, name or anchor
            longest[state] = max(c.position, longest.get(state, 0))

        def wanted(c: Checkpoint, name: str, anchor: str) -> bool:
            return c.pinned or c.position == longest[c.tenant, name or anchor]

        here = [
            (c, name, anchor)
            for c, name, anchor in here
            if wanted(c, name, anchor) or not self._index.is_continued(c)
        ]
        there = [found for found in there if wanted(*found) and not self._has(found[0])]
        by_use = [sorted(part, key=lambda found: -found[0].used) for part in (here, there)]
        page = self._pool.shape.page_bytes(self._pool.dtype.itemsize)
        slot = self._pool.shape.slot_bytes(self._pool.dtype.itemsize)
        return [
            Leaf(c.tenant, name, anchor, c.position, slot + page * c.position // GRAIN, c)
            for c, name, anchor in (*by_use[0], *by_use[1])
        ]

    def _has(self, copy: Checkpoint) -> bool:
        """Whether the device has a checkpoint of the host tier, too."""
        assert self._tiers is not None
        index = self._tiers.host.index
        tokens, keys = index.tokens_of(copy), index.keys_of(copy)
        found = self._index.match(copy.tenant, tokens, keys, copy.position).checkpoint
        return found is not None and found.position == copy.position

    def copied_leaf(self, leaf: Leaf) -> Parcel | None:
        """As `copied`. One that only the host has is put on the device for it."""
        c = leaf.checkpoint
        if c not in self._index and self._tiers is not None and c in self._tiers.host.index:
            made = self._kept.bring_copy(c)
            if made is None:
                return None
            made.pinned = made.pinned or c.pinned
            c = made
        return self.copied(c, leaf.name, leaf.anchor)

    def write(self, parcel: Parcel, origin: Mapping[str, str]) -> bytes:
        """A parcel as bytes; any thread may ask."""
        return write(parcel, self._pool, origin)

    def read(self, data: bytes, origin: Mapping[str, str]) -> Parcel:
        """The checkpoint in some bytes; any thread may ask. Raises CheckpointRefused."""
        return read(data, self._pool, origin)

    def adopt(self, parcel: Parcel) -> int:
        """Takes in a checkpoint from elsewhere: its tokens, or 0 if it was known already.

        Raises PoolExhausted if no room can be made for it.
        """
        keys = grain_keys(parcel.tokens)
        match = self._index.match(parcel.tenant, parcel.tokens, keys, parcel.position)
        if match.checkpoint is not None and match.checkpoint.position == parcel.position:
            match.checkpoint.keep_for(parcel.name, parcel.anchor)
            self._pin_adopted(match.checkpoint, parcel)
            return 0
        pages, slot = self._kept.take(parcel.position // GRAIN, 1)
        try:
            put_in(self._pool, parcel, pages, int(slot[0]))
        except BaseException:
            self._pool.pages.release(pages)
            self._pool.slots.release(slot)
            raise
        used = self._clock() - parcel.unused_s  # or what is new would outlive what is in use here
        made, taken, _ = self._index.insert(
            parcel.tenant, parcel.tokens, keys, pages, int(slot[0]), used,
            parcel.name, parcel.anchor,
        )  # fmt: skip
        self._kept.soundness.arrived(made, taken)
        self._pin_adopted(made, parcel)
        # pages of grains that are known already hold the same: those that came are not needed
        self._pool.pages.release(np.setdiff1d(pages, taken).astype(np.int32))
        self._kept.version += 1
        return parcel.position

    def _pin_adopted(self, checkpoint: Checkpoint, parcel: Parcel) -> None:
        """Pins what was pinned where it comes from, if as much may be pinned here."""
        if not parcel.pinned:
            return
        try:
            self._check_share(parcel.tenant, parcel.name, [(self._index, checkpoint)], [])
        except TooMuchPinned as error:
            log.warning("a pin is not taken over: %s", error)
        else:
            checkpoint.pinned = True

    def of(self, tenant: str | None, name: str = "") -> list[Checkpoint]:
        """A tenant's checkpoints, of one name or of all, longest first.

        tenant: None for every one's. name: also the anchor of a state that has no name.
        """
        found = [c for c in self._index if tenant in (None, c.tenant) and c.goes_by(name)]
        return sorted(found, key=lambda c: -c.position)

    def pin(self, tenant: str, name: str, pinned: bool) -> int:
        """Keeps a named state from eviction on every tier, or no longer: how many copies.

        Raises TooMuchPinned.
        """
        return self._pin(tenant, name, pinned, None)

    def snapshot(self, tenant: str, name: str) -> int:
        """Pins the longest checkpoint of a named state: its tokens, or 0 if there is none.

        Raises TooMuchPinned.
        """
        longest = self._longest(tenant, name, 1 << 62)
        if longest:
            self._pin(tenant, name, True, longest)
        return longest

    def forget(self, tenant: str, name: str, beyond: int = -1) -> int:
        """Keeps a named state past `beyond` tokens for it no longer, on every tier, but for what is
        in use: how many copies. Those that are kept for no other name are dropped.
        """
        count = self._tiers.forget(tenant, name, beyond) if self._tiers is not None else 0
        for checkpoint in self.of(tenant, name):
            if checkpoint.position <= beyond or checkpoint.locks:
                continue
            count += 1
            if not checkpoint.leave(name):
                self._kept.free(self._index.remove(checkpoint))
        return count

    def branch(self, tenant: str, name: str, new: str, tokens: int, anchor: str) -> int:
        """Keeps the longest checkpoint of a named state, at no more than `tokens`, for another name
        too, on every tier: its tokens, or 0 if there is none.

        anchor: what the other name is routed on. Raises TooManyBranches.
        """
        longest = self._longest(tenant, name, tokens)
        if not longest:
            return 0
        memory = [c for _, _, c in self._in_memory(tenant, name) if c.position == longest]
        files = [f for f in self._files(tenant, name) if f.position == longest]
        if any(len(c.branches) == MOST_BRANCHES for c in (*memory, *files)):
            raise TooManyBranches(name, MOST_BRANCHES)
        for checkpoint in memory:
            checkpoint.keep_for(new, anchor)
        if self._tiers is not None and self._tiers.disk is not None:
            self._tiers.disk.branch(tenant, name, longest, new, anchor)
        return longest

    def flush(self) -> None:
        """Makes the disk agree with what has been asked here. Any thread may ask, and the engine's
        should not: it waits for the disk.
        """
        if self._tiers is not None:
            self._tiers.flush()

    def describe(self, tenant: str | None, name: str) -> list[StateInfo]:
        """What is remembered of a tenant's states, of one name or of all, longest first.

        tenant: None for every one's. A checkpoint with several names is told once for each.
        """
        page = self._pool.shape.page_bytes(self._pool.dtype.itemsize)
        slot = self._pool.shape.slot_bytes(self._pool.dtype.itemsize)
        infos = [
            StateInfo(
                c.tenant, known_as, anchor, c.position, c.hits, c.pinned, tier,
                slot + page * index.own_pages(c),
            )
            for tier, index, c in self._in_memory(tenant, name)
            for known_as, anchor in c.names()
        ]  # fmt: skip
        infos += [
            StateInfo(f.tenant, known_as, anchor, f.position, 0, f.pinned, "disk", f.size)
            for f in self._files(tenant, name)
            for known_as, anchor in f.names()
        ]
        found = [i for i in infos if name in ("", i.name or i.anchor)]
        return sorted(found, key=lambda i: -i.tokens)

    def _in_memory(
        self, tenant: str | None, name: str
    ) -> list[tuple[str, PrefixIndex, Checkpoint]]:
        """(tier, its index, checkpoint) of device and host."""
        found = [("device", self._index, c) for c in self.of(tenant, name)]
        if self._tiers is not None:
            host = self._tiers.host
            found += [("host", host.index, c) for c in host.of(tenant, name)]
        return found

    def _files(self, tenant: str | None, name: str) -> list[File]:
        """Those on disk."""
        if self._tiers is None or self._tiers.disk is None:
            return []
        return self._tiers.disk.of(tenant, name)

    def _longest(self, tenant: str, name: str, tokens: int) -> int:
        """Tokens of a named state's longest checkpoint on any tier, at no more than `tokens`."""
        known = [c.position for _, _, c in self._in_memory(tenant, name)]
        known += [f.position for f in self._files(tenant, name)]
        return max((p for p in known if p <= tokens), default=0)

    def _pin(self, tenant: str, name: str, pinned: bool, position: int | None) -> int:
        """As `pin`; position: only what is of so many tokens."""
        memory = [
            (index, c)
            for _, index, c in self._in_memory(tenant, name)
            if position in (None, c.position)
        ]
        files = [f for f in self._files(tenant, name) if position in (None, f.position)]
        if pinned:
            self._check_share(tenant, name, memory, files)
        for _, checkpoint in memory:
            checkpoint.pinned = pinned
        if self._tiers is not None and self._tiers.disk is not None:
            self._tiers.disk.pin(tenant, name, position, pinned)
        return len(memory) + len(files)

    def _check_share(
        self,
        tenant: str,
        name: str,
        memory: list[tuple[PrefixIndex, Checkpoint]],
        files: list[File],
    ) -> None:
        """Raises TooMuchPinned if these would make a tier keep too much of a tenant's."""

        def pinned(index: PrefixIndex) -> tuple[set[Checkpoint], set[Checkpoint]]:
            """(The tenant's, if these add to them, those of others)."""
            found = {c for c in index if c.pinned}
            others = {c for c in found if c.tenant != tenant}
            more = {c for i, c in memory if i is index} - found
            return (found - others) | more if more else set(), others

        own, others = pinned(self._index)
        share, total = self._pin_share, self._pool.units
        most = min(share * total, total - self._least_units)
        kept = [("pages", self._units_of(own), self._units_of(others), most)]
        if self._tiers is not None:
            host, disk = self._tiers.host, self._tiers.disk
            mine, theirs = map(host.bytes_of, pinned(host.index))
            kept.append(("bytes of host memory", mine, theirs, share * host.bytes_total))
            if disk is not None and not all(f.pinned for f in files):
                written = disk.pinned_with(files)
                mine = sum(f.size for f in written if f.tenant == tenant)
                theirs = sum(f.size for f in written) - mine
                kept.append(("bytes on disk", mine, theirs, share * disk.budget))
        for kind, mine, theirs, most in kept:
            limit = self._part(tenant) * max(0.0, most - theirs)
            if mine > limit:
                raise TooMuchPinned(name, mine, kind, int(limit), "pin_share")

    def _units_of(self, checkpoints: set[Checkpoint]) -> int:
        """Of the pool, which some checkpoints hold together."""
        pages = {page for c in checkpoints for page in self._index.pages_of(c).tolist()}
        return len(pages) + self._pool.slot_units * len(checkpoints)

    def _part(self, tenant: str) -> float:
        """How much of what others leave a tenant may pin: something is left for whoever comes next,
        as what is pinned is never taken back. Where there are no keys there are no others.
        """
        weight = self._weights.get(tenant, 1.0)
        return weight / (weight + 1.0) if tenant else 1.0
