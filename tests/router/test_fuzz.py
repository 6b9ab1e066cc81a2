"""Requests nobody wrote, made from the OpenAPI document and by mutation, against the whole app in
this process: no 5xx, no hang, nothing that the document does not say.
"""

import copy
import gc
import json
from collections.abc import Iterator
from typing import Any

import httpx
import orjson
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from flide_engine.api import MAX_LEVEL_DEPTH, DecisionRequest
from flide_engine.work import RequestWork
from router.http_errors import STATUS
from router.openapi import document
from tests.local_app import LocalApp, local_app
from tests.waiting import until

EXAMPLES = 25
"""Requests an operation and kind of generation."""

QUICK = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
CHECKS = (
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
)


def asked_for() -> list[object]:
    """Requests in memory."""
    gc.collect()
    return [o for o in gc.get_objects() if type(o) in (RequestWork, DecisionRequest)]


@pytest.fixture(scope="module")
def app() -> Iterator[LocalApp]:
    """The nano model, with small limits."""
    before = asked_for()  # other files' tests hold some
    with local_app(
        model="nano", max_prompt_tokens=2048, max_request_tokens=4096, max_decoded_bytes=1 << 16,
        max_body_bytes=1 << 16, max_questions=16, max_timeout_s=20,
    ) as made:  # fmt: skip
        yield made
        assert made.engine.is_alive()
        assert made.engine.waiting == 0
        made.engine.drop_checkpoints()
        held = made.engine.accounting()
        assert held.page_bytes_held == held.slot_bytes_held == 0
        known = {id(o) for o in before}
        # a thread may be about to let go of the last one
        until(lambda: {id(o) for o in asked_for()} <= known, "requests are still in memory", 0.1)


OPERATIONS = [
    (method.upper(), path) for path, item in document({})["paths"].items() for method in item
]


def ask_as_told(app: LocalApp, method: str, path: str, mode: GenerationMode, times: int) -> None:
    """So many requests of one operation, valid or invalid ones, and every answer held to the
    document.
    """
    told = schemathesis.openapi.from_asgi("/openapi.json", app.http)

    @given(case=told[path][method].as_strategy(generation_mode=mode))
    @settings(QUICK, max_examples=times)
    def ask(case: Any) -> None:
        case.call_and_validate(checks=CHECKS, timeout=30)

    ask()


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_the_document_s_own_requests(
    app: LocalApp, method: str, path: str, mode: GenerationMode
) -> None:
    """Valid and invalid ones of every operation."""
    if mode is GenerationMode.NEGATIVE and path in ("/v1/models", "/health", "/version"):
        pytest.skip("nothing in it can be invalid")
    ask_as_told(app, method, path, mode, EXAMPLES if path == "/v1/systemone" else 6)


@pytest.mark.slow
@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
def test_many_of_the_document_s_own_requests(app: LocalApp, mode: GenerationMode) -> None:
    """Decisions, for minutes."""
    ask_as_told(app, "POST", "/v1/systemone", mode, 3000)


GOOD: dict[str, Any] = {
    "state": [{"role": "user", "content": "my card was charged twice"}],
    "questions": {
        "a": {"type": "noul", "instructions": "?", "criteria": {"true": "yes", "false": None}},
        "b": {"type": "choice", "criteria": {"billing": "money", "support": None}},
        "c": {"type": "score", "instructions": {"k": [1]}, "criteria": ["calm", "furious"]},
    },
    "model": None,
}
ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a document."""
    found = [path] if path else []
    if isinstance(value, (dict, list)):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            found += places(part, (*path, key))
    return found


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A good request with some places changed or taken out, with bytes changed, or cut."""
    body = copy.deepcopy(GOOD)
    for _ in range(draw(st.integers(0, 3))):
        *way, last = draw(st.sampled_from(places(body)))
        at: Any = body
        for key in way:
            at = at[key]
        if draw(st.booleans()) or not isinstance(at, dict):
            at[last] = draw(ANY)
        else:
            del at[last]
        if not body:
            break
    raw = bytearray(json.dumps(body).encode())
    for _ in range(draw(st.sampled_from((0, 0, 1, 3)))):
        raw[draw(st.integers(0, len(raw) - 1))] = draw(st.integers(0, 255))
    return bytes(raw[: draw(st.sampled_from((len(raw), len(raw), len(raw) // 2)))])


@given(body=mutated(), more=st.dictionaries(
    st.sampled_from(["x-session-id", "x-request-timeout-ms", "x-priority", "content-encoding",
                     "content-type", "x-request-id"]),
    st.text(st.characters(min_codepoint=1, max_codepoint=255, exclude_characters="\r\n"),
            max_size=20), max_size=2,
))  # fmt: skip
@settings(QUICK, max_examples=150)
def test_mutated_requests(app: LocalApp, body: bytes, more: dict[str, str]) -> None:
    """Are answered, or refused as the contract says."""
    headers = {name: value.encode("latin-1") for name, value in more.items()}
    answer = app.post(content=body, headers=headers)
    check(answer)


def check(answer: httpx.Response) -> None:
    """A status that a caller can meet, with the body of its kind."""
    assert answer.status_code == 200 or 400 <= answer.status_code < 500, answer.text
    if answer.status_code == 200:
        assert answer.json()["answers"]
    else:
        assert answer.json()["detail"]
        assert answer.status_code in STATUS.values()


def nested(depth: int) -> str:
    """Arrays within each other, as JSON."""
    return "[" * depth + "]" * depth


@pytest.mark.parametrize(
    ("depth", "status"),
    [(MAX_LEVEL_DEPTH, 200), (MAX_LEVEL_DEPTH + 1, 422), (200, 422), (600, 422)],
)
def test_a_level_is_nested_as_deep_as_an_answer_can_be(
    app: LocalApp, depth: int, status: int
) -> None:
    """One that is nested deeper is refused before the engine has it, and its place is told."""
    question = f'{{"type": "score", "instructions": "?", "criteria": ["a", {nested(depth)}]}}'
    answer = app.post(content=f'{{"state": "s", "questions": {{"q": {question}}}}}')
    assert answer.status_code == status
    if status == 200:
        assert json.dumps(answer.json()["answers"]["q"]["legend"]["1"]) == nested(depth)
    else:
        (fault,) = answer.json()["detail"]
        assert fault["loc"][:3] == ["body", "questions", "q"]
        assert "level 1 is nested too deeply; 64" in fault["msg"]


def test_the_document_names_every_error_and_limit() -> None:
    """As statuses; and references in it lead somewhere."""
    told = document({"max_body_bytes": 7, "max_timeout_s": 2.5})
    assert "max_body_bytes 7, max_timeout_s 2.5" in told["info"]["description"]
    responses = told["paths"]["/v1/systemone"]["post"]["responses"]
    assert set(responses) == {"200", *map(str, STATUS.values())}
    text = orjson.dumps(told).decode()
    names = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert names <= set(told["components"]["schemas"])
