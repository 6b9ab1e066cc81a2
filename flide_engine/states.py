"""States by name: what is remembered of them, kept, forgotten, branched, handed to other processes.

Only the engine's thread uses it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from flide_engine.cache.index import Checkpoint, grain_keys
from flide_engine.cache.pool import Pool
from flide_engine.cache.transfer import Parcel, put_in, read, take_out
from flide_engine.checkpoints import Checkpoints
from flide_engine.config import GRAIN
from flide_engine.errors import PoolExhausted
from flide_engine.tiers import Tiers


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
    """A checkpoint that another engine needs to go on: no longer one continues it, or it is pinned.

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
    ) -> None:
        self._kept, self._index = checkpoints, checkpoints.index
        self._pool, self._tiers, self._clock = pool, tiers, clock

    def export(self, tenant: str, name: str, weights: str) -> list[bytes]:
        """A tenant's checkpoints as bytes, of one name or of all, longest first."""
        return [self._packed(c, weights) for c in self.of(tenant, name)]

    def leaves(self) -> list[Leaf]:
        """What to hand over for every state of every tenant, the last used first."""
        page = self._pool.shape.page_bytes(self._pool.dtype.itemsize)
        slot = self._pool.shape.slot_bytes(self._pool.dtype.itemsize)
        found = [c for c in self._index if c.pinned or not self._index.is_continued(c)]
        found.sort(key=lambda c: -c.used)
        return [
            Leaf(c.tenant, c.name, c.anchor, c.position, slot + page * c.position // GRAIN, c)
            for c in found
        ]

    def export_leaf(self, leaf: Leaf, weights: str) -> bytes | None:
        """A checkpoint as bytes; None if it was evicted since it was listed."""
        return self._packed(leaf.checkpoint, weights) if leaf.checkpoint in self._index else None

    def _packed(self, c: Checkpoint, weights: str) -> bytes:
        return take_out(
            self._pool, c.tenant, c.name, self._index.tokens_of(c), self._index.pages_of(c),
            c.slot, weights, c.anchor, c.pinned, self._clock() - c.used,
        )  # fmt: skip

    def read(self, data: bytes, weights: str) -> Parcel:
        """The checkpoint in some bytes; any thread may ask. Raises CheckpointRefused."""
        return read(data, self._pool, weights)

    def adopt(self, parcel: Parcel) -> int:
        """Takes in a checkpoint from elsewhere: its tokens, or 0 if it was known already.

        Raises PoolExhausted if no room can be made for it.
        """
        keys = grain_keys(parcel.tokens)
        match = self._index.match(parcel.tenant, parcel.tokens, keys, parcel.position)
        if match.checkpoint is not None and match.checkpoint.position == parcel.position:
            return 0
        pages = self._kept.take(self._pool.pages, parcel.position // GRAIN)
        try:
            slot = self._kept.take(self._pool.slots, 1)
        except PoolExhausted:
            self._pool.pages.release(pages)
            raise
        put_in(self._pool, parcel, pages, int(slot[0]))
        used = self._clock() - parcel.unused_s  # or what is new would outlive what is in use here
        made, taken, _ = self._index.insert(
            parcel.tenant, parcel.tokens, keys, pages, int(slot[0]), used,
            parcel.name, parcel.anchor,
        )  # fmt: skip
        made.pinned = parcel.pinned
        # pages of grains that are known already hold the same: those that came are not needed
        self._pool.pages.release(np.setdiff1d(pages, taken).astype(np.int32))
        self._kept.version += 1
        return parcel.position

    def of(self, tenant: str | None, name: str = "") -> list[Checkpoint]:
        """A tenant's checkpoints, of one name or of all, longest first.

        tenant: None for every one's. name: also the anchor of a state that has no name.
        """
        found = [c for c in self._index if tenant in (None, c.tenant) and c.goes_by(name)]
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
            self._kept.free(self._index.remove(checkpoint))
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

    def describe(self, tenant: str | None, name: str) -> list[StateInfo]:
        """What is remembered of a tenant's states, of one name or of all, longest first."""
        page = self._pool.shape.page_bytes(self._pool.dtype.itemsize)
        slot = self._pool.shape.slot_bytes(self._pool.dtype.itemsize)
        known = [("device", self._index, c) for c in self.of(tenant, name)]
        if self._tiers is not None:
            host = self._tiers.host
            known += [("host", host.index, c) for c in host.of(tenant, name)]
        infos = [
            StateInfo(
                c.tenant, name if name in c.branches else c.name, c.anchor, c.position, c.hits,
                c.pinned, tier, slot + page * index.own_pages(c),
            )
            for tier, index, c in known
        ]  # fmt: skip
        if self._tiers is not None and self._tiers.disk is not None:
            infos += [
                StateInfo(f.tenant, f.name, f.anchor, f.position, 0, False, "disk", f.size)
                for f in self._tiers.disk.of(tenant, name)
            ]
        return sorted(infos, key=lambda i: -i.tokens)


def _rename(checkpoint: Checkpoint, gone: str) -> None:
    """Takes one name off a checkpoint that has others."""
    if gone in checkpoint.branches:
        checkpoint.branches.discard(gone)
    elif checkpoint.branches:
        checkpoint.name = checkpoint.branches.pop()
