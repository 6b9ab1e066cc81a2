"""What becomes of checkpoints beyond the device: copies in host memory, then on disk.

Copies are made soon after a round, so that giving up a checkpoint on the device costs nothing, and
beside the rounds; so is what comes back. Files are written by a thread.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace

import numpy as np
from torch import Tensor

from flide_engine.cache.beside import Event
from flide_engine.cache.disk import DiskTier
from flide_engine.cache.disk_file import File, Loaded
from flide_engine.cache.host import HostTier
from flide_engine.cache.index import Checkpoint, Match
from flide_engine.cache.own_folder import OwnFolder
from flide_engine.cache.pool import Pool
from flide_engine.cache.rows import move_rows
from flide_engine.config import GRAIN, EngineConfig
from flide_engine.errors import ConfigError
from flide_engine.layout.plan import Ints

log = logging.getLogger(__name__)


@dataclass
class _Copy:
    """A copy under way: what is locked for it, what it is, and what tells when it is there."""

    source: Checkpoint | None
    copy: Checkpoint
    event: Event


@dataclass
class _Write:
    """A file that is being written or waits for it: the copy that is locked for it, and what is
    known of the file.
    """

    future: "Future[None]"
    copy: Checkpoint
    file: File


@dataclass
class _Arrival:
    """A checkpoint on its way to the device, and what it comes from: kept until it is there."""

    checkpoint: Checkpoint
    source: Checkpoint | Loaded
    event: Event


class Tiers:
    """Host memory and disk of one engine. The engine's thread uses it; `fetch` any thread may."""

    def __init__(
        self, host: HostTier, disk: DiskTier | None = None, folder: OwnFolder | None = None
    ) -> None:
        """folder: of the disk tier, released at the end."""
        self.host, self.disk, self._folder = host, disk, folder
        self._copies: list[_Copy] = []
        self._arrivals: list[_Arrival] = []
        self._writer = ThreadPoolExecutor(1, "flide-disk") if disk is not None else None
        self._writes: list[_Write] = []

    @classmethod
    def of(
        cls, config: EngineConfig, pool: Pool, origin: Mapping[str, str], clock: Callable[[], float]
    ) -> "Tiers | None":
        """As configured; None without any. origin: what its states are computed with, by name.

        Raises ConfigError for a disk without host memory, and
        for a folder that cannot be used.
        """
        if not config.host_bytes:
            if config.disk_folder:
                raise ConfigError("disk_folder needs host_bytes: files are written from there")
            return None
        rounded = config.tier_state_dtype == "bfloat16"
        host = HostTier(pool, config.host_bytes, clock, rounded)
        if config.disk_folder is None:
            return cls(host)
        described = {**asdict(pool.shape), "dtype": str(pool.dtype)}
        if rounded:
            described["states"] = config.tier_state_dtype
        made = {**origin, "layout": json.dumps(described, sort_keys=True)}
        folder = OwnFolder(config.disk_folder, " ".join(made.values()))
        log.info("checkpoint files are in %s", folder.path)
        return cls(host, DiskTier(folder.path, config.disk_bytes, made, clock), folder)

    def copy(
        self, checkpoint: Checkpoint, tokens: Ints, keys: Sequence[bytes], pool: Pool, pages: Ints,
        leaving: bool = False,
    ) -> int:  # fmt: skip
        """Begins to copy a checkpoint of the pool to the host; it is locked until that is done. How
        many bytes are moved: none if the host has it, or no room for it.

        leaving: it is not locked, and may be given up at once: later rounds wait for the copy
        instead.
        """
        made = self.host.store(
            checkpoint.tenant, checkpoint.name, tokens, keys, pool, pages, checkpoint.slot
        )
        if made is None:
            return 0
        copy, event, moved = made
        copy.learn(checkpoint)
        copy.hits = max(copy.hits, checkpoint.hits)
        copy.locks += 1
        if leaving:
            event.join()
        else:
            checkpoint.locks += 1
        self._copies.append(_Copy(None if leaving else checkpoint, copy, event))
        self.settle()
        return moved

    def restore(
        self, source: Checkpoint | Loaded, first: int, pool: Pool, pages: Ints, slot: int
    ) -> Event:
        """Copies a checkpoint of the host, or what was read from disk, from grain `first` on to
        `pages` and `slot` of the pool, beside the rounds; `arriving` must be told.
        """
        if isinstance(source, Checkpoint):
            return self.host.restore(source, first, pool, pages, slot)
        loaded, places = source, pool.places(pages)

        def copies() -> None:
            here = np.arange(first, len(loaded.pages), dtype=np.int32)
            move_rows(pool.rows, places, loaded.pages, here)
            self.host.format.unpack(
                pool.slot_bytes(slot), lambda kept: kept.copy_(loaded.state, non_blocking=True)
            )

        return pool.beside.run(copies)

    def arriving(self, checkpoint: Checkpoint, source: Checkpoint | Loaded, event: Event) -> None:
        """A checkpoint of the device is complete at `event`; until then it is locked, and so is
        what it is copied from.
        """
        if event.is_done():
            return
        checkpoint.coming = event
        checkpoint.locks += 1
        if isinstance(source, Checkpoint):
            source.locks += 1
        self._arrivals.append(_Arrival(checkpoint, source, event))

    def last_arrival(self) -> Event | None:
        """When everything on its way to the device is there; None if nothing is."""
        return self._arrivals[-1].event if self._arrivals else None

    @property
    def is_copying(self) -> bool:
        """Whether copies to the host are under way; `settle` has files made of those that are
        there.
        """
        return bool(self._copies)

    def settle(self, copies: bool = False, writes: bool = False) -> bool:
        """Unlocks what has been copied and written; whether copies were under way.

        copies, writes: wait until all are done.
        """
        busy = bool(self._copies or self._arrivals)
        self._settle_arrivals(copies)
        still: list[_Copy] = []
        for copy in self._copies:
            if not copies and not copy.event.is_done():
                still.append(copy)
                continue
            copy.event.wait()
            if copy.source is not None:
                copy.source.locks -= 1
            if self._writer is None or copy.copy.is_base:
                self._unlock(copy.copy)
            else:
                self._writes.append(self._write(copy.copy, self._writer))
        self._copies = still
        open_writes = []
        for write in self._writes:
            if not (writes or write.future.done()):
                open_writes.append(write)
                continue
            if error := write.future.exception():
                log.error("a checkpoint was not written to disk: %s", error)
            self._unlock(write.copy)
        self._writes = open_writes
        return busy

    def _unlock(self, copy: Checkpoint) -> None:
        """One user less of a copy on the host; what was forgotten meanwhile goes with the last."""
        copy.locks -= 1
        if copy.is_base and not copy.locks:
            self.host.forget(copy)

    def _settle_arrivals(self, wait: bool) -> None:
        still: list[_Arrival] = []
        for arrival in self._arrivals:
            if not wait and not arrival.event.is_done():
                still.append(arrival)
                continue
            arrival.event.wait()
            arrival.checkpoint.coming = None
            arrival.checkpoint.locks -= 1
            if isinstance(arrival.source, Checkpoint):
                self._unlock(arrival.source)
        self._arrivals = still

    def sizes(self) -> dict[tuple[str, str], tuple[int, int]]:
        """(held, total) bytes by tier and kind, as `Accounting.by_kind`. Any thread may ask."""
        found = self.host.by_kind()
        if self.disk is not None:
            found["disk", "file"] = self.disk.bytes_held, self.disk.budget
        return found

    def match(self, tenant: str, tokens: Ints, keys: Sequence[bytes], limit: int) -> Match:
        """The longest checkpoint on the host."""
        return self.host.match(tenant, tokens, keys, limit)

    def fetch(
        self, tenant: str, tokens: Ints, keys: Sequence[bytes], limit: int, least: int = 0
    ) -> Loaded | None:
        """The longest checkpoint on disk of a prompt, at no more than `limit` tokens and more than
        `least`.
        """
        if self.disk is None:
            return None
        position = self.disk.longest(tenant, keys, limit, least)
        if not position:
            return None
        loaded = self.disk.load(tenant, keys[: position // GRAIN], tokens[:position])
        if loaded is None or not self.host.pinned:
            return loaded
        # here, on whichever thread asks, so that the copy to the device does not block the rounds;
        # by torch, which keeps such memory for the next: registered, it would be pinned each time
        return replace(loaded, pages=loaded.pages.pin_memory(), state=loaded.state.pin_memory())

    def forget(self, tenant: str, name: str, beyond: int) -> int:
        """Keeps a named state past `beyond` tokens for it no longer, everywhere: how many copies.

        Copies under way are waited for, files that are being written are not: they do not come to
        be, and what they are written from goes when they are done with.
        """
        self.settle(copies=True)
        count = 0
        for checkpoint in self.host.of(tenant, name):
            if checkpoint.position > beyond:
                count += 1
                if not checkpoint.leave(name) and not checkpoint.locks:
                    self.host.forget(checkpoint)
        if self.disk is not None:
            count += self.disk.forget(tenant, name, beyond)
            still = []
            for write in self._writes:
                if write.copy.is_base and write.future.cancel():
                    self.disk.withdraw(write.file)
                    self._unlock(write.copy)
                else:
                    still.append(write)
            self._writes = still
        return count

    def refuse(self, tenant: str, tokens: Ints, keys: Sequence[bytes]) -> None:
        """Drops the copies of the checkpoint of exactly these tokens, which was found at fault."""
        held = self.match(tenant, tokens, keys, len(tokens)).checkpoint
        if held is not None and held.position == len(tokens):
            for write in self._writes:
                if write.copy is held:
                    write.file.leave("")
            held.leave("")
            if not held.locks:
                self.host.forget(held)
        if self.disk is not None:
            self.disk.refuse(tenant, keys[-1])

    def flush(self) -> None:
        """Makes the disk agree with what states were told to do. Any thread may ask, and the
        engine's should not: it waits for the disk.
        """
        if self.disk is not None:
            self.disk.flush()

    def close(self) -> None:
        """Waits for what is under way."""
        try:
            self.settle(copies=True, writes=True)
        finally:
            if self._writer is not None:
                self._writer.shutdown()
            self.flush()
            if self._folder is not None:
                self._folder.release()

    def _write(self, copy: Checkpoint, writer: ThreadPoolExecutor) -> _Write:
        """Has a copy written; the rows that are read stay as they are while it is locked."""
        assert self.disk is not None
        tokens, keys = self.host.index.tokens_of(copy), self.host.index.keys_of(copy)
        pages, state = self.host.rows_of(copy)

        def read(first: int) -> tuple[Tensor, Tensor]:
            copied = self.host.read(pages[first:], state)
            return copied.pages, copied.state

        file = self.disk.announce(copy.tenant, copy, copy.position)
        return _Write(writer.submit(self.disk.save, file, keys, tokens, read), copy, file)
