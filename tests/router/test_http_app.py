"""The HTTP surface over a stand-in for the engine: contract, limits and hostile bodies."""

import asyncio
import resource
from collections.abc import AsyncIterator
from typing import Any

import httpx
import orjson
import pytest
import zstandard

from flide_engine import DecisionRequest, DecisionResponse, NoulAnswer, Usage
from flide_engine.errors import FlideError, NonFiniteOutput, NotReady
from flide_engine.wire import from_json
from router.auth import Keys, key_hash
from router.http_app import HttpApp
from router.options import CallOptions, HttpLimits

LIMIT = 1 << 20
LIMITS = HttpLimits(LIMIT, LIMIT, 60.0)
GOOD = {"state": "s", "questions": {"q": {"type": "noul", "instructions": "?"}}}


class Stub:
    """Answers one half to every question; a state of "nan" or "crash" is a fault of ours."""

    def __init__(self) -> None:
        self.asked: list[DecisionRequest] = []
        self.options: list[CallOptions] = []
        self.fails: FlideError | None = None
        self.ready, self.status = True, "ok"

    @property
    def tenants(self) -> list[str]:
        return [options.tenant for options in self.options]

    @property
    def sessions(self) -> list[str]:
        return [options.session_id for options in self.options]

    async def decide(
        self, request: DecisionRequest, body: bytes, options: CallOptions
    ) -> DecisionResponse:
        assert from_json(body) == request
        self.asked.append(request)
        self.options.append(options)
        if self.fails is not None:
            raise self.fails
        if request.state == "nan":
            raise NonFiniteOutput("question 'q'")
        if request.state == "crash":
            raise ZeroDivisionError("secret detail")
        answers = {name: NoulAnswer(noul=0.5) for name in request.questions}
        usage = Usage(input_tokens=1, output_tokens=len(answers))
        return DecisionResponse(model="stub", usage=usage, answers=answers)

    async def models(self) -> list[dict[str, str]]:
        if not self.ready:
            raise NotReady("loading")
        return [{"name": "stub", "description": "a stub", "release_date": "2026-01-01"}]

    async def health(self) -> str:
        if not self.ready:
            raise NotReady("loading")
        return self.status

    async def version(self) -> dict[str, str]:
        return {"version": "0"}


@pytest.fixture
def stub() -> Stub:
    """What stands behind the app."""
    return Stub()


def app_of(stub: Stub, keys: tuple[str, ...] = (), limits: HttpLimits | None = None) -> HttpApp:
    """The app over a stand-in."""
    return HttpApp(stub, limits or LIMITS, Keys(keys))


def client_of(stub: Stub, keys: tuple[str, ...] = ()) -> httpx.AsyncClient:
    """A client of the app, in this process."""
    transport = httpx.ASGITransport(app_of(stub, keys))  # type: ignore[arg-type]
    return httpx.AsyncClient(transport=transport, base_url="http://test")


def call(
    stub: Stub, method: str, path: str, keys: tuple[str, ...] = (), **kw: Any
) -> httpx.Response:
    """One request."""

    async def run() -> httpx.Response:
        async with client_of(stub, keys) as client:
            return await client.request(method, path, **kw)

    return asyncio.run(run())


def post(stub: Stub, content: bytes, **headers: str) -> httpx.Response:
    """A decision request with these bytes."""
    named = {k.replace("_", "-"): v for k, v in headers.items()}
    return call(stub, "POST", "/v1/systemone", content=content, headers=named)


def test_a_request_is_answered(stub: Stub) -> None:
    """Status, body and request id."""
    answer = call(stub, "POST", "/v1/systemone", json=GOOD)
    assert answer.status_code == 200
    assert answer.json() == {
        "model": "stub",
        "usage": {"input_tokens": 1, "output_tokens": 1, "x_reused_tokens": 0},
        "answers": {"q": {"type": "noul", "noul": 0.5}},
        "x_timing": {},
        "x_fingerprint": "",
    }
    assert len(answer.headers["x-typesafe-request-id"]) == 32


@pytest.mark.parametrize("name", ["x-request-id", "x-typesafe-request-id"])
def test_a_given_request_id_comes_back(stub: Stub, name: str) -> None:
    """Unless it could not stand in a header."""
    answer = call(stub, "GET", "/v1/models", headers={name: "abc-1"})
    assert answer.headers["x-typesafe-request-id"] == "abc-1"
    answer = call(stub, "GET", "/v1/models", headers={name: "a b" * 100})
    assert len(answer.headers["x-typesafe-request-id"]) == 32


