"""The host tier: checkpoints in the machine's memory, pinned where there is a GPU.

One arena of rows, each as large as a page; a state takes as many rows as it needs, so that the
ratio of pages to states follows the load. Checkpoints share the rows of what they have in common.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flide_engine.cache.index import Checkpoint, Match, PrefixIndex
from flide_engine.cache.pool import Counted, Pool
from flide_engine.config import GRAIN
from flide_engine.errors import ConfigError, PoolExhausted
from flide_engine.layout.plan import Ints

SMALLEST_ROW = 4096
"""Bytes of a row where a model's page is smaller: it may have no attention layer at all."""


@dataclass(frozen=True)
class Copied:
    """A checkpoint's bytes on the host: pages [n, bytes] of its prefix from some grain on, and its
    state [bytes], both uint8.
    """

    pages: Tensor
    state: Tensor


class HostTier:
    """Checkpoints copied off the device. One thread uses it; nothing here locks."""

    def __init__(self, pool: Pool, budget: int, clock: Callable[[], float]) -> None:
        """pool: of the device, whose shape the rows follow. budget: bytes, allocated at once.

        Raises ConfigError if it holds no state with one page.
        """
        size = pool.dtype.itemsize
        self._page, self._state = pool.shape.page_bytes(size), pool.shape.slot_bytes(size)
        self._row = max(self._page, SMALLEST_ROW)
        self._state_rows = -(-self._state // self._row)
        count = budget // self._row
        if count < self._state_rows + 1:
            raise ConfigError(
                f"host_bytes {budget} holds {count} rows of {self._row} bytes; a state with one"
                f" page takes {self._state_rows + 1}"
            )
        pinned = pool.tensors.keys.is_cuda
        self._rows = torch.zeros(count, self._row, dtype=torch.uint8, pin_memory=pinned)
        self._counted = Counted("host rows", count)
        self._clock = clock
        self._states: dict[int, Ints] = {}  # rows of each state, by its number
        self._next = 0
        self.index = PrefixIndex()

    @property
    def bytes_held(self) -> int:
        """Bytes in use."""
        return self._row * (len(self._counted.counts) - self._counted.free)

    @property
    def bytes_total(self) -> int:
        """Bytes allocated."""
        return self._rows.numel()

    def bytes_of(self, checkpoints: Collection[Checkpoint]) -> int:
        """Bytes that some checkpoints hold together."""
        pages = {row for c in checkpoints for row in self.index.pages_of(c).tolist()}
        states = sum(len(self._states[c.slot]) for c in checkpoints)
        return self._row * (len(pages) + states)

    def match(self, tenant: str, tokens: Ints, keys: Sequence[bytes], limit: int) -> Match:
        """As `PrefixIndex.match`."""
        return self.index.match(tenant, tokens, keys, limit)

    def store(
        self, tenant: str, name: str, tokens: Ints, keys: Sequence[bytes], pool: Pool, pages: Ints,
        slot: int, anchor: str = "",
    ) -> Checkpoint | None:  # fmt: skip
        """Copies a checkpoint of the pool, without what is here already; None if there is no room.

        tokens, keys: of its prefix. On a GPU the copies are only queued on the current stream: the
        checkpoint must stay where it is until the stream has come to them.
        """
        position = GRAIN * len(pages)
        while True:
            known = self.index.match(tenant, tokens, keys, position)
            if known.checkpoint is not None and known.checkpoint.position == position:
                known.checkpoint.used = self._clock()
                known.checkpoint.anchor = anchor or known.checkpoint.anchor
                return known.checkpoint
            new = pages[known.agreed // GRAIN :]
            try:
                rows = self._counted.take(len(new) + self._state_rows)
                break
            except PoolExhausted:
                if not self._evict():
                    return None
        self._copy_in(rows[: len(new)], pool.page_bytes(new))
        self._copy_in(rows[len(new) :], self._state_as_rows(pool.slot_bytes(slot)))
        number, self._next = self._next, self._next + 1
        self._states[number] = rows[len(new) :]
        every = np.concatenate([np.zeros(known.agreed // GRAIN, np.int32), rows[: len(new)]])
        made, _, _ = self.index.insert(
            tenant, tokens, keys, every.astype(np.int32), number, self._clock(), name, anchor
        )
        return made

    def rows_of(self, checkpoint: Checkpoint) -> tuple[Ints, Ints]:
        """Which rows hold a checkpoint: those of its pages, in order, and those of its state."""
        return self.index.pages_of(checkpoint), self._states[checkpoint.slot]

    def read(self, pages: Ints, state: Ints) -> Copied:
        """What some rows hold. Any thread may ask while the checkpoint is locked."""
        rows = self._rows[torch.from_numpy(pages.astype(np.int64))]
        held = self._rows[torch.from_numpy(state.astype(np.int64))]
        return Copied(rows[:, : self._page], held.reshape(-1)[: self._state])

    def forget(self, checkpoint: Checkpoint) -> None:
        """Drops a checkpoint that is not locked."""
        freed = self.index.remove(checkpoint)
        self._counted.release(freed.pages)
        self._counted.release(self._states.pop(int(freed.slots[0])))

    def of(self, tenant: str | None, name: str = "") -> list[Checkpoint]:
        """A tenant's checkpoints, of one name or of all; tenant: None for every one's."""
        return [c for c in self.index if tenant in (None, c.tenant) and c.goes_by(name)]

    def _evict(self) -> bool:
        victim = self.index.victim(self._clock())
        if victim is None:
            return False
        self.forget(victim)
        return True

    def _state_as_rows(self, state: Tensor) -> Tensor:
        padded = state.new_zeros(self._state_rows * self._row)
        padded[: len(state)] = state
        return padded.view(self._state_rows, self._row)

    def _copy_in(self, rows: Ints, data: Tensor) -> None:
        for row, line in zip(rows.tolist(), data, strict=True):
            self._rows[row, : len(line)].copy_(line, non_blocking=True)
