"""What a `DecisionClient` leaves behind once it is closed, over a stand-in for Serve."""

from typing import Any

import pytest
import ray
from ray import serve

from deployments import client
from deployments.client import DecisionClient


class Handle:
    """What Serve hands out for an app; options share its background task."""

    def __init__(self, app: str, number: int) -> None:
        self.handle_id, self.app, self.ended = f"{app}{number}", app, [False]

    def options(self, _by_reference: bool) -> "Handle":
        copy = Handle(self.app, 0)
        copy.handle_id, copy.ended = self.handle_id, self.ended
        return copy

    def shutdown(self) -> None:
        self.ended[0] = True


class Serve:
    """Keeps a handle an app."""

    def __init__(self) -> None:
        self.handle_cache: dict[tuple[str, str, bool], Handle] = {}
        self.made: list[Handle] = []

    def handle(self, deployment: str, app_name: str) -> Handle:
        key = (deployment, app_name, True)
        if key not in self.handle_cache:
            self.made.append(Handle(app_name, len(self.made)))
            self.handle_cache[key] = self.made[-1]
        return self.handle_cache[key]

    @property
    def ended(self) -> list[bool]:
        return [handle.ended[0] for handle in self.made]


@pytest.fixture
def handles(monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Serve's, in a process that is connected."""
    made = Serve()
    monkeypatch.setattr(serve, "get_deployment_handle", made.handle)
    monkeypatch.setattr(client, "_get_global_client", lambda: made)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    return made


def test_the_last_client_of_an_app_ends_its_handle(handles: Serve) -> None:
    """Once, however often it is closed; other apps' go on; who comes after that gets a new one."""
    first, second, other = DecisionClient(), DecisionClient(), DecisionClient("other")
    first.close()
    first.close()
    assert handles.ended == [False, False]
    second.close()
    assert handles.ended == [True, False]
    with DecisionClient():
        assert handles.ended == [True, False, False]
    assert handles.ended == [True, False, True]
    other.close()
    assert handles.ended == [True] * 3
    assert handles.handle_cache == {}


def test_a_block_that_raises_closes_its_client(handles: Serve) -> None:
    """And the error comes through."""
    with pytest.raises(ZeroDivisionError), DecisionClient():
        _ = 1 / 0
    assert handles.ended == [True]


def test_a_client_is_closed_after_ray(handles: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without asking Serve for anything, which would start Ray anew."""
    late = DecisionClient()

    def connect() -> Any:
        raise AssertionError("it connects")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(client, "_get_global_client", connect)
    late.close()
    assert handles.ended == [True]
