"""What calls of `/v1/states` cost their tenant, and how long a body may take."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from flide_engine.errors import NotReady
from router import states_http
from router.auth import Keys, key_hash
from router.charging import Charges
from router.http_app import HttpApp
from router.options import HttpLimits
from router.states import StateCall, Told
from tests.router.test_http_app import Stub

BEARER = {"authorization": "Bearer k"}


class Keeper(Stub):
    """Knows no state; may have no replica."""

    calls = 0

    async def states(self, call: StateCall) -> tuple[list[Told], int]:
        """As the Gateway."""
        self.calls += 1
        if not self.ready:
            raise NotReady("no engine replica is ready")
        return [Told("r")], 1


@pytest.fixture
def keeper() -> Keeper:
    """What stands behind the app."""
    return Keeper()


@pytest.fixture
def app(keeper: Keeper, tmp_path: Path) -> HttpApp:
    """With a tenant that has saved up five requests, while no time passes."""
    path = tmp_path / "keys.json"
    entry = {"name": "a", "key_sha256": [key_hash("k")], "requests_per_minute": 60}
    path.write_text(json.dumps({"tenants": [entry]}))
    keys = Keys()
    keys.load(str(path))
    charges = Charges(None, clock=lambda: 0.0)
    return HttpApp(keeper, HttpLimits(1 << 20, 1 << 20, 60.0), keys, charges)


def statuses(app: Any, *paths: str) -> list[int]:
    """Of one call after the other."""

    async def run() -> list[int]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://t") as client:
            return [(await client.get(path, headers=BEARER)).status_code for path in paths]

    return asyncio.run(run())


def test_a_call_is_a_request_of_its_tenants_quota(app: HttpApp, keeper: Keeper) -> None:
    """One at fault, too; then no replica is asked any more."""
    paths = ("/v1/states", "/v1/states/no", "/v1/states?limit=0", "/v1/states", "/v1/states/")
    assert statuses(app, *paths, *paths[:2]) == [200, 404, 422, 200, 404, 429, 429]
    assert keeper.calls == 3


def test_what_fails_through_no_fault_of_its_own_is_free(app: HttpApp, keeper: Keeper) -> None:
    """As a decision is."""
    keeper.ready = False
    assert statuses(app, *["/v1/states"] * 20) == [503] * 20


def test_a_body_has_to_arrive(app: HttpApp, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or it is a 408; a connection that sends nothing holds nothing."""
    monkeypatch.setattr(states_http, "BODY_WITHIN_S", 0.05)
    sent: list[Any] = []

    async def never() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(name.encode(), value.encode()) for name, value in BEARER.items()]
    scope = {
        "type": "http", "method": "POST", "path": "/v1/states/run/rollback", "headers": headers,
    }  # fmt: skip
    asyncio.run(asyncio.wait_for(app(scope, never, send), 10))
    assert sent[0]["status"] == 408
    assert b"0.05 s" in sent[1]["body"]
