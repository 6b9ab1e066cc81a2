"""`DecisionClient`: an agent's way to the engine without HTTP. Imports no torch."""

import threading
from collections import Counter
from types import TracebackType
from typing import Any, Self

import ray
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.handle import DeploymentHandle

from flide_engine.api import DecisionRequest, DecisionResponse
from router.asking import ask, ask_within
from router.options import CallOptions


class DecisionClient:
    """Decisions through the handle of the `Engine` deployment, with a deadline.

    Requests for the same state, also as it grows, go to the same replica. If a replica dies under a
    call, another one is asked, up to six in all; the answer is the same. Usable in any process that
    is connected to the cluster (`ray.init("auto")`), and to be closed before `ray.shutdown()`, as a
    `with` block does.

    session_id of a call: names its state, as `X-Session-Id` does over HTTP: at most 256 printable
    ASCII characters, else InvalidRequest. batch: it may wait for rounds with room to spare.
    """

    def __init__(self, app: str = "default", timeout: float = 10.0) -> None:
        """app: name of the Serve application. timeout: seconds for a call, all tries included; at
        most the engine's `max_timeout_s`.
        """
        self._handle = _handles.take(app)
        self._timeout, self._closed = timeout, False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends what goes on beside the calls, once all clients of the app in this process are
        closed. May be called again, and from a process without an event loop.

        The handle of a deployment that scales tells the controller every ten seconds how many
        requests wait in it. After `ray.shutdown()` it would start Ray anew for that.
        """
        if not self._closed:
            self._closed = True
            _handles.give_back(self._handle)

    def decide(
        self, request: DecisionRequest | dict[str, Any], session_id: str = "", batch: bool = False
    ) -> DecisionResponse:
        """The answers, from a process without an event loop. Raises the error tree.

        A fleet that sleeps is woken: if the timeout is shorter than its start is expected to take,
        NotReady is raised at once, with the time to come again.
        """
        options = CallOptions("", session_id, self._timeout, batch)
        return ask_within(self._handle, request, options)

    async def adecide(
        self, request: DecisionRequest | dict[str, Any], session_id: str = "", batch: bool = False
    ) -> DecisionResponse:
        """As `decide`, on an event loop; cancelling it cancels the call."""
        options = CallOptions("", session_id, self._timeout, batch)
        return await ask(self._handle, request, options)


class _Handles:
    """The handles of this process's clients: Serve has one an app, which they share."""

    def __init__(self) -> None:
        self._users: Counter[str] = Counter()
        self._lock = threading.Lock()

    def take(self, app: str) -> DeploymentHandle:
        """For one client more."""
        with self._lock:
            handle = serve.get_deployment_handle("Engine", app_name=app)
            handle = handle.options(_by_reference=False)
            self._users[handle.handle_id] += 1
            return handle

    def give_back(self, handle: DeploymentHandle) -> None:
        """By a client; the last one ends the handle, and whoever comes next gets another one."""
        with self._lock:
            self._users[handle.handle_id] -= 1
            if self._users[handle.handle_id]:
                return
            del self._users[handle.handle_id]
            if ray.is_initialized():  # else Serve forgets it by itself
                kept = _get_global_client().handle_cache
                for key in [k for k, h in kept.items() if h.handle_id == handle.handle_id]:
                    del kept[key]
            handle.shutdown()


_handles = _Handles()
