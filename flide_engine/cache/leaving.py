"""Checkpoints that are forgotten while somebody still uses them."""

import numpy as np

from flide_engine.cache.index import Checkpoint, Freed, PrefixIndex
from flide_engine.cache.pool import Pool


class Leaving:
    """What an index no longer knows, and whose memory is free once nobody uses it."""

    def __init__(self, index: PrefixIndex, pool: Pool) -> None:
        self._index, self._pool = index, pool
        self._held: list[tuple[Checkpoint, Freed]] = []

    def add(self, checkpoint: Checkpoint) -> None:
        """Takes a checkpoint out of the index, also one in use."""
        pages = self._index.pages_of(checkpoint)
        if checkpoint.locks:
            # held once more: a longer one may take its pages over, and go before
            self._pool.pages.retain(pages)
        else:
            pages = pages[:0]
        freed = self._index.detach(checkpoint)
        freed = Freed(np.concatenate([freed.pages, pages]), freed.slots)
        self._held.append((checkpoint, freed))

    def let_go(self) -> None:
        """Frees what nobody uses any more."""
        for checkpoint, freed in self._held:
            if not checkpoint.locks:
                self._pool.pages.release(freed.pages)
                self._pool.slots.release(freed.slots)
        self._held = [held for held in self._held if held[0].locks]
