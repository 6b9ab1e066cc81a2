"""`DecisionClient`: an agent's way to the engine without HTTP. Imports no torch."""

import asyncio
import time
from typing import Any

from ray import serve
from ray.exceptions import RayActorError

from flide_engine.api import DecisionRequest, DecisionResponse
from flide_engine.errors import DeadlineExceeded, NotReady
from router.ingress import ask, own_error


class DecisionClient:
    """Decisions through the handle of the `Engine` deployment, with a deadline and one retry.

    A replica that dies under a call costs one retry on another replica; the answer is the same.
    Usable in any process that is connected to the cluster (`ray.init("auto")`).
    """

    def __init__(self, app: str = "default", timeout: float = 10.0) -> None:
        """app: name of the Serve application. timeout: seconds for a call, its retry included."""
        self._handle = serve.get_deployment_handle("Engine", app_name=app).options(
            _by_reference=False
        )
        self._timeout = timeout

    def decide(self, request: DecisionRequest | dict[str, Any]) -> DecisionResponse:
        """The answers, from a process without an event loop. Raises the error tree."""
        deadline = time.monotonic() + self._timeout
        for last in (False, True):
            response = self._handle.decide.remote(request)
            try:
                answers: DecisionResponse = response.result(
                    timeout_s=max(0.0, deadline - time.monotonic())
                )
                return answers
            except TimeoutError:
                response.cancel()
                raise DeadlineExceeded(self._timeout) from None
            except RayActorError:
                if last:
                    raise NotReady("two replicas died under this request") from None
            except Exception as error:
                raise own_error(error) from None
        raise AssertionError("unreachable")

    async def adecide(self, request: DecisionRequest | dict[str, Any]) -> DecisionResponse:
        """The answers, on an event loop. Raises the error tree; cancelling it cancels the call."""
        try:
            return await asyncio.wait_for(ask(self._handle, request), self._timeout)
        except TimeoutError:
            raise DeadlineExceeded(self._timeout) from None
