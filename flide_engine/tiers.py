"""What becomes of checkpoints beyond the device: copies in host memory, then on disk.

Copies are made soon after a round, so that giving up a checkpoint on the device costs nothing; on a
GPU they run beside the rounds, on a stream of their own. Files are written by a thread.
"""

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from flide_engine.cache.disk import DiskTier, Loaded
from flide_engine.cache.host import HostTier
from flide_engine.cache.index import Checkpoint, Match
from flide_engine.cache.pool import Pool
from flide_engine.config import GRAIN, EngineConfig
from flide_engine.errors import ConfigError
from flide_engine.layout.plan import Ints

log = logging.getLogger(__name__)


@dataclass
class _Copy:
    """A copy under way: what it is of, what it is, and what tells when it is there."""

    source: Checkpoint
    copy: Checkpoint
    done: Any  # torch.cuda.Event, or None


class Tiers:
    """Host memory and disk of one engine. The engine's thread uses it; `fetch` any thread may."""

    def __init__(self, host: HostTier, disk: DiskTier | None) -> None:
        self.host, self.disk = host, disk
        self._copies: list[_Copy] = []
        self._writer = ThreadPoolExecutor(1, "flide-disk") if disk is not None else None
        self._writes: list[tuple[Future[None], Checkpoint]] = []
        self._stream: Any = None

    @classmethod
    def of(
        cls, config: EngineConfig, pool: Pool, weights: str, clock: Callable[[], float]
    ) -> "Tiers | None":
        """As configured; None without any. Raises ConfigError for a disk without host memory."""
        if not config.host_bytes:
            if config.disk_folder:
                raise ConfigError("disk_folder needs host_bytes: files are written from there")
            return None
        disk = None
        if config.disk_folder:
            layout = json.dumps({**asdict(pool.shape), "dtype": str(pool.dtype)}, sort_keys=True)
            disk = DiskTier(config.disk_folder, config.disk_bytes, weights, layout, clock)
        return cls(HostTier(pool, config.host_bytes, clock), disk)

    def copy(
        self, checkpoint: Checkpoint, tokens: Ints, keys: Sequence[bytes], pool: Pool, pages: Ints
    ) -> bool:
        """Begins to copy a checkpoint of the pool to the host; it is locked until that is done.

        False if the host has no room for it.
        """
        with self._beside(pool) as done:
            made = self.host.store(
                checkpoint.tenant, checkpoint.name, tokens, keys, pool, pages, checkpoint.slot,
                checkpoint.anchor,
            )  # fmt: skip
        if made is None:
            return False
        checkpoint.locks += 1
        made.locks += 1
        self._copies.append(_Copy(checkpoint, made, done()))
        self.settle()
        return True

    def settle(self, copies: bool = False, writes: bool = False) -> bool:
        """Unlocks what has been copied and written; whether anything was under way.

        copies, writes: wait until all are done.
        """
        busy = bool(self._copies or self._writes)
        still: list[_Copy] = []
        for copy in self._copies:
            if copy.done is not None and not copies and not copy.done.query():
                still.append(copy)
                continue
            if copy.done is not None:
                copy.done.synchronize()
            copy.source.locks -= 1
            if self._writer is None:
                copy.copy.locks -= 1
            else:
                self._writes.append((self._writer.submit(*self._write_of(copy.copy)), copy.copy))
        self._copies = still
        open_writes = []
        for future, checkpoint in self._writes:
            if not (writes or future.done()):
                open_writes.append((future, checkpoint))
                continue
            if error := future.exception():
                log.error("a checkpoint was not written to disk: %s", error)
            checkpoint.locks -= 1
        self._writes = open_writes
        return busy

    def match(self, tenant: str, tokens: Ints, keys: Sequence[bytes], limit: int) -> Match:
        """The longest checkpoint on the host."""
        return self.host.match(tenant, tokens, keys, limit)

    def fetch(self, tenant: str, tokens: Ints, keys: Sequence[bytes], limit: int) -> Loaded | None:
        """The longest checkpoint on disk of a prompt, at no more than `limit` tokens."""
        if self.disk is None:
            return None
        position = self.disk.longest(tenant, keys, limit)
        if not position:
            return None
        return self.disk.load(tenant, keys[: position // GRAIN], tokens[:position])

    def forget(self, tenant: str, name: str, beyond: int) -> None:
        """Drops a named state past `beyond` tokens everywhere; what is under way is waited for."""
        self.settle(copies=True, writes=True)
        for checkpoint in self.host.of(tenant, name):
            if checkpoint.position > beyond and not checkpoint.locks:
                self.host.forget(checkpoint)
        if self.disk is not None:
            self.disk.forget(tenant, name, beyond)

    def close(self) -> None:
        """Waits for what is under way."""
        self.settle(copies=True, writes=True)
        if self._writer is not None:
            self._writer.shutdown()

    def _write_of(self, checkpoint: Checkpoint) -> tuple[Any, ...]:
        """What the writer is to do; it reads rows, which stay as they are while this is locked."""
        assert self.disk is not None
        tokens, keys = self.host.index.tokens_of(checkpoint), self.host.index.keys_of(checkpoint)
        pages, state = self.host.rows_of(checkpoint)

        def read(first: int) -> tuple[Tensor, Tensor]:
            copied = self.host.read(pages[first:], state)
            return copied.pages, copied.state

        known = checkpoint.tenant, checkpoint.name
        return self.disk.save, *known, keys, tokens, read, checkpoint.anchor

    @contextmanager
    def _beside(self, pool: Pool) -> Iterator[Callable[[], Any]]:
        """Copies go beside the rounds, after what has been queued so far; yields what marks their
        end.
        """
        if not pool.tensors.keys.is_cuda:
            yield lambda: None
            return
        self._stream = self._stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield self._stream.record_event
