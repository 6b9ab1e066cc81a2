"""One decision through an engine handle, with its routing key, asked again where replicas die: what
the Gateway and `DecisionClient` share. Imports no torch.
"""

import asyncio
import logging
import math
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any, TypeGuard

from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    RequestCancelledError,
)
from ray.serve.handle import DeploymentHandle, DeploymentResponse

from flide_engine.api import DecisionRequest, DecisionResponse
from flide_engine.errors import (
    DeadlineExceeded,
    EngineStopped,
    FlideError,
    NotReady,
    Overloaded,
    RequestError,
)
from flide_engine.wire import to_json
from router import suspects
from router.boards import shared
from router.channel import Channels, Told
from router.options import CallOptions
from router.quarantine import Quarantine
from router.routing_key import route_key
from router.session_id import check_session_id
from router.suspects import SETTLED_WITHIN_S, End
from router.waking import cheap_call, waking_of

log = logging.getLogger("ray.serve")

BY_VALUE_BYTES = 2 << 20
"""Largest request that goes by gRPC, whose messages end at 4 MiB; larger ones go through Ray's
object store. An answer repeats at most its request's names, with some 26 bytes for each, of which
65,536 tokens make room for 1.7 MB.
"""

_quarantine = Quarantine(store=suspects.Refused())
"""What is refused: a request that crashed a replica in which it ran alone, after another one had
died under it; or that ran alone in two whose processes are gone."""


class Call:
    """One decision, asked again if a replica dies under it, within its time.

    Decisions change nothing, so asking twice is safe. After the first death it is a suspect: asked
    alone, until it is answered, or replicas die while it runs there; unless it is known to have
    only waited. Raises InvalidRequest for a request that is no JSON, or a bad session id.
    """

    TRIES = 6
    """As one that is not to blame may meet several dying replicas, but not for ever."""

    ALONE = 2
    """Processes that may vanish while it runs there alone: one may be anybody's doing."""

    def __init__(
        self,
        handle: DeploymentHandle,
        request: DecisionRequest | dict[str, Any],
        options: CallOptions,
        body: bytes | None = None,
    ) -> None:
        """body: the JSON that the request was read from, if it was."""
        check_session_id(options.session_id)
        _quarantine.check(request)
        self._body = to_json(request) if body is None else body
        if len(self._body) > BY_VALUE_BYTES:
            handle = handle.options(_by_reference=True)
        # a tuple of builtins: the class would be pickled by value with each call
        route = tuple(route_key(request, options.tenant, options.session_id))
        self._more = {
            "tenant": options.tenant,
            "session_id": options.session_id,
            "route": route,
            "batch": options.batch,
        }
        self._handle, self._request = handle, request
        self._known = shared(handle.app_name, handle.deployment_name)
        self._failures, self._ended_alone, self._suspect = 0, 0, ""
        self._seconds = options.timeout_s
        self._until = None if self._seconds is None else time.monotonic() + self._seconds
        self._patience_s = options.patience_s
        self._waking = waking_of(handle)

    @property
    def left_s(self) -> float | None:
        """Seconds that are left; None: as many as the engine allows."""
        return None if self._until is None else max(0.0, self._until - time.monotonic())

    def pauses(self) -> Iterator[float]:
        """Seconds to sleep before this process knows whether there is a replica."""
        return self._waking.pauses(self._handle.running_replicas_populated)

    def check_awake(self) -> None:
        """Wakes a fleet that sleeps. Raises NotReady if its caller does not wait for the start."""
        least = (s for s in (self._patience_s, self.left_s) if s is not None)
        self._waking.check(min(least, default=math.inf), cheap_call(self._handle))

    def send(self) -> DeploymentResponse:
        """A try by handle."""
        more = dict(self._more)
        if self._failures:
            more["retry"] = True
        if self._suspect:
            more["suspect"] = self._suspect
        return self._handle.decide_with_load.remote(self._body, timeout_s=self.left_s, **more)

    async def told(self, channels: Channels | None) -> Told:
        """What a try tells: the first over a channel, where there is one. Cancelling it cancels the
        request.
        """
        if channels is not None and not self._failures and len(self._body) <= BY_VALUE_BYTES:
            more = {**self._more, "timeout_s": self.left_s}
            if (told := await channels.ask(more, self._body)) is not None:
                return told
        found: Told = await unless_cancelled(self.send())
        return found

    def answer(self, told: Told) -> DecisionResponse:
        """The answers of what a replica returned; its load is noted for this process's routers.

        Raises the error that it returned instead.
        """
        answers, replica, load = told
        self._known.board.answered(replica, load, time.monotonic())
        if isinstance(answers, FlideError):
            raise answers
        return DecisionResponse.model_validate_json(answers)

    def failed(self, error: Exception) -> None:
        """Returns if another try may help; otherwise raises the error of ours in what was raised by
        a try. May block while the cluster learns of a death.
        """
        ours = own_error(error)
        if not is_death(ours):
            self.ended()
            raise ours from None
        self._failures += 1
        log.warning("a replica died under the request: %s", ours)
        if isinstance(ours, EngineStopped) and ours.replica:
            self._known.stopped.add(ours.replica)  # or the next try would go there again
        if self._suspect and self._is_to_blame(ours):
            log.error("it is to blame for that; it is refused from now on")
            raise _quarantine.put(self._request) from None
        _quarantine.check_with_others(self._request)  # it may be refused elsewhere
        if self._failures == self.TRIES:
            self.ended()
            cause = f"{self.TRIES} replicas could not answer, the last one: {ours}"
            raise EngineStopped(cause) from None
        if not isinstance(ours, EngineStopped) or ours.running:
            self._suspect = self._suspect or uuid.uuid4().hex

    def _is_to_blame(self, error: Exception) -> bool:
        """Whether replicas have died while this ran there, and no other suspect: one whose engine
        says so, or whose process ended by a fault of its own, or `ALONE` whose processes are gone.
        """
        if isinstance(error, EngineStopped):
            return error.running
        left = self.left_s
        within_s = SETTLED_WITHIN_S if left is None else min(SETTLED_WITHIN_S, left)
        end = suspects.ended_under(self._suspect, within_s)
        self._ended_alone += end is End.GONE
        return end is End.CRASHED or self._ended_alone == self.ALONE

    @property
    def is_suspect(self) -> bool:
        """Whether a replica has died while this may have run there."""
        return bool(self._suspect)

    def ended(self) -> None:
        """It is not answered: a replica that died may have left its mark. Blocks for a millisecond
        if it was a suspect.
        """
        if self._suspect:
            try:
                suspects.end(self._suspect)
            except Exception:
                log.exception("the mark of a suspect is left in the cluster's store")

    def late(self) -> DeadlineExceeded:
        """The error of a call whose time is over."""
        return DeadlineExceeded(self._seconds or 0.0)


