"""Whether a replica has siblings, over stand-ins for Serve."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from deployments import siblings
from deployments.siblings import Siblings
from router import boards


class Router:
    """What a handle knows: nothing, until it has been asked so often."""

    def __init__(self, hears_after: int, replicas: int) -> None:
        self.looks, self._hears_after, self._replicas = 0, hears_after, replicas

    def options(self, _by_reference: bool) -> "Router":
        return self

    def running_replicas_populated(self) -> bool:
        self.looks += 1
        if self.looks < self._hears_after:
            return False
        boards.shared("app", "Engine").members.count = self._replicas
        return self._replicas > 0


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Whether there are siblings, by a router; no time passes."""
    me = SimpleNamespace(unique_id="me")
    context = SimpleNamespace(app_name="app", deployment="Engine", replica_id=me)

    async def no_time(seconds: float) -> None:
        pass

    def found(router: Router, seconds: float) -> bool:
        boards._shared.clear()
        serve = SimpleNamespace(
            get_replica_context=lambda: context, get_deployment_handle=lambda *_: router
        )
        monkeypatch.setattr(siblings, "serve", serve)
        with monkeypatch.context() as patch:
            patch.setattr(siblings, "asyncio", SimpleNamespace(sleep=no_time))
            return asyncio.run(Siblings().exist(seconds))

    yield found
    boards._shared.clear()


def test_who_is_alone_waits_until_it_has_heard_so_and_no_longer(asked: Any) -> None:
    """However late that is; who hears nothing at all waits for all of the time."""
    late = Router(hears_after=60, replicas=2)
    assert asked(late, 5.0)
    alone = Router(hears_after=3, replicas=0)
    assert not asked(alone, 5.0)
    assert alone.looks == 3
    silent = Router(hears_after=1000, replicas=2)
    assert not asked(silent, 5.0)
    assert silent.looks == 100
