"""A request that costs replicas is refused, alone and for a while."""

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
