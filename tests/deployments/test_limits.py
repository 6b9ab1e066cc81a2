"""Every limit by HTTP and by handle: at it answered, one above refused with value and option."""

import asyncio
import random
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
import zstandard

from flide_engine import DecisionRequest
from flide_engine.engine import Engine
from flide_engine.errors import BodyTooLarge, FlideError, InvalidRequest, Overloaded, TooManyTokens
from flide_engine.wire import from_plain, to_json
from tests.engines import wait_until_rendered
from tests.local_app import LocalApp, local_app
from tests.waiting import PATIENCE_S, until

NOUL = {"type": "noul", "instructions": "?"}
BODY, DECODED, QUESTIONS, OPTIONS, PROMPT, REQUEST, SECONDS = 3000, 6000, 7, 5, 256, 400, 60.0


@pytest.fixture(scope="module")
def app(checkpoint: Path) -> Iterator[LocalApp]:
    """The random checkpoint with small limits."""
    with local_app(
        model=str(checkpoint), max_body_bytes=BODY, max_decoded_bytes=DECODED,
        max_questions=QUESTIONS, max_options=OPTIONS, max_prompt_tokens=PROMPT,
        max_request_tokens=REQUEST, max_timeout_s=SECONDS, max_round_tokens=256,
    ) as made:  # fmt: skip
        yield made


def asking(state: Any = "s", **questions: Any) -> dict[str, Any]:
    """A request."""
    return {"state": state, "questions": questions or {"q": NOUL}}


def sized(size: int) -> dict[str, Any]:
    """A request of so many bytes and few tokens: spaces are trimmed."""
    return asking(" " * (size - len(to_json(asking("")))))


def choice(options: int) -> dict[str, Any]:
    """A request with so many options."""
    return asking(q={"type": "choice", "criteria": {f"o{i}": None for i in range(options)}})


def longest(engine: Engine, make: Callable[[int], dict[str, Any]], what: str, most: int) -> int:
    """The largest n whose request has at most `most` tokens of a kind."""
    n = 1
    while getattr(engine._family.render(from_plain(make(n + 1))), what) <= most:
        n += 1
    return n


def words(n: int) -> dict[str, Any]:
    """A prompt of so many words more."""
    return asking("x " * n)


