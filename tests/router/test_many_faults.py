"""Bodies with as many faults as fit: little is looked at, told and logged of them."""

import logging
from typing import Any

import orjson
import pytest
from pydantic import ValidationError

from flide_engine.api import DecisionRequest
from flide_engine.errors import MOST_FAULTS, InvalidRequest
from flide_engine.wire import from_plain
from router.options import HttpLimits
from tests.router.test_http_app import Stub, app_of
from tests.router.test_observed import KEYS, Seen, asked

SECRET = "card 4929"
MANY = 20_000


def of(questions: dict[str, Any]) -> dict[str, Any]:
    """A request that asks this."""
    return {"state": "s", "questions": questions}


HOSTILE: dict[str, dict[str, Any]] = {
    "questions": of({f"{SECRET} {i}": 0 for i in range(MANY)}),
    "options": of({"q": {"type": "choice", "criteria": dict.fromkeys(map(str, range(MANY)), 0)}}),
    "levels": of({"q": {"type": "score", "criteria": [0] * MANY}}),
    "options of many questions": of(
        {str(i): {"type": "choice", "criteria": {"a": 0, "b": 0}} for i in range(1000)}
    ),
    "a long name": of({SECRET * 20_000: {"type": SECRET * 20_000}}),
    "a long type": of({"q": {"type": SECRET * 20_000}}),
}
hostile = pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)


@hostile
def test_few_faults_are_looked_for(data: dict[str, Any]) -> None:
    """Validation stops; what is told fits a small answer."""
    with pytest.raises(ValidationError) as found:
        DecisionRequest.model_validate(data)
    assert found.value.error_count() <= 10
    with pytest.raises(InvalidRequest) as refused:
        from_plain(data)
    assert 1 <= len(refused.value.faults) <= MOST_FAULTS + 1
    assert len(str(refused.value)) < 20_000


@hostile
def test_the_log_says_how_many_of_which_kind(
    data: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """And nothing of what was asked; the answer is small."""
    with caplog.at_level(logging.INFO, "ray.serve"):
        assert asked(Seen(), json=data, headers={"authorization": "Bearer right"}) == 422
    (line,) = [r.getMessage() for r in caplog.records if "not answered" in r.getMessage()]
    assert "InvalidRequest" in line
    assert len(line) < 200
    assert SECRET not in line
    assert "body" not in line


def test_faults_of_several_questions_are_told_together() -> None:
    """With those of other fields, each in its place; past twenty it says that there are more."""
    bad = {"type": "noul", "instructions": 7}
    asks = {**of({"a": bad, "b": {"type": "noul", "instructions": "?"}, "c": {}}), "model": 1}
    with pytest.raises(InvalidRequest) as refused:
        from_plain(asks)
    places = {fault.loc[:3] for fault in refused.value.faults}
    assert places == {("body", "model"), ("body", "questions", "a"), ("body", "questions", "c")}
    told = refused.value.for_logs
    assert told == "2 string_type, 1 dict_type, 1 list_type, 1 union_tag_not_found"
    with pytest.raises(InvalidRequest) as refused:
        from_plain(of({str(i): {} for i in range(MOST_FAULTS)}))
    assert len(refused.value.faults) == MOST_FAULTS
    with pytest.raises(InvalidRequest) as refused:
        from_plain(of({str(i): {} for i in range(MOST_FAULTS + 1)}))
    assert len(refused.value.faults) == MOST_FAULTS + 1
    assert "more faults than these 20" in str(refused.value)


def test_the_number_of_questions_is_looked_at_first() -> None:
    """By the Gateway, too, with the option's name; at the limit they are read."""
    limits = HttpLimits(1 << 20, 1 << 20, 60.0, max_questions=3)
    stub = Stub()
    app: Any = app_of(stub, KEYS, limits)
    headers = {"authorization": "Bearer right"}
    good = {"type": "noul", "instructions": "?"}
    few, many = of(dict.fromkeys("abc", good)), of(dict.fromkeys("abcd", 0))
    for data, status in ((many, 422), (few, 200)):
        assert asked(Seen(), app=app, content=orjson.dumps(data), headers=headers) == status
    with pytest.raises(InvalidRequest) as refused:
        from_plain(of(dict.fromkeys("abcd", 0)), 3)
    (fault,) = refused.value.faults
    assert fault.loc == ("body", "questions")
    assert fault.msg == "4 questions; the limit is 3 (max_questions)"
