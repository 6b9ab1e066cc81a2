"""A handle whose calls end as told, and the two ways to ask through it; no cluster."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

from flide_engine import DecisionResponse, Usage
from flide_engine.errors import EngineStopped, FlideError
from router.asking import ask, ask_within
from router.options import CallOptions

REQUEST: dict[str, Any] = {
    "state": "s",
    "questions": {"q": {"type": "noul", "instructions": "?"}},
}
GOOD = DecisionResponse(model="m", usage=Usage(input_tokens=1, output_tokens=0), answers={})
DIED, AWAY = ActorDiedError(), ActorUnavailableError("unreachable", None)
STOPPED = RayTaskError("decide", "", EngineStopped("CUDA error"))
WAITED = RayTaskError("decide", "", EngineStopped("CUDA error", running=False, replica="broken"))


@dataclass(frozen=True)
class Returned:
    """An error that comes as a value."""

    error: FlideError


class Response:
    """What a handle gives back."""

    def __init__(self, outcome: object) -> None:
        self.outcome, self.cancelled = outcome, False

    def result(self, timeout_s: float | None) -> Any:
        assert timeout_s is None or timeout_s >= 0
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        if isinstance(self.outcome, Returned):
            return self.outcome.error, "replica", (7.0, 5.0, 3.0, 400.0)
        assert isinstance(self.outcome, DecisionResponse)
        return self.outcome.model_dump_json().encode(), "replica", (7.0, 5.0, 3.0, 400.0)

    def cancel(self) -> None:
        self.cancelled = True

    def __await__(self) -> Iterator[Any]:
        yield from asyncio.sleep(60 if self.outcome == "late" else 0).__await__()
        return self.result(1.0)


class Handle:
    """An engine handle whose calls end as told, one after the other."""

    app_name, deployment_name = "app", "Engine"

    def __init__(self, *outcomes: object) -> None:
        self.responses = [Response(outcome) for outcome in outcomes]
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.decide_with_load = self
        self.by_reference: list[bool] = []

        self.woken: list[Response] = []
        self.describe = self.Describe(self.woken)

    class Describe:
        """The cheap call that waits until there is a replica, which never comes."""

        def __init__(self, woken: list["Response"]) -> None:
            self._woken = woken

        def remote(self) -> "Response":
            self._woken.append(Response(TimeoutError()))
            return self._woken[-1]

    def running_replicas_populated(self) -> bool:
        return True

    def options(self, _by_reference: bool) -> "Handle":
        self.by_reference.append(_by_reference)
        return self

    def remote(self, *args: Any, **kwargs: Any) -> Response:
        self.calls.append((args, kwargs))
        return self.responses[len(self.calls) - 1]


def asked(handle: Any, way: str, session_id: str = "") -> DecisionResponse:
    """The answers, with or without an event loop."""
    if way == "await":
        return asyncio.run(ask(handle, REQUEST, CallOptions("", session_id, 60.0)))
    return ask_within(handle, REQUEST, CallOptions("", session_id, 60.0))


both = pytest.mark.parametrize("way", ["await", "block"])