def spread(n: int) -> dict[str, Any]:
    """Several short prompts that have so many words more, together."""
    texts = ["x " * (n // 6 + (i < n % 6)) for i in range(6)]
    return asking(
        **{f"q{i}": {"type": "noul", "instructions": f"{i} {t}"} for i, t in enumerate(texts)}
    )


@dataclass(frozen=True)
class Case:
    """A limit: requests at it and one above, and what is said of the latter."""

    at: dict[str, Any]
    above: dict[str, Any]
    status: int
    error: type[FlideError]
    told: str


def case(name: str, engine: Engine) -> Case:
    """A limit by the name of its option."""
    if name == "max_prompt_tokens":
        n = longest(engine, words, "longest_prompt", PROMPT)
        return Case(words(n), words(n + 1), 413, TooManyTokens, rf"{PROMPT} tokens \({name}\)")
    if name == "max_request_tokens":
        n = longest(engine, spread, "input_tokens", REQUEST)
        return Case(spread(n), spread(n + 1), 413, TooManyTokens, rf"{REQUEST} tokens \({name}\)")
    if name == "max_questions":
        at, above = (asking(**{f"q{i}": NOUL for i in range(QUESTIONS + n)}) for n in (0, 1))
        return Case(at, above, 422, InvalidRequest, rf"8 questions; the limit is 7 \({name}\)")
    if name == "max_options":
        told = rf"6 options; the limit is 5 options per choice \({name}\)"
        return Case(choice(OPTIONS), choice(OPTIONS + 1), 422, InvalidRequest, told)
    assert name == "max_decoded_bytes"
    told = rf"larger than {DECODED} bytes \({name}\)"
    return Case(sized(DECODED), sized(DECODED + 1), 413, BodyTooLarge, told)


@pytest.mark.parametrize(
    "name",
    [
        f"max_{n}"
        for n in ("prompt_tokens", "request_tokens", "questions", "options", "decoded_bytes")
    ],
)
def test_a_limit(app: LocalApp, name: str) -> None:
    """The same by HTTP, by a typed call, by a plain one, and in the engine itself."""
    found = case(name, app.engine)
    packed = [zstandard.compress(to_json(request)) for request in (found.at, found.above)]
    headers = {"content-encoding": "zstd"}
    good, bad = (app.post(content=body, headers=headers) for body in packed)
    assert good.status_code == 200, good.text
    assert bad.status_code == found.status
    typed = [DecisionRequest.model_validate(request) for request in (found.at, found.above)]
    if name != "max_decoded_bytes":  # a typed request says more than it was given
        assert app.handle.decide.remote(typed[0]).result(timeout_s=60).answers
        with pytest.raises(found.error, match=found.told):
            app.handle.decide.remote(typed[1]).result(timeout_s=60)
    assert app.handle.decide.remote(found.at).result(timeout_s=60)["answers"]
    with pytest.raises(ValueError, match=found.told):
        app.handle.decide.remote(found.above).result(timeout_s=60)
    assert app.engine.decide(found.at).answers
    with pytest.raises(found.error, match=found.told) as raised:
        app.engine.decide(found.above)
    assert str(raised.value).rpartition(": ")[2] in bad.text


def test_the_body_as_it_comes(app: LocalApp) -> None:
    """Before decoding; what it decodes to has a limit of its own."""
    noise = random.Random(0).randbytes(4 * BODY).decode("latin-1")
    for size, status in ((BODY, 200), (BODY + 1, 413)):
        answer = app.post(content=to_json(sized(size)))
        assert answer.status_code == status, answer.text
        assert (status == 200) or f"{BODY} bytes (max_body_bytes)" in answer.text
    packed = zstandard.compress(orjson.dumps(asking(noise)))
    assert len(packed) > BODY
    answer = app.post(content=packed, headers={"content-encoding": "zstd"})
    assert "max_body_bytes" in answer.text


def test_the_time_that_may_be_asked_for(app: LocalApp) -> None:
    """At most `max_timeout_s`, in milliseconds over HTTP and in seconds by handle; what is no time
    is refused, too.
    """
    for milliseconds, status in (("60000", 200), ("60001", 422), ("", 200)):
        answer = app.post(json=asking(), headers={"X-Request-Timeout-Ms": milliseconds})
        assert answer.status_code == status, answer.text
        if status == 422:
            (fault,) = answer.json()["detail"]
            assert fault["loc"] == ["header", "X-Request-Timeout-Ms"]
            assert "60.001 s; the limit is 60 s (max_timeout_s)" in fault["msg"]
    for bad in ("-1", "1.5", "soon", "9" * 30):
        answer = app.post(json=asking(), headers={"X-Request-Timeout-Ms": bad})
        assert answer.status_code == 422
        assert "milliseconds" in answer.text
    assert app.handle.decide.remote(asking(), timeout_s=60.0).result(timeout_s=60)["answers"]
    for timeout, told in ((60.001, "max_timeout_s"), (float("nan"), "seconds"), ("x", "seconds")):
        with pytest.raises(ValueError, match=told):
            app.handle.decide.remote(asking(), timeout_s=timeout).result(timeout_s=60)
    for timeout in (60.001, -1.0, float("inf"), True):
        with pytest.raises(InvalidRequest, match="timeout"):
            app.engine.submit(asking(), timeout=timeout)
    assert app.engine.submit(asking(), timeout=60.0).result(60).answers


class Held:
    """Rounds of an engine wait here until it is opened."""

    def __init__(self, engine: Engine, patch: pytest.MonkeyPatch) -> None:
        self.begun, self.open = threading.Event(), threading.Event()
        start = engine._loop._runner.start

        def held(*args: Any) -> Any:
            self.begun.set()
            self.open.wait(2 * PATIENCE_S)
            return start(*args)

        patch.setattr(engine._loop._runner, "start", held)


def settled(engine: Engine, count: int) -> None:
    """Returns when so many requests wait in the queue."""
    until(lambda: engine._loop.waiting == engine.waiting == count, f"{count} never waited")


class Askers:
    """Calls that wait for their answers: over HTTP on threads, and by handle."""

    def __init__(self, app: LocalApp) -> None:
        self._app = app
        self._over_http: list[httpx.Response] = []
        self._threads: list[threading.Thread] = []
        self._by_handle: list[Any] = []

    def http(self, **kw: Any) -> None:
        """One over HTTP."""

        def ask() -> None:
            self._over_http.append(self._app.post(json=asking(), **kw))

        self._threads.append(threading.Thread(target=ask))
        self._threads[-1].start()

    def handle(self, **how: Any) -> None:
        """One by handle."""
        self._by_handle.append(self._app.handle.decide.remote(asking(), **how))

    def check_answered(self) -> None:
        """Returns once all are."""
        for thread in self._threads:
            thread.join(60)
        assert [answer.status_code for answer in self._over_http] == [200] * len(self._threads)
        assert all(call.result(timeout_s=60)["answers"] for call in self._by_handle)


def refused(app: LocalApp, told: str, **how: Any) -> None:
    """Both ways are, with a time to come again. how: arguments of `decide`."""
    headers = {"X-Priority": "batch"} if how.get("batch") else {}
    answer = app.post(json=asking(), headers=headers)
    assert answer.status_code == 429, answer.text
    assert told in answer.text
    assert int(answer.headers["retry-after-ms"]) >= 50
    with pytest.raises(RuntimeError, match=re.escape(told)):
        app.handle.decide.remote(asking(), **how).result(timeout_s=60)


def test_the_number_that_waits(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most so many of one caller, by HTTP and by handle; another caller is let in all the same,
    and the flood's next is told when to come.
    """
    with local_app(model=str(checkpoint), max_waiting_requests=4) as app:
        held = Held(app.engine, monkeypatch)
        futures, askers = [app.engine.submit(asking())], Askers(app)
        assert held.begun.wait(PATIENCE_S)
        futures += [app.engine.submit(asking()) for _ in range(2)]
        askers.http()
        settled(app.engine, 3)
        askers.handle()
        settled(app.engine, 4)
        refused(app, "4 requests wait, the queue takes 4 (max_waiting_requests)")
        # two tenants: half of the room is the other's
        futures += [app.engine.submit(asking(), tenant="other") for _ in range(2)]
        for tenant in ("other", ""):
            with pytest.raises(Overloaded, match="max_waiting_requests"):
                app.engine.submit(asking(), tenant=tenant)
        held.open.set()
        assert all(future.result(60).answers for future in futures)
        askers.check_answered()
        assert app.engine.waiting == 0


def test_the_tokens_that_wait(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exactly `max_queued_tokens` are taken, one token more is refused, by HTTP and by handle."""
    with local_app(model=str(checkpoint)) as app:
        one = app.engine.decide(asking()).usage.input_tokens
    for more in (0, -1):
        with local_app(model=str(checkpoint), max_queued_tokens=3 * one + more) as app:
            held = Held(app.engine, monkeypatch)
            futures, askers = [app.engine.submit(asking())], Askers(app)
            assert held.begun.wait(PATIENCE_S)
            askers.http()
            settled(app.engine, 1)
            askers.handle()
            settled(app.engine, 2)
            if more == 0:
                futures.append(app.engine.submit(asking()))  # fits exactly
                settled(app.engine, 3)
            refused(app, f"takes {3 * one + more} (max_queued_tokens)")
            held.open.set()
            askers.check_answered()
            assert all(future.result(60).answers for future in futures)


@pytest.mark.parametrize("batch", [False, True])
def test_the_wait_that_is_predicted(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, batch: bool
) -> None:
    """At `max_queue_ms` a request is taken, above it is refused, by HTTP and by handle; batch work
    at half of it.
    """
    most = 100 if batch else 200
    with local_app(model=str(checkpoint), max_queue_ms=200) as app:
        held = Held(app.engine, monkeypatch)
        door = app.engine._loop._scheduler._door
        monkeypatch.setattr(door, "wait_ms", lambda *_, **__: float(most))
        futures, askers = [app.engine.submit(asking())], Askers(app)
        assert held.begun.wait(PATIENCE_S)
        futures.append(app.engine.submit(asking()))
        settled(app.engine, 1)
        askers.handle(batch=batch)
        askers.http(headers={"X-Priority": "batch" if batch else "interactive"})
        settled(app.engine, 3)
        monkeypatch.setattr(door, "wait_ms", lambda *_, **__: most + 1.0)
        refused(app, f"{most + 1} ms wait, the queue takes {most} (max_queue_ms)", batch=batch)
        held.open.set()
        askers.check_answered()
        assert all(future.result(60).answers for future in futures)


def test_a_deadline_and_a_departure(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A deadline over HTTP and by handle is the engine's, too; a client that goes takes its work
    out of the queue. Nothing is left then. On a busy machine a deadline may come before the queue.
    """
    with local_app(model=str(checkpoint)) as app:
        held = Held(app.engine, monkeypatch)
        first = app.engine.submit(asking())
        assert held.begun.wait(PATIENCE_S)
        answer = app.post(json=asking(), headers={"X-Request-Timeout-Ms": "100"})
        assert (answer.status_code, answer.json()["detail"]["error_type"]) == (408, "timeout_error")
        with pytest.raises(RuntimeError, match=r"no answer within 0\.1 s"):
            app.handle.decide.remote(asking(), timeout_s=0.1).result(timeout_s=60)

        wait_until_rendered(app.engine)
        late = app.engine.waiting
        assert late <= 2

        async def leave() -> None:
            async with app.client() as client:
                call = asyncio.create_task(client.post("/v1/systemone", json=asking()))
                await asyncio.to_thread(settled, app.engine, late + 1)
                call.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await call

        asyncio.run(leave())
        call = app.handle.decide.remote(asking())
        settled(app.engine, late + 2)
        call.cancel()
        entries = list(app.engine._loop._scheduler)
        assert len(entries) == late + 2
        until(lambda: all(work.future.cancelled() for work in entries), "some are not cancelled")
        held.open.set()
        assert first.result(60).answers
        settled(app.engine, 0)
        app.engine.drop_checkpoints()
        held_bytes = app.engine.accounting()
        assert held_bytes.page_bytes_held == held_bytes.slot_bytes_held == 0
        assert app.engine.counters().rounds == 1


def test_the_class_of_a_request(app: LocalApp, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch work by header and by handle waits with the batch work."""
    asked: list[bool] = []
    add = app.engine._loop.add

    def noted(work: Any, batch: bool) -> None:
        asked.append(batch)
        add(work, batch)

    monkeypatch.setattr(app.engine._loop, "add", noted)
    for value in ("batch", "Interactive", ""):
        assert app.post(json=asking(), headers={"X-Priority": value}).status_code == 200
    assert app.handle.decide.remote(asking(), batch=True).result(timeout_s=60)["answers"]
    assert asked == [True, False, False, True]
    answer = app.post(json=asking(), headers={"X-Priority": "urgent"})
    assert answer.status_code == 422
    assert answer.json()["detail"][0]["loc"] == ["header", "X-Priority"]
    assert "interactive, batch" in answer.text