def test_the_other_paths(stub: Stub) -> None:
    """Models in the TypeSafe shape, readiness, version, and what is not there."""
    assert call(stub, "GET", "/v1/models").json()["models"][0]["name"] == "stub"
    assert call(stub, "GET", "/health").json() == {"status": "ok"}
    assert call(stub, "GET", "/version").json() == {"version": "0"}
    assert call(stub, "GET", "/v2").status_code == 404
    wrong = call(stub, "GET", "/v1/systemone")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    stub.status = "asleep"
    assert call(stub, "GET", "/health").json() == {"status": "asleep"}
    stub.ready = False
    assert call(stub, "GET", "/health").status_code == 503


def test_how_long_a_caller_waits_for_a_start(stub: Stub) -> None:
    """As long as it says; who says nothing has the official clients' ten seconds."""
    call(stub, "POST", "/v1/systemone", json=GOOD)
    call(stub, "POST", "/v1/systemone", json=GOOD, headers={"x-request-timeout-ms": "45000"})
    assert [options.patience_s for options in stub.options] == [10.0, None]
    assert 10.0 < (stub.options[1].timeout_s or 0) <= 45.0


def test_keys(stub: Stub) -> None:
    """401 without a key or with a wrong one, in the contract's shape; health needs none."""
    keys = (key_hash("right"), key_hash("other"))
    for given in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic right"}):
        for method, path in (("POST", "/v1/systemone"), ("GET", "/v1/models")):
            answer = call(stub, method, path, keys, json=GOOD, headers=given)
            assert answer.status_code == 401
            assert answer.json()["detail"]["error_type"] == "authentication_error"
            assert answer.headers["www-authenticate"] == "Bearer"
    right = {"authorization": "Bearer right"}
    assert call(stub, "POST", "/v1/systemone", keys, json=GOOD, headers=right).status_code == 200
    other = {"authorization": "Bearer schl\u00fcssel".encode()}
    keys = (*keys, key_hash("schl\u00fcssel"))
    assert call(stub, "GET", "/v1/models", keys, headers=other).status_code == 200
    assert call(stub, "GET", "/health", keys).status_code == 200
    assert stub.tenants == [key_hash("right")]


def asking(question: dict[str, Any]) -> bytes:
    """A body with one question."""
    return orjson.dumps({"state": "s", "questions": {"q": question}})


