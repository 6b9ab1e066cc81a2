"""What the routers and the callers of one process know together of each deployment.

`shared` is looked up in this very module, wherever the process has it. The classes also travel by
value with the request router, for processes that have nothing of this project.
"""

import asyncio
from collections import Counter
from typing import Any, NamedTuple

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


class Ways:
    """The request routers of this process's handles, each on the event loop it was made for."""

    def __init__(self) -> None:
        self._routers: list[tuple[Any, Any]] = []

    @property
    def exist(self) -> bool:
        """Whether there is any."""
        return bool(self._routers)

    def add(self, router: Any) -> None:
        """One more, if it is new; called on its event loop."""
        if all(known is not router for known, _ in self._routers):
            alive = [(known, loop) for known, loop in self._routers if not loop.is_closed()]
            self._routers = [*alive, (router, asyncio.get_running_loop())]

    def router_here(self) -> Any | None:
        """The last one whose event loop is the running one: only there may it be asked."""
        here = asyncio.get_running_loop()
        return next((router for router, loop in reversed(self._routers) if loop is here), None)


class Shared(NamedTuple):
    """board: predicted waits, which callers write and routers read; reasons: why replicas were
    chosen; members: how many there are; odd: replicas whose bits are not their fleet's, with the
    reason; stopped: replicas whose engine has ended, which callers write: it is not started again;
    ways: the routers.
    """

    board: Board
    reasons: Reasons
    members: Members
    odd: dict[str, str]
    stopped: set[str]
    ways: Ways


def nothing_shared() -> Shared:
    """What is known of a deployment at first."""
    return Shared(Board(), Reasons(), Members(), {}, set(), Ways())


_shared: dict[tuple[str, str], Shared] = {}


def shared(app: str, deployment: str) -> Shared:
    """What is known of a deployment; the same for every caller in this process, on any thread."""
    found = _shared.get((app, deployment))
    return found or _shared.setdefault((app, deployment), nothing_shared())
