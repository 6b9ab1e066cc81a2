"""Which grains have been computed, whether or not anything is remembered of them: what is computed
again shows how much memory is short.
"""

from collections import deque
from collections.abc import Sequence

from flide_engine.config import GRAIN

MOST = 1 << 18
"""Grains remembered: 16.8 million tokens, some 30 MB."""


class Seen:
    """Grains by tenant and key (`grain_keys`). One thread uses it."""

    def __init__(self, most: int = MOST) -> None:
        """most: grains; the oldest are forgotten first."""
        self._most = most
        self._grains: set[int] = set()
        self._order: deque[int] = (
            deque()
        )  # a dictionary's first entry is slow to find once many went

    def tokens(self, tenant: str, keys: Sequence[bytes]) -> int:
        """How many tokens of these grains have been computed before."""
        return GRAIN * sum(hash((tenant, key)) in self._grains for key in keys)

    def add(self, tenant: str, keys: Sequence[bytes]) -> None:
        """These have been computed. Those before one that is known are taken to be, too."""
        new = []
        for key in reversed(keys):
            number = hash((tenant, key))
            if number in self._grains:
                break
            new.append(number)
        self._order.extend(reversed(new))
        self._grains.update(new)
        while len(self._order) > self._most:
            self._grains.discard(self._order.popleft())
