"""Threads that render: fair between tenants, so that one's burst does not hold up another's request
before it is even queued.
"""

import threading
from collections import deque
from collections.abc import Callable

from flide_engine.errors import NotReady


class FairThreads:
    """A few threads; tenants take turns, and the jobs of one run in order."""

    def __init__(self, count: int, name: str) -> None:
        """name: of the threads."""
        self._changed = threading.Condition()
        self._jobs: dict[str, deque[Callable[[], None]]] = {}  # in the order of their turns
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}_{i}", daemon=True)
            for i in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, tenant: str, job: Callable[[], None]) -> None:
        """Runs a job when its tenant's turn has come. It must not raise.

        Raises NotReady once `shutdown` has been called.
        """
        with self._changed:
            if self._closed:
                raise NotReady("the engine is closed")
            self._jobs.setdefault(tenant, deque()).append(job)
            self._changed.notify()

    def shutdown(self) -> None:
        """Waits until all that was submitted has run."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (job := self._next()) is not None:
            job()
            del job  # it holds a request

    def _next(self) -> Callable[[], None] | None:
        """The next job; None once closed and nothing is left."""
        with self._changed:
            while not self._jobs:
                if self._closed:
                    return None
                self._changed.wait()
            tenant = next(iter(self._jobs))
            jobs = self._jobs.pop(tenant)
            job = jobs.popleft()
            if jobs:
                self._jobs[tenant] = jobs  # behind the others
            return job
