"""What the routers and the callers of one process know together of each deployment.

`shared` is looked up in this very module, wherever the process has it. The classes also travel by
value with the request router, for processes that have nothing of this project.
"""

from collections import Counter
from typing import NamedTuple

from router.policy import Board


class Reasons:
    """Counts choices by their reason. Written by one event loop."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def count(self, reason: str) -> None:
        """One more choice for this reason."""
        self._counts[reason] += 1

    def snapshot(self) -> dict[str, int]:
        """Choices since the process began, by reason; the caller's own copy."""
        return dict(self._counts)


class Members:
    """How many replicas there are. Written by one event loop."""

    def __init__(self) -> None:
        self.count: int | None = None
        """None before the first was heard of."""
        self.cold_start_s: float | None = None
        """Seconds that the first one is taken to need; None: one at least is meant to run always.
        """


class Shared(NamedTuple):
    """board: predicted waits, which callers write and routers read; reasons: why replicas were
    chosen; members: how many there are; odd: replicas whose bits are not their fleet's, with the
    reason; stopped: replicas whose engine has ended, which callers write: it is not started again.
    """

    board: Board
    reasons: Reasons
    members: Members
    odd: dict[str, str]
    stopped: set[str]


def nothing_shared() -> Shared:
    """What is known of a deployment at first."""
    return Shared(Board(), Reasons(), Members(), {}, set())


_shared: dict[tuple[str, str], Shared] = {}


def shared(app: str, deployment: str) -> Shared:
    """What is known of a deployment; the same for every caller in this process, on any thread."""
    found = _shared.get((app, deployment))
    return found or _shared.setdefault((app, deployment), nothing_shared())