FAULTY = {
    "no JSON": b"{",
    "not UTF-8": b'{"state": "\xff"}',
    "NaN": b'{"state": NaN}',
    "an array": b"[]",
    "no state": b'{"questions": {"q": {"type": "noul", "instructions": "?"}}}',
    "null state": b'{"state": null, "questions": {"q": {"type": "noul", "instructions": "?"}}}',
    "no questions": b'{"state": "s"}',
    "empty questions": b'{"state": "s", "questions": {}}',
    "unknown type": asking({"type": "box"}),
    "empty noul": asking({"type": "noul"}),
    "number as text": asking({"type": "noul", "instructions": 7}),
    "one option": asking({"type": "choice", "criteria": {"a": None}}),
    "score as map": asking({"type": "score", "criteria": {"a": "b"}}),
    "lone surrogate": b'{"state": "\\ud800"}',
    "nested 100,000 deep": b'{"state": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "a 5,000-digit integer": b'{"state": ['
    + b"9" * 5000
    + b'], "questions": {"q": {"type": "noul"}}}',
    "256 options": asking({"type": "choice", "criteria": {str(i): None for i in range(256)}}),
    "a level nested 65 deep": asking(
        {"type": "score", "criteria": ["a", orjson.loads("[" * 65 + "]" * 65)]}
    ),
    "11 levels": asking({"type": "score", "criteria": [None] * 11}),
    "images": orjson.dumps({**GOOD, "assets": {"<image:0>": {"type": "image"}}}),
}


@pytest.mark.parametrize("body", FAULTY.values(), ids=FAULTY)
def test_faulty_bodies_are_422_with_places(stub: Stub, body: bytes) -> None:
    """Every one names where it is wrong, and none reaches the engine."""
    answer = post(stub, body, content_type="application/json")
    assert answer.status_code == 422
    for fault in answer.json()["detail"]:
        assert fault["loc"][0] == "body"
        assert fault["msg"]
        assert fault["type"]
    assert stub.asked == []


def test_zstd_is_decoded(stub: Stub) -> None:
    """As the official client sends it."""
    assert (
        post(stub, zstandard.compress(orjson.dumps(GOOD)), content_encoding="zstd").status_code
        == 200
    )
    assert post(stub, b"not zstd", content_encoding="zstd").status_code == 422
    assert post(stub, orjson.dumps(GOOD), content_encoding="identity").status_code == 200


def test_a_zstd_body_that_was_cut_is_not_taken_for_a_shorter_one(stub: Stub) -> None:
    """Wherever it ends; several frames are one body, and what follows them is none."""
    body = orjson.dumps({**GOOD, "state": "x" * 5000})
    packed = zstandard.compress(body[:3000]) + zstandard.compress(body[3000:])
    assert post(stub, packed, content_encoding="zstd").status_code == 200
    assert stub.asked[-1].state == "x" * 5000
    whole = zstandard.compress(orjson.dumps(GOOD))
    for cut in (*(whole[:end] for end in range(1, len(whole))), packed[:-3], whole + b"(."):
        answer = post(stub, cut, content_encoding="zstd")
        assert answer.status_code == 422
        assert answer.json()["detail"][0]["type"] == "zstd_invalid"
    assert post(stub, b"", content_encoding="zstd").status_code == 422
    assert len(stub.asked) == 1
    empty = zstandard.compress(b"")
    for frames, status in ((1023, 200), (1024, 422)):
        assert post(stub, empty * frames + whole, content_encoding="zstd").status_code == status


def _wide_window() -> bytes:
    # magic, frame header without single segment or content size, window descriptor of 2 GiB
    return bytes([0x28, 0xB5, 0x2F, 0xFD, 0x00, (31 - 10) << 3]) + b"\x01\x00\x00"


def test_bombs_cost_no_memory(stub: Stub) -> None:
    """200 MB out of a few kB, a 2 GiB window, two stacked encodings: refused in under 64 MB."""
    bomb = zstandard.compress(b" " * 200_000_000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert post(stub, bomb, content_encoding="zstd").status_code == 413
    assert post(stub, _wide_window(), content_encoding="zstd").status_code == 422
    assert post(stub, zstandard.compress(bomb), content_encoding="zstd, zstd").status_code == 415
    assert post(stub, bomb, content_encoding="gzip").status_code == 415
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10
    assert stub.asked == []


def test_the_body_limit_is_exact(stub: Stub) -> None:
    """At the limit it is read, one above it is refused, declared or not, packed or not."""
    shell = len(orjson.dumps({**GOOD, "state": ""}))
    for size, status in ((LIMIT, 200), (LIMIT + 1, 413)):
        body = orjson.dumps({**GOOD, "state": "x" * (size - shell)})
        assert len(body) == size
        assert post(stub, body).status_code == status
        assert post(stub, zstandard.compress(body), content_encoding="zstd").status_code == status

        async def parts(whole: bytes = body) -> AsyncIterator[bytes]:
            for at in range(0, len(whole), 100_000):
                yield whole[at : at + 100_000]

        answer = call(stub, "POST", "/v1/systemone", content=parts())
        assert answer.status_code == status


def test_our_faults_are_5xx_without_details(stub: Stub) -> None:
    """A typed error of ours keeps its kind; an unexpected one says nothing of its cause."""
    typed = call(stub, "POST", "/v1/systemone", json={**GOOD, "state": "nan"})
    assert (typed.status_code, typed.json()["detail"]["error_type"]) == (500, "internal_error")
    assert "not finite" in typed.json()["detail"]["message"]
    other = call(stub, "POST", "/v1/systemone", json={**GOOD, "state": "crash"})
    assert other.status_code == 500
    assert "secret" not in other.text
    assert call(stub, "POST", "/v1/systemone", json=GOOD).status_code == 200


def test_session_ids(stub: Stub) -> None:
    """Passed on as they are: none, an empty one, the longest. Others are a 422 that says why."""
    ids = ("", "agent 7/run-1 ~", "x" * 256)
    for given in ids:
        headers = {"X-Session-Id": given}
        answer = call(stub, "POST", "/v1/systemone", json=GOOD, headers=headers)
        assert answer.status_code == 200
    assert call(stub, "POST", "/v1/systemone", json=GOOD).status_code == 200
    assert stub.sessions == [*ids, ""]
    for bad, told in (
        (b"x" * 257, "257 characters"),
        (b"caf\xc3\xa9", "not printable"),
        (b"a\tb", "3"),
    ):
        answer = call(stub, "POST", "/v1/systemone", json=GOOD, headers=[(b"x-session-id", bad)])
        assert answer.status_code == 422
        (fault,) = answer.json()["detail"]
        assert fault["loc"] == ["header", "X-Session-Id"]
        assert told in fault["msg"]
        assert "256 printable ASCII" in fault["msg"]
    assert len(stub.asked) == len(ids) + 1


def test_multipart_is_refused_with_a_reason(stub: Stub) -> None:
    """No model here takes images."""
    answer = call(stub, "POST", "/v1/systemone", files={"request": b"{}"})
    assert answer.status_code == 415
    assert "images" in answer.json()["detail"]["message"]


def test_unknown_fields_are_ignored_and_ids_are_free(stub: Stub) -> None:
    """As the contract asks."""
    questions = {"a b \N{GRINNING FACE}": {"type": "noul", "instructions": {"k": [1]}, "x": 1}}
    answer = call(
        stub, "POST", "/v1/systemone", json={"state": [1], "questions": questions, "more": 1}
    )
    assert list(answer.json()["answers"]) == list(questions)
