"""A replica's part in routing: it remembers what it was sent, and says so in its routing stats."""

from collections import OrderedDict

from router.policy import Load, Stats
from router.routing_key import Openings, RouteKey


class Receiver:
    """What one replica has been sent: openings, and states of which it is not the home."""

    def __init__(self, foreign: int = 64) -> None:
        """foreign: most anchors listed, the least recently sent dropped first."""
        self._foreign: OrderedDict[int, int] = OrderedDict()
        self._most = foreign
        self._openings = Openings()

    def received(self, key: RouteKey, anchor: int, home: bool, now: float) -> None:
        """A call came: its key, what its router called its anchor, whether this is its home."""
        self._openings.anchor(key, now)
        self._foreign.pop(anchor, None)
        if not home:
            self._list(anchor, key.size)

    def adopted(self, key: RouteKey) -> None:
        """A state was taken over that has another home; key: of its anchor alone."""
        self._list(key.entries()[0], key.size)

    def stats(self, load: Load, now: float, draining: bool = False) -> Stats:
        """What to tell; the last used come first."""
        return Stats(
            load, self._openings.known(now), tuple(reversed(self._foreign.items())), draining
        )

    def _list(self, anchor: int, size: int) -> None:
        self._foreign.pop(anchor, None)
        self._foreign[anchor] = size
        if len(self._foreign) > self._most:
            self._foreign.popitem(last=False)
