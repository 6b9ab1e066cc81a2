"""A request that costs replicas is refused, alone and for a while."""

import threading
from functools import reduce
from typing import Any

import pytest

from flide_engine.api import DecisionRequest
from flide_engine.errors import RequestQuarantined
from router import quarantine
from router.quarantine import SECONDS, Quarantine

BAD = {"state": "s", "questions": {"q": {"type": "noul", "instructions": "kill?"}}}


def test_the_same_question_is_refused_in_either_form_until_its_time_is_over() -> None:
    """Another state, or another question, is none of its business."""
    now = 0.0
    held = Quarantine(clock=lambda: now)
    held.check(BAD)
    assert "2 replicas died" in str(held.put(BAD))
    for form in (BAD, DecisionRequest.model_validate(BAD), {**BAD, "model": "jev-latest"}):
        with pytest.raises(RequestQuarantined):
            held.check(form)
    held.check({**BAD, "state": "t"})
    held.check({"state": 7})
    now = SECONDS
    held.check(BAD)


def test_what_no_digest_can_be_made_of_is_none_of_its_business() -> None:
    """The engine refuses it; and were it put there, it would stand for all of its kind."""
    deep = reduce(lambda inner, _: [inner], range(2000), list[object]())
    requests = [
        DecisionRequest.model_construct(state=state, questions={}) for state in (deep, {"k": {1}})
    ]
    store = Shared()
    held = Quarantine(store=store)
    held.put(BAD)
    for request in requests:
        held.check(request)
        held.put(request)
        held.check({"state": 7})
    assert len(held) == len(store.told) == 1
    settled()


class Shared:
    """A store that counts who looks."""

    def __init__(self) -> None:
        self.told: dict[bytes, float] = {}
        self.looks = 0
        self.away = False

    def put(self, digest: bytes, until: float) -> None:
        if self.away:
            raise ConnectionError
        self.told[digest] = until

    def all(self) -> dict[bytes, float]:
        self.looks += 1
        if self.away:
            raise ConnectionError
        return dict(self.told)


def settled() -> None:
    """Once nobody looks any more."""
    for thread in threading.enumerate():
        if thread.name == "flide-quarantine":
            thread.join(60)


def test_processes_hear_of_each_other() -> None:
    """When they look, which they do now and then, and as long as the request is refused; one that
    was refused again later is refused for longer.
    """
    now, store = 1000.0, Shared()
    one, other = (Quarantine(lambda: now, store) for _ in range(2))
    other.check(BAD)
    settled()
    one.put(BAD)
    other.check(BAD)  # it looked a moment ago
    settled()
    assert store.looks == 1
    with pytest.raises(RequestQuarantined):
        other.check_with_others(BAD)
    third = Quarantine(lambda: now, store)
    third.check({**BAD, "state": "t"})
    settled()
    with pytest.raises(RequestQuarantined):
        third.check(BAD)
    now += SECONDS / 2
    one.put(BAD)
    now += SECONDS / 2 + 1
    third.check({**BAD, "state": "t"})
    settled()
    with pytest.raises(RequestQuarantined):
        third.check(BAD)
    now += SECONDS / 2
    third.check_with_others(BAD)
    settled()


def test_a_store_out_of_reach_costs_what_others_know() -> None:
    """And no request; what this process knows holds."""
    store = Shared()
    store.away = True
    held = Quarantine(store=store)
    held.check_with_others(BAD)
    assert "2 replicas died" in str(held.put(BAD))
    with pytest.raises(RequestQuarantined):
        held.check(BAD)
    settled()


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest go first, and what is over is dropped."""
    monkeypatch.setattr(quarantine, "MOST", 3)
    now = 0.0
    held = Quarantine(clock=lambda: now)
    for state in "abcd":
        held.put({**BAD, "state": state})
    assert len(held) == 3
    held.check({**BAD, "state": "a"})
    now = SECONDS + 1
    held.put(BAD)
    assert len(held) == 1


def test_once_all_is_over_a_request_costs_no_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether or not anything else is ever refused."""
    now, made = 0.0, 0

    def counted(request: DecisionRequest | dict[str, Any]) -> bytes:
        nonlocal made
        made += 1
        return digest(request)

    digest = quarantine._digest
    monkeypatch.setattr(quarantine, "_digest", counted)
    held = Quarantine(clock=lambda: now)
    held.put(BAD)
    held.check({**BAD, "state": "t"})
    assert made == 2
    now = SECONDS
    held.check({**BAD, "state": "t"})
    held.check(BAD)
    assert (made, len(held)) == (2, 0)
