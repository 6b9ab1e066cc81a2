"""What a Gateway says of its engines, over a stand-in for their handle."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayTaskError
from ray.serve.exceptions import DeploymentUnavailableError

from flide_engine.errors import NotReady
from router.ingress import Gateway
from router.options import HttpLimits

ABOUT = {"name": "m", "device": "cpu"}
STOPPED = RayTaskError("describe", "", NotReady("the engine does not run"))


async def told(outcome: object) -> Any:
    """What one replica answers."""
    if isinstance(outcome, Exception):
        raise outcome
    if outcome is asyncio.Event:
        await asyncio.Event().wait()
    return outcome


class Engines:
    """A handle: one call that ends so, and what all replicas say."""

    app_name, deployment_name = "app", "Engine"

    def __init__(self, first: object, *every: object) -> None:
        self.describe = SimpleNamespace(remote=lambda: _Response(first))
        self.every, self.broadcasts = every, 0

    def options(self, **_: Any) -> "Engines":
        return self

    def running_replicas_populated(self) -> bool:
        return True

    def broadcast(self, method: str) -> "Engines":
        assert method == "describe"
        self.broadcasts += 1
        return self

    async def _fetch_replica_results_async(self) -> list[Any]:
        return [_Response(outcome) for outcome in self.every]


class _Response:
    def __init__(self, outcome: object) -> None:
        self.outcome, self.cancelled = outcome, False

    def __await__(self) -> Any:
        return told(self.outcome).__await__()

    async def get_async(self) -> Any:
        return await told(self.outcome)

    def cancel(self) -> None:
        self.cancelled = True


def described(engines: Engines) -> dict[str, str]:
    """What the Gateway says."""
    made: Callable[..., Any] = Gateway.__mro__[1]  # as Serve's wrapper is a server, too
    about: dict[str, str] = asyncio.run(made(engines, HttpLimits(1, 1, 1.0)).describe())
    return about


def test_one_replica_that_lives_is_enough() -> None:
    """The others are asked if the first says that its engine does not run, and only then."""
    engines = Engines(ABOUT)
    assert described(engines) == ABOUT
    assert engines.broadcasts == 0
    assert described(Engines(STOPPED, STOPPED, ABOUT)) == ABOUT
    for nobody in ((STOPPED,), ()):
        with pytest.raises(NotReady):
            described(Engines(STOPPED, *nobody))


def test_who_leaves_takes_its_question_back() -> None:
    """The call is cancelled in Serve with the one who waits for it."""
    hangs = _Response(asyncio.Event)
    engines = Engines(None)
    engines.describe = SimpleNamespace(remote=lambda: hangs)

    async def leave() -> None:
        made: Callable[..., Any] = Gateway.__mro__[1]
        call = asyncio.create_task(made(engines, HttpLimits(1, 1, 1.0)).describe())
        await asyncio.sleep(0.01)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    asyncio.run(leave())
    assert hangs.cancelled


def test_an_engine_that_failed_for_good_is_not_ready() -> None:
    """As Serve says of a deployment that does not come up."""
    with pytest.raises(NotReady):
        described(Engines(DeploymentUnavailableError("Engine")))
