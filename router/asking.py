"""One decision through an engine handle, with its routing key and one retry: what the Gateway and
`DecisionClient` share. Imports no torch.
"""

import asyncio
import time
import uuid
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
from router import suspects
from router.boards import shared
from router.quarantine import Quarantine
from router.routing_key import route_key
from router.session_id import check_session_id

_quarantine = Quarantine()
"""What this process refuses; a request must cost two replicas in one call to get there."""


class Call:
    """One decision, asked again if a replica dies under it.

    Decisions change nothing, so asking twice is safe. After the first death it is a suspect: asked
    alone, until it is answered, or a replica dies while it runs there. Raises InvalidRequest for a
    bad session id.
    """

    TRIES = 6
    """As one that is not to blame may meet several dying replicas, but not for ever."""

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
        self._handle, self._request = handle, request
        self._failures, self._suspect = 0, ""

    def send(self) -> DeploymentResponse:
        """A try."""
        more = {**self._more, "suspect": self._suspect} if self._suspect else self._more
        return self._handle.decide_with_load.remote(self._request, **more)

    def answer(self, told: tuple[DecisionResponse, str, tuple[float, ...]]) -> DecisionResponse:
        """The answers of what a replica returned; its load is noted for this process's routers."""
        response, replica, load = told
        known = shared(self._handle.app_name, self._handle.deployment_name)
        known.board.answered(replica, load, time.monotonic())
        return response

    def failed(self, error: Exception) -> None:
        """Returns if another try may help; otherwise raises the error of ours in what was raised by
        a try. May block while the cluster learns of a death.
        """
        ours = own_error(error)
        if not isinstance(ours, (RayActorError, EngineStopped)):
            raise ours from None
        self._failures += 1
        if self._suspect and self._is_to_blame(ours):
            raise _quarantine.put(self._request) from None
        if self._failures == self.TRIES:
            cause = f"{self.TRIES} replicas could not answer, the last one: {ours}"
            raise EngineStopped(cause) from None
        self._suspect = self._suspect or uuid.uuid4().hex

    def _is_to_blame(self, error: Exception) -> bool:
        """Whether a replica has died while this ran there, and no other suspect."""
        if isinstance(error, EngineStopped):
            return error.running
        return suspects.killed(self._suspect)


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
            await asyncio.to_thread(call.failed, error)


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
