"""Which checkpoints may leave the device: those of which values were read that are finite.

Not only what comes after a checkpoint is to be read, but what comes after each of its pages. These
may be another request's that is not done: where prefixes are known already, their pages are kept.
"""

from collections.abc import Iterable

import numpy as np

from flide_engine.cache.index import Checkpoint, PrefixIndex
from flide_engine.layout.plan import Ints


class Soundness:
    """What is known of the checkpoints and the pages of an index. One thread uses it."""

    def __init__(self, index: PrefixIndex, pages: int) -> None:
        """pages: as many as there may be."""
        self._index = index
        self._sound = np.zeros(pages, np.bool_)  # by number, for those that the index holds
        self._waiting: list[Checkpoint] = []  # read after, but not all of their pages were

    def left(self, checkpoint: Checkpoint, own: Ints, taken: Ints) -> None:
        """A request has left a checkpoint, and no value after it is read yet. own: pages it read
        for that, in order; taken: those of them that the index took.
        """
        checkpoint.trusted = False
        self._sound[taken] = False
        pages = self._index.pages_of(checkpoint)
        checkpoint.others = pages[pages != own]

    def arrived(self, checkpoint: Checkpoint, taken: Ints) -> None:
        """A sound checkpoint came from elsewhere, with these pages; the others were known."""
        self._sound[taken] = True
        checkpoint.others = self._index.pages_of(checkpoint)
        checkpoint.trusted = bool(self._sound[checkpoint.others].all())
        if not checkpoint.trusted:
            self._waiting.append(checkpoint)

    def read(self, used: Iterable[Checkpoint], left: Iterable[Checkpoint]) -> list[Checkpoint]:
        """A request's values are finite: which checkpoints are trusted since. used: those that are
        not, and that it resumed from; left: those it left.
        """
        found: list[Checkpoint] = []
        for checkpoint in used:
            self._trust(checkpoint, found)
        self._waiting += left
        more = True
        while more:
            more, waiting = False, self._waiting
            self._waiting = []
            for checkpoint in waiting:
                if checkpoint.trusted or checkpoint not in self._index:
                    continue
                if self._sound[checkpoint.others].all():
                    self._trust(checkpoint, found)
                    more = True
                else:
                    self._waiting.append(checkpoint)
        return found

    def _trust(self, checkpoint: Checkpoint, found: list[Checkpoint]) -> None:
        checkpoint.trusted = True
        found.append(checkpoint)
        if checkpoint in self._index:
            self._sound[self._index.pages_of(checkpoint)] = True
