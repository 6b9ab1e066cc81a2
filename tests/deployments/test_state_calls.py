"""A branch on its way to the replica that it belongs to, without Ray."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from deployments import drain, state_calls
from deployments.drain import Pace
from deployments.state_calls import bring_home
from flide_engine.config import EngineConfig
from flide_engine.engine import Engine
from router.routing_key import Openings, anchor_text, as_key, session_entry
from router.states import StateCall

TEXT = "A run. " + "it went on and on; " * 60
ASKED = {"state": TEXT, "questions": {"q": {"type": "noul", "instructions": "Is it so?"}}}


class Siblings:
    """A fleet in which a state belongs to this replica, and what that one takes over."""

    def __init__(self, owner: str, is_there: bool = True) -> None:
        self.owner, self.is_there = owner, is_there
        self.routes: list[Any] = []
        self.taken: list[bytes] = []
        self.origins: list[tuple[str, str]] = []
        remote = SimpleNamespace
        self.handle = SimpleNamespace(
            owner=remote(remote=self._owner), adopt=remote(remote=self._adopt)
        )

    async def exist(self, seconds: float) -> bool:
        return self.is_there

    async def _owner(self, route: object) -> str:
        self.routes.append(route)
        return self.owner

    async def _adopt(self, pieces: list[bytes], weights: str, route: object, stack: str) -> str:
        self.routes.append(route)
        self.origins.append((weights, stack))
        self.taken += pieces
        return "adopted"


def test_who_does_not_say_where_a_branch_belongs_is_asked_no_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The call is cancelled in Serve, too, which waits in the router else."""
    monkeypatch.setattr(state_calls, "HOME_WITHIN_S", 0.05)

    class Hangs:
        cancelled = False

        def __await__(self) -> Any:
            return asyncio.Event().wait().__await__()

        def cancel(self) -> None:
            self.cancelled = True

    asked, siblings, engine = Hangs(), Siblings("other"), SimpleNamespace()
    siblings.handle.owner = SimpleNamespace(remote=lambda route: asked)
    call = StateCall("branch", "acme", "run", new="twin", anchor="11" * 8)
    told = bring_home(engine, call, 64, siblings, Pace("always", 1.0), "me")  # type: ignore[arg-type]
    with pytest.raises(TimeoutError):
        asyncio.run(told)
    assert asked.cancelled


def test_a_branch_is_handed_to_its_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the owner of its own id, under its own name; nothing is packed if that is this replica."""
    monkeypatch.setattr(drain.ray, "put", lambda data: data)
    anchor = anchor_text(session_entry("acme", "twin"))
    engine, home = (Engine(EngineConfig(model="nano", device="cpu")) for _ in range(2))
    try:
        engine.submit(ASKED, tenant="acme", name="run", anchor="11" * 8).result(60)
        tokens = engine.branch("run", "twin", tenant="acme", anchor=anchor)
        call = StateCall("branch", "acme", "run", new="twin", anchor=anchor)

        def ends(siblings: Siblings, call: StateCall = call) -> str:
            pace = Pace("always", 1.0)
            told = bring_home(engine, call, tokens, siblings, pace, "me")  # type: ignore[arg-type]
            return asyncio.run(told)

        mine = Siblings("me")
        assert ends(mine) == "home"
        assert not mine.taken
        assert ends(Siblings("other", is_there=False)) == "failed"
        other = Siblings("other")
        assert ends(other) == "adopted"
        assert other.origins == [(engine.weights_hash, engine.stack)]
        for route in other.routes:
            key = as_key(route)
            assert key is not None
            assert Openings().anchor(key, 0.0).entry == session_entry("acme", "twin")
        assert home.import_state(other.taken[0]) == tokens
        assert [(s.tenant, s.name) for s in home.states(None)] == [("acme", "twin")]
        engine.forget("twin", "acme")
        assert ends(Siblings("other")) == "gone"
    finally:
        engine.close()
        home.close()
