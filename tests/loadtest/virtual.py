"""Virtual time: an event loop whose clock jumps to the next timer instead of waiting for it."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class _Jumping(selectors.SelectSelector):
    """Never waits: what it was asked to wait for has passed on the loop's clock."""

    passed = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout:
            self.passed += timeout
        return super().select(0)


class VirtualClock:
    """A clock of `loadtest.schedule.Clock` over an event loop of its own."""

    def __init__(self) -> None:
        self._selector = _Jumping()
        self._loop = asyncio.SelectorEventLoop(self._selector)
        self._loop.time = lambda: self._selector.passed  # type: ignore[method-assign]

    def now(self) -> float:
        """Virtual seconds since the start."""
        return self._selector.passed

    async def sleep(self, seconds: float) -> None:
        """Returns at once, that much later."""
        await asyncio.sleep(seconds)

    def freeze(self, seconds: float) -> None:
        """Time passes while nothing runs, as when a process is stopped."""
        self._selector.passed += seconds

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs until `work` is done, in no real time."""
        try:
            self._loop.run_until_complete(work)
        finally:
            self._loop.close()