async def ask(
    handle: DeploymentHandle,
    request: DecisionRequest | dict[str, Any],
    options: CallOptions,
    body: bytes | None = None,
    channels: Channels | None = None,
) -> DecisionResponse:
    """The answers, on an event loop. Raises the error tree; cancelling it cancels the call.

    body: the JSON that the request was read from, if it was. channels: of this event loop to the
    handle's replicas; without any, all goes by handle.
    """
    call = Call(handle, request, options, body)
    for pause in call.pauses():
        await asyncio.sleep(pause)
    call.check_awake()
    while True:
        try:
            async with asyncio.timeout(call.left_s):
                return call.answer(await call.told(channels))
        except TimeoutError:
            _in_background(call.ended)
            raise call.late() from None
        except asyncio.CancelledError:
            _in_background(call.ended)
            raise
        except Exception as error:
            if not is_death(ours := own_error(error)):
                if call.is_suspect:  # else a refusal costs no thread
                    _in_background(call.ended)
                raise ours from None
            try:
                async with asyncio.timeout(call.left_s):  # the cluster's store may be slow to tell
                    await asyncio.to_thread(call.failed, error)
            except TimeoutError:
                raise call.late() from None


def _in_background(work: Callable[[], None]) -> None:
    asyncio.get_running_loop().run_in_executor(None, work)


async def unless_cancelled(response: DeploymentResponse) -> Any:
    """What a call returns; it is cancelled with the one who waits for it, which Serve's own wait
    would not do.
    """
    try:
        return await response
    except (asyncio.CancelledError, RequestCancelledError):
        response.cancel()
        raise asyncio.CancelledError from None


def ask_within(
    handle: DeploymentHandle,
    request: DecisionRequest | dict[str, Any],
    options: CallOptions,
) -> DecisionResponse:
    """The answers, without an event loop, all tries within the time of the options. Raises the
    error tree.
    """
    call = Call(handle, request, options)
    for pause in call.pauses():
        time.sleep(pause)
    call.check_awake()
    while True:
        response = call.send()
        try:
            return call.answer(response.result(timeout_s=call.left_s))
        except TimeoutError:
            response.cancel()
            call.ended()
            raise call.late() from None
        except Exception as error:
            call.failed(error)


def own_error(error: BaseException) -> BaseException:
    """The error of ours inside what a handle raises; Serve's refusal becomes Overloaded, and a
    deployment that could not be started is NotReady.
    """
    if isinstance(error, RayTaskError) and isinstance(error.cause, FlideError):
        return error.cause
    if isinstance(error, BackPressureError):
        waiting, most, *_ = error.args
        return Overloaded(waiting, "requests", most, "Serve's max_queued_requests", 500)
    if isinstance(error, DeploymentUnavailableError):
        return NotReady("no engine replica could be started; the log of deployment Engine says why")
    return error


def is_death(error: BaseException) -> TypeGuard[RayActorError | EngineStopped]:
    """Whether it says that a replica died, or could not be reached, and not that it refused."""
    return isinstance(error, (RayActorError, EngineStopped))


def plain_error(error: FlideError) -> Exception:
    """An error of ours for a caller who may not have this package: ValueError for a fault of its
    own, else RuntimeError.
    """
    return (ValueError if isinstance(error, RequestError) else RuntimeError)(str(error))
