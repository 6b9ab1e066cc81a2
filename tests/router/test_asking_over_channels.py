"""A decision over a Gateway's own connection, and by handle where that does not do."""

import asyncio
from typing import Any

import pytest

from flide_engine.errors import DeadlineExceeded, EngineStopped, TooManyTokens
from router import asking, boards
from router.asking import BY_VALUE_BYTES, ask
from router.options import CallOptions
from router.quarantine import Quarantine
from router.suspects import End
from tests.router.handle_stand_ins import AWAY, GOOD, REQUEST, Handle, Returned

LOAD = (7.0, 5.0, 3.0, 400.0)
ANSWERS = (GOOD.model_dump_json().encode(), "replica", LOAD)


class Line:
    """A channel that ends as told."""

    def __init__(self, outcome: object) -> None:
        self.outcome = outcome
        self.asked: list[tuple[dict[str, Any], bytes]] = []
        self.cancelled = False

    async def ask(self, more: dict[str, Any], body: bytes) -> Any:
        """See router.channel.Channels."""
        self.asked.append((more, body))
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        if self.outcome == "late":
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                self.cancelled = True
                raise
        return self.outcome


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is known of any replica, and nobody is to blame."""
    monkeypatch.setattr(asking, "_quarantine", Quarantine())
    monkeypatch.setattr(asking.suspects, "ended_under", lambda suspect, within_s: End.NONE)
    boards._shared.clear()


OPTIONS = CallOptions("t", "s", 5.0)


def asked(line: Line, handle: Handle, options: CallOptions = OPTIONS) -> Any:
    """The answers."""
    given: Any = (handle, REQUEST, options, None, line)
    return asyncio.run(ask(*given))


def test_an_answer_that_comes_over_the_channel_needs_no_handle() -> None:
    """The replica is told what it would be by handle, and its load is noted."""
    line, handle = Line(ANSWERS), Handle()
    assert asked(line, handle) == GOOD
    assert handle.calls == []
    by_handle = Handle(GOOD)
    asyncio.run(ask(by_handle, REQUEST, OPTIONS))  # type: ignore[arg-type]
    ((args, kwargs),) = by_handle.calls
    ((more, body),) = line.asked
    assert body == args[0]
    assert more.keys() == kwargs.keys()
    assert {**more, "timeout_s": 0} == {**kwargs, "timeout_s": 0}
    assert boards.shared("app", "Engine").board.load.tokens_per_ms == 400.0


def test_what_the_channel_does_not_take_goes_by_handle() -> None:
    """As if there were none: no retry, no suspect; and so does what is too large for it."""
    line, handle = Line(None), Handle(GOOD)
    assert asked(line, handle) == GOOD
    ((_, kwargs),) = handle.calls
    assert "retry" not in kwargs
    assert "suspect" not in kwargs
    large, handle = Line(ANSWERS), Handle(GOOD)
    body = b" " * (BY_VALUE_BYTES + 1)
    given: Any = (handle, REQUEST, CallOptions(), body, large)
    assert asyncio.run(ask(*given)) == GOOD
    assert large.asked == []


@pytest.mark.parametrize(
    "outcome", [AWAY, (EngineStopped("CUDA error"), "replica", LOAD)], ids=["broken", "stopped"]
)
def test_a_replica_that_dies_at_the_other_end_costs_one_retry_by_handle(outcome: object) -> None:
    """As a suspect, as any death does."""
    line, handle = Line(outcome), Handle(GOOD)
    assert asked(line, handle) == GOOD
    assert len(line.asked) == 1
    ((_, kwargs),) = handle.calls
    assert kwargs["retry"]
    assert kwargs["suspect"]


def test_a_refusal_is_the_callers_and_a_deadline_holds() -> None:
    """Neither is tried again."""
    refusal = TooManyTokens("the request", 9, 8, "max_request_tokens")
    line, handle = Line((refusal, "replica", LOAD)), Handle(Returned(refusal))
    with pytest.raises(TooManyTokens):
        asked(line, handle)
    late = Line("late")
    with pytest.raises(DeadlineExceeded, match=r"0\.05 s"):
        asked(late, handle, CallOptions(timeout_s=0.05))
    assert late.cancelled
    assert handle.calls == []
