"""The host tier: checkpoints in the machine's memory, pinned where there is a GPU.

Rows as large as the device's: a page takes one, a state as many as it needs, so that the ratio of
pages to states follows the load. Checkpoints share the rows of what they have in common.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from flide_engine.cache.arena import Counted
from flide_engine.cache.beside import AtOnce, Event
from flide_engine.cache.index import Checkpoint, Match, PrefixIndex
from flide_engine.cache.pinned import pinned
from flide_engine.cache.pool import Pool
from flide_engine.cache.rows import collect, move_rows, spread
from flide_engine.cache.state_format import StateFormat
from flide_engine.config import GRAIN
from flide_engine.errors import ConfigError, PoolExhausted
from flide_engine.layout.plan import Ints


@dataclass(frozen=True)
class Copied:
    """A checkpoint's bytes on the host: pages [n, bytes] of its prefix from some grain on, and its
    state [bytes] as it is kept, both uint8.
    """

    pages: Tensor
    state: Tensor


class Stored(NamedTuple):
    """A copy on the host, when it is there, and how many bytes are moved for it."""

    copy: Checkpoint
    event: Event
    moved: int


class HostTier:
    """Checkpoints copied off the device. One thread uses it; nothing here locks."""

    def __init__(
        self, pool: Pool, budget: int, clock: Callable[[], float], rounded: bool = False
    ) -> None:
        """pool: of the device, whose rows these follow. budget: bytes, allocated at once. rounded:
        see StateFormat.

        Raises ConfigError if it holds no state with one page.
        """
        size = pool.dtype.itemsize
        self.format = StateFormat(pool.shape, size, rounded)
        self._page, self._row = pool.shape.page_bytes(size), pool.shape.unit_bytes(size)
        self._state_rows = -(-self.format.size // self._row)
        count = budget // self._row
        if count < self._state_rows + 1:
            raise ConfigError(
                f"host_bytes {budget} holds {count} rows of {self._row} bytes; a state with one"
                f" page takes {self._state_rows + 1}"
            )
        self.pinned = pool.device.type == "cuda"
        size = count * self._row
        self._memory = pinned(size) if self.pinned else torch.zeros(size, dtype=torch.uint8)
        self._rows = self._memory.view(count, self._row)
        self._counted = Counted("host rows", count)
        self._clock = clock
        self._states: dict[int, Ints] = {}  # rows of each state, by its number
        self._next = 0
        self._last: Event = AtOnce()  # the end of all copies so far: they are made in order
        self.index = PrefixIndex(max(1, self._state_rows))

    @property
    def bytes_held(self) -> int:
        """Bytes in use."""
        return self._row * self._counted.held

    @property
    def bytes_total(self) -> int:
        """Bytes allocated."""
        return self._rows.numel()

    def by_kind(self) -> dict[tuple[str, str], tuple[int, int]]:
        """As `Accounting.by_kind`."""
        pages = self._row * self.index.grains
        states = self.bytes_held - pages
        return {
            ("host", "page"): (pages, pages),
            ("host", "slot"): (states, states),
            ("host", "any"): (0, self.bytes_total - pages - states),
        }

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
        slot: int,
    ) -> Stored | None:  # fmt: skip
        """Copies a checkpoint of the pool, beside the rounds, without what is here already; None
        if there is no room.

        tokens, keys: of its prefix. The pool's must stay where it is until the copies are made.
        """
        if len(pages) + self._state_rows > len(self._rows):
            return None  # whatever is given up for it
        position, victims = GRAIN * len(pages), None
        while True:
            known = self.index.match(tenant, tokens, keys, position)
            if known.checkpoint is not None and known.checkpoint.position == position:
                known.checkpoint.used = self._clock()
                return Stored(known.checkpoint, self._last, 0)  # it may be on its way
            new = pages[known.agreed // GRAIN :]
            try:
                rows = self._counted.take(len(new) + self._state_rows)
                break
            except PoolExhausted:
                victims = victims or self.index.victims(self._clock())
                if (victim := next(victims, None)) is None:
                    return None
                self.forget(victim)
        of_pages, of_state = rows[: len(new)], rows[len(new) :]
        places = pool.places(new)

        def copies() -> None:
            move_rows(self._rows, of_pages, pool.rows, places)
            spread(self.format.pack(pool.slot_bytes(slot)), self._rows, of_state)

        self._last = pool.beside.run(copies)
        number, self._next = self._next, self._next + 1
        self._states[number] = of_state
        every = np.concatenate([np.zeros(known.agreed // GRAIN, np.int32), of_pages])
        made, _, _ = self.index.insert(
            tenant, tokens, keys, every.astype(np.int32), number, self._clock(), name
        )
        return Stored(made, self._last, len(new) * self._page + self.format.size)

    def restore(
        self, checkpoint: Checkpoint, first: int, pool: Pool, pages: Ints, slot: int
    ) -> Event:
        """Copies a checkpoint from grain `first` on to `pages` and `slot` of the pool, beside the
        rounds: when it is there. It must be locked until then.
        """
        of_pages, of_state = self.rows_of(checkpoint)
        places = pool.places(pages)

        def copies() -> None:
            move_rows(pool.rows, places, self._rows, of_pages[first:])
            self.format.unpack(
                pool.slot_bytes(slot), lambda kept: collect(kept, self._rows, of_state)
            )

        return pool.beside.run(copies)

    def rows_of(self, checkpoint: Checkpoint) -> tuple[Ints, Ints]:
        """Which rows hold a checkpoint: those of its pages, in order, and those of its state."""
        return self.index.pages_of(checkpoint), self._states[checkpoint.slot]

    def read(self, pages: Ints, state: Ints) -> Copied:
        """What some rows hold. Any thread may ask while the checkpoint is locked."""
        rows = self._rows[torch.from_numpy(pages.astype(np.int64))]
        held = torch.empty(self.format.size, dtype=torch.uint8)
        collect(held, self._rows, state)
        return Copied(rows[:, : self._page], held)

    def forget(self, checkpoint: Checkpoint) -> None:
        """Drops a checkpoint that is not locked."""
        freed = self.index.remove(checkpoint)
        self._counted.release(freed.pages)
        self._counted.release(self._states.pop(int(freed.slots[0])))

    def of(self, tenant: str | None, name: str = "") -> list[Checkpoint]:
        """A tenant's checkpoints, of one name or of all; tenant: None for every one's."""
        return [c for c in self.index if tenant in (None, c.tenant) and c.goes_by(name)]
