"""Every replica is asked, and each may fail alone."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError
from ray.serve.exceptions import DeploymentUnavailableError

from flide_engine.errors import NotReady, TooMuchPinned
from router import fan_out
from router.fan_out import FromAll, ask_all


class Call:
    """What Serve returns for one replica."""

    def __init__(self, answer: Callable[[], Awaitable[Any]]) -> None:
        self._answer, self.cancelled = answer, False

    async def get_async(self) -> Any:
        return await self._answer()

    def cancel(self) -> None:
        self.cancelled = True


class Handle:
    """A deployment handle over such calls; `found` waits for them, or raises."""

    def __init__(self, *calls: Call, found: Callable[[], Awaitable[None]] | None = None) -> None:
        self.calls, self.found, self.asked = calls, found, ()

    def broadcast(self, *asked: Any) -> "Handle":
        self.asked = asked
        return self

    async def _fetch_replica_results_async(self) -> tuple[Call, ...]:
        if self.found is not None:
            await self.found()
        return self.calls


async def fine() -> str:
    return "fine"


async def hangs() -> str:
    await asyncio.Event().wait()
    return "never"


def raises(error: Exception) -> Callable[[], Awaitable[Any]]:
    """Fails so."""

    async def fail() -> None:
        raise error

    return fail


def asked(handle: Any) -> FromAll:
    """The call, with little patience."""
    return asyncio.run(ask_all(handle, "on_states", "call", seconds=0.05))


def test_those_that_die_hang_or_stop_are_left_out() -> None:
    """And one that hangs is cancelled."""
    hung = Call(hangs)
    gone = [ActorUnavailableError("gone", None), NotReady("stopped"), OSError("no route")]
    handle = Handle(Call(fine), hung, *[Call(raises(error)) for error in gone], Call(fine))
    assert asked(handle) == FromAll(["fine", "fine"], 6)
    assert handle.asked == ("on_states", "call")
    assert [call.cancelled for call in handle.calls] == [c is hung for c in handle.calls]


def test_a_fault_of_the_call_is_raised() -> None:
    """Also if only one replica finds it."""
    refused = TooMuchPinned("run", 9, "slots", 8, "pin_share")
    with pytest.raises(TooMuchPinned):
        asked(Handle(Call(fine), Call(raises(refused))))


def test_no_replica_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """None is there, or none is known in time."""
    monkeypatch.setattr(fan_out, "REPLICAS_WITHIN_S", 0.01)
    with pytest.raises(NotReady):
        asked(Handle(found=raises(DeploymentUnavailableError("Engine"))))
    with pytest.raises(NotReady):
        asked(Handle(found=hangs))
    with pytest.raises(NotReady):
        asked(Handle())
