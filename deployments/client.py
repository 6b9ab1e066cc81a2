"""`DecisionClient`: an agent's way to the engine without HTTP. Imports no torch."""

from typing import Any

from ray import serve

from flide_engine.api import DecisionRequest, DecisionResponse
from router.asking import ask, ask_within
from router.options import CallOptions


class DecisionClient:
    """Decisions through the handle of the `Engine` deployment, with a deadline.

    Requests for the same state, also as it grows, go to the same replica. If a replica dies under a
    call, another one is asked, up to six in all; the answer is the same. Usable in any process that
    is connected to the cluster (`ray.init("auto")`).

    session_id of a call: names its state, as `X-Session-Id` does over HTTP: at most 256 printable
    ASCII characters, else InvalidRequest. batch: it may wait for rounds with room to spare.
    """

    def __init__(self, app: str = "default", timeout: float = 10.0) -> None:
        """app: name of the Serve application. timeout: seconds for a call, all tries included; at
        most the engine's `max_timeout_s`.
        """
        self._handle = serve.get_deployment_handle("Engine", app_name=app).options(
            _by_reference=False
        )
        self._timeout = timeout

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
