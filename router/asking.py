"""One decision through an engine handle, with its routing key and one retry: what the Gateway and
`DecisionClient` share. Imports no torch.
"""

import asyncio
import time
from typing import Any

from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle, DeploymentResponse

from flide_engine.api import DecisionRequest, DecisionResponse
from flide_engine.errors import (
    DeadlineExceeded,
    EngineStopped,
    FlideError,
    Overloaded,
    RequestError,
)
from router.boards import shared
from router.quarantine import DEATHS, Quarantine
from router.routing_key import route_key
from router.session_id import check_session_id

_quarantine = Quarantine()
"""What this process refuses; a request must cost two replicas in one call to get there."""


class Call:
    """One decision, asked once more if a replica dies under it.

    Decisions change nothing, so asking twice is safe. Raises InvalidRequest for a bad session id.
    """

    TRIES = DEATHS

    def __init__(
        self,
        handle: DeploymentHandle,
        request: DecisionRequest | dict[str, Any],
        tenant: str = "",
        session_id: str = "",
    ) -> None:
        check_session_id(session_id)
        _quarantine.check(request)
        # a tuple of builtins: the class would be pickled by value with each call
        route = tuple(route_key(request, tenant, session_id))
        self._more = {"tenant": tenant, "session_id": session_id, "route": route}
        self._handle, self._request, self._deaths = handle, request, 0

    def send(self) -> DeploymentResponse:
        """A try."""
        more = self._more if not self._deaths else {**self._more, "alone": True}
        return self._handle.decide_with_load.remote(self._request, **more)

    def answer(self, told: tuple[DecisionResponse, str, tuple[float, ...]]) -> DecisionResponse:
        """The answers of what a replica returned; its load is noted for this process's routers."""
        response, replica, load = told
        known = shared(self._handle.app_name, self._handle.deployment_name)
        known.board.answered(replica, load, time.monotonic())
        return response

    def failed(self, error: Exception) -> None:
        """Returns if another try may help; otherwise raises the error of ours in what was raised by
        a try.
        """
        ours = own_error(error)
        if not isinstance(ours, (RayActorError, EngineStopped)):
            raise ours from None
        self._deaths += 1
        if self._deaths == self.TRIES:
            raise _quarantine.put(self._request) from None


async def ask(
    handle: DeploymentHandle,
    request: DecisionRequest | dict[str, Any],
    tenant: str = "",
    session_id: str = "",
) -> DecisionResponse:
    """The answers, on an event loop. Raises the error tree; cancelling it cancels the call."""
    call = Call(handle, request, tenant, session_id)
    while True:
        response = call.send()
        try:
            return call.answer(await response)
        except asyncio.CancelledError:
            response.cancel()
            raise
        except Exception as error:
            call.failed(error)


def ask_within(
    handle: DeploymentHandle,
    request: DecisionRequest | dict[str, Any],
    seconds: float,
    session_id: str = "",
) -> DecisionResponse:
    """The answers, without an event loop, both tries within so many seconds. Raises the error
    tree.
    """
    deadline = time.monotonic() + seconds
    call = Call(handle, request, session_id=session_id)
    while True:
        response = call.send()
        try:
            left = max(0.0, deadline - time.monotonic())
            return call.answer(response.result(timeout_s=left))
        except TimeoutError:
            response.cancel()
            raise DeadlineExceeded(seconds) from None
        except Exception as error:
            call.failed(error)


def own_error(error: BaseException) -> BaseException:
    """The error of ours inside what a handle raises; Serve's refusal becomes Overloaded."""
    if isinstance(error, RayTaskError) and isinstance(error.cause, FlideError):
        return error.cause
    if isinstance(error, BackPressureError):
        return Overloaded(0, "requests", 0, "max_queued_requests", 500)
    return error


def plain_error(error: FlideError) -> Exception:
    """An error of ours for a caller who may not have this package: ValueError for a fault of its
    own, else RuntimeError.
    """
    return (ValueError if isinstance(error, RequestError) else RuntimeError)(str(error))
