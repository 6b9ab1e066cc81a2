"""Tenants of one app: keys over HTTP, quotas, and that one learns nothing of another."""

import asyncio
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.auth import key_hash
from tests.deployments.test_limits import Held, asking, settled
from tests.local_app import LocalApp, local_app
from tests.waiting import PATIENCE_S

A, B, SLOW = "sk-a-secret", "sk-b-secret", "sk-slow-secret"
STATE = "what only the first tenant knows, and asks about again and again " * 12


def keys_file(folder: Path, **quotas: dict[str, Any]) -> Path:
    """A file of tenants a, b and slow."""
    path = folder / "keys.json"
    tenants = [
        {"name": name, "key_sha256": [key_hash(key)], **quotas.get(name, {})}
        for name, key in (("a", A), ("b", B), ("slow", SLOW))
    ]
    path.write_text(json.dumps({"tenants": tenants}))
    return path


@pytest.fixture(scope="module")
def app(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalApp]:
    """The random checkpoint; one tenant may ask once a minute, however slow the machine is."""
    path = keys_file(tmp_path_factory.mktemp("keys"), slow={"requests_per_minute": 1})
    with local_app(model=str(checkpoint), api_keys=str(path)) as made:
        yield made


def post(app: LocalApp, key: str, **headers: str) -> httpx.Response:
    """The state's question with a key."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return app.post(json=asking(STATE), headers={"authorization": f"Bearer {key}", **named})


def test_one_tenant_finds_nothing_of_another(app: LocalApp) -> None:
    """The same state under the same session id: no reused token, no name, no id; not in one round
    either.
    """
    first = post(app, A, X_Session_Id="mine").json()
    assert first["usage"]["x_reused_tokens"] == 0
    assert post(app, A, X_Session_Id="mine").json()["usage"]["x_reused_tokens"] > 0
    other = post(app, B, X_Session_Id="theirs")
    assert other.json()["usage"]["x_reused_tokens"] == 0
    assert abs(other.json()["answers"]["q"]["noul"] - first["answers"]["q"]["noul"]) < 1e-5
    assert {info.name for info in app.engine.states("a")} == {"mine"}
    assert {info.name for info in app.engine.states("b")} == {"theirs"}
    assert app.engine.states("b", "mine") == []
    assert app.engine.states("") == []
    assert app.engine.forget("mine", "b") == 0
    ids = [{k: v for k, v in r.headers.items() if "id" in k} for r in (other, post(app, B))]
    assert ids[0] != ids[1]


def test_two_tenants_share_no_trunk_in_a_round(
    app: LocalApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One round of the same state for both computes it twice; for one tenant, once."""
    computed = []
    for tenants in (("c", "d"), ("e", "e")):
        with monkeypatch.context() as patch:
            held = Held(app.engine, patch)
            busy = app.engine.submit(asking("busy"), tenant="busy")
            assert held.begun.wait(PATIENCE_S)
            futures = [app.engine.submit(asking(STATE), tenant=tenant) for tenant in tenants]
            settled(app.engine, 2)
            before = app.engine.counters()
            held.open.set()
            answers = [future.result(60) for future in (busy, *futures)]
        after = app.engine.counters()
        assert after.rounds == before.rounds + 2
        assert [a.usage.x_reused_tokens for a in answers] == [0, 0, 0]
        computed.append(after.computed - before.computed)
    assert computed[0] > 1.8 * computed[1]


def test_quotas_over_http(app: LocalApp) -> None:
    """A 429 with the quota and a time; another tenant is let in. Calls by handle have no quota."""
    until = [post(app, SLOW) for _ in range(8)]
    refused = [answer for answer in until if answer.status_code == 429]
    assert refused
    assert until[0].status_code == 200
    detail = refused[0].json()["detail"]
    assert detail["error_type"] == "rate_limit_error"
    assert "1 requests a minute is used up (requests_per_minute)" in detail["message"]
    assert 1 <= int(refused[0].headers["retry-after-ms"]) <= 120_000
    assert post(app, B).status_code == 200
    assert app.handle.decide.remote(asking()).result(timeout_s=60)["answers"]


def test_nothing_secret_is_told(app: LocalApp, caplog: pytest.LogCaptureFixture) -> None:
    """In logs and bodies, of a key that is known or of one that is not."""
    with caplog.at_level(logging.DEBUG):
        answers = [post(app, key) for key in (A, SLOW, "sk-unknown-secret")]
    assert answers[2].status_code == 401
    for text in (caplog.text, *(a.text + str(a.headers) for a in answers)):
        for key in (A, SLOW, "sk-unknown-secret"):
            assert key not in text
            assert key_hash(key) not in text


def test_a_body_that_never_comes(app: LocalApp) -> None:
    """Costs the client its own time and nobody else's."""

    async def stall() -> tuple[int, bytes]:
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            await asyncio.Event().wait()
            return {}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        headers = [(b"authorization", f"Bearer {B}".encode()), (b"x-request-timeout-ms", b"50")]
        scope = {"type": "http", "method": "POST", "path": "/v1/systemone", "headers": headers}
        await app.http(scope, receive, send)
        return sent[0]["status"], sent[1]["body"]

    status, body = asyncio.run(stall())
    assert status == 408
    assert b"no answer within 0.05 s" in body
