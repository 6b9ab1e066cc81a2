"""The HTTP surface as a raw ASGI app; what it calls is handed in, so it needs neither Ray nor an
engine.

GET  /               the playground: a page to ask by hand
POST /v1/systemone   a decision request, answered
GET  /v1/models      what is served
     /v1/states      what is remembered of states; see `router.states_http`
GET  /health         200 once a decision can be answered or a sleeping fleet be woken, else 503
GET  /version        versions of this server and of the model
GET  /openapi.json   all of this, for machines
"""

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace
from typing import Any, Protocol

import orjson

from flide_engine.api import DecisionRequest, DecisionResponse
from flide_engine.errors import DeadlineExceeded, FlideError, UnsupportedEncoding
from flide_engine.wire import from_json
from router.auth import Keys, Tenant
from router.body import ClientLeft, Receive, decode_body, read_body
from router.charging import Charges
from router.http_errors import STATUS, error_body, error_headers
from router.observed import Trip, trip_of
from router.openapi import document
from router.options import CallOptions, HttpLimits, from_headers
from router.playground import Html, page
from router.states_http import Keeper, StateRoutes, is_ours

log = logging.getLogger("ray.serve")

Scope = dict[str, Any]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

REQUEST_ID = b"x-typesafe-request-id"
_ID = re.compile(rb"[\x21-\x7e]{1,128}")


class Decider(Keeper, Protocol):
    """What stands behind the HTTP surface."""

    async def decide(
        self, request: DecisionRequest, body: bytes, options: CallOptions
    ) -> DecisionResponse:
        """Answers, or raises a FlideError; body: the JSON that the request was read from."""
        ...

    async def models(self) -> list[dict[str, str]]:
        """name, description and release_date of each served model. Raises NotReady."""
        ...

    async def health(self) -> str:
        """What a fleet is that can be asked; "ok" if it answers at once. Raises NotReady."""
        ...

    async def version(self) -> dict[str, str]:
        """Versions of this server and of what it serves. Raises NotReady."""
        ...


class HttpApp:
    """ASGI callable over a `Decider`."""

    def __init__(
        self, decider: Decider, limits: HttpLimits, keys: Keys, charges: Charges | None = None
    ) -> None:
        """charges: of tenants with quotas; none: this process alone holds them to theirs."""
        self._decider, self._limits, self._keys = decider, limits, keys
        self._charges = charges or Charges(None)
        self._states = StateRoutes(decider, limits.max_body_bytes)
        self._page, self._page_headers = page()
        self._document = document({k: v for k, v in asdict(limits).items() if v is not None})
        self._routes: dict[
            str, tuple[str, Callable[[Scope, Receive], Awaitable[tuple[int, Any]]]]
        ] = {
            "/": ("GET", self._playground),
            "/v1/systemone": ("POST", self._decide),
            "/v1/models": ("GET", self._models),
            "/health": ("GET", self._health),
            "/version": ("GET", self._version),
            "/openapi.json": ("GET", self._openapi),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one connection event of the server."""
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        given = headers.get(REQUEST_ID) or headers.get(b"x-request-id") or b""
        request_id = given if _ID.fullmatch(given) else uuid.uuid4().hex.encode()
        if request_id != headers.get(b"x-request-id", request_id):
            # Serve logs under the one that it has, or has made
            log.info("the caller knows this request as %s", request_id.decode())
        extra: Headers
        try:
            status, body, extra = await self._route(scope, receive)
        except ClientLeft:
            return
        except FlideError as error:
            status, body, extra = STATUS[type(error)], error_body(error), error_headers(error)
        except asyncio.CancelledError:
            raise
        except Exception:
            log.exception("request %s failed", request_id.decode())
            status, extra = 500, []
            body = _detail("internal_error", "an internal error; see the log")
        html = isinstance(body, Html)
        content = body if html else orjson.dumps(body)
        kind = b"text/html; charset=utf-8" if html else b"application/json"
        start = [(b"content-type", kind), (b"content-length", b"%d" % len(content))]
        await send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [*start, (REQUEST_ID, request_id), *extra],
            }
        )
        await send({"type": "http.response.body", "body": content})

    async def _route(self, scope: Scope, receive: Receive) -> tuple[int, Any, Headers]:
        path = scope["path"].removeprefix(scope.get("root_path", "")) or "/"
        if is_ours(path):
            tenant = self._tenant(dict(scope["headers"]))
            async with self._charges.charge(tenant, 0) as charge:
                answer = await self._states(scope, receive, tenant.name)
                charge.answered(0)
            return answer
        if path not in self._routes:
            return 404, _detail("not_found", f"no such path: {path[:200]}"), []
        method, handler = self._routes[path]
        if scope["method"] != method:
            allow = [(b"allow", method.encode())]
            return 405, _detail("method_not_allowed", f"{path} takes {method}"), allow
        return *await handler(scope, receive), self._page_headers if path == "/" else []

    async def _decide(self, scope: Scope, receive: Receive) -> tuple[int, Any]:
        with trip_of(scope) as trip:
            return await self._decided(scope, receive, trip)

    async def _decided(self, scope: Scope, receive: Receive, trip: Trip) -> tuple[int, Any]:
        headers = dict(scope["headers"])
        tenant = self._tenant(headers)
        trip.tenant = tenant.name
        options = from_headers(headers, tenant.name, self._limits.max_timeout_s)
        until = time.monotonic() + (options.timeout_s or 0.0)
        try:
            async with asyncio.timeout(options.timeout_s):
                body = await self._body(scope, headers, receive)
        except TimeoutError:
            raise DeadlineExceeded(options.timeout_s or 0.0) from None
        trip.passed("read")
        async with self._charges.charge(tenant, len(body)) as charge:
            trip.passed("charge")
            request = from_json(body, self._limits.max_questions)
            trip.passed("parse")
            left = replace(options, timeout_s=max(0.0, until - time.monotonic()))
            answers = await self._decider.decide(request, body, left)
            charge.answered(answers.usage.input_tokens)
        trip.passed("call")
        return 200, answers.model_dump()

    def _tenant(self, headers: dict[bytes, bytes]) -> Tenant:
        return self._keys.check(headers.get(b"authorization", b""))

    async def _body(self, scope: Scope, headers: dict[bytes, bytes], receive: Receive) -> bytes:
        """The decoded body. Raises RequestError."""
        given = headers.get(b"content-type", b"application/json").decode("latin-1")
        kind = given.partition(";")[0].strip()
        if kind.lower() == "multipart/form-data":
            raise UnsupportedEncoding(kind, "application/json; no model here takes images")
        length = headers.get(b"content-length", b"")
        declared = int(length) if length.isdigit() else None
        body = await read_body(receive, declared, self._limits.max_body_bytes)
        encodings = [v for k, v in scope["headers"] if k == b"content-encoding"]
        encoding = b",".join(encodings).decode("latin-1")
        return decode_body(body, encoding, self._limits.max_decoded_bytes)

    async def _playground(self, scope: Scope, receive: Receive) -> tuple[int, Any]:
        return 200, self._page

    async def _models(self, scope: Scope, receive: Receive) -> tuple[int, Any]:
        self._tenant(dict(scope["headers"]))
        return 200, {"models": await self._decider.models()}

    async def _health(self, scope: Scope, receive: Receive) -> tuple[int, Any]:
        return 200, {"status": await self._decider.health()}

    async def _openapi(self, scope: Scope, receive: Receive) -> tuple[int, Any]:
        return 200, self._document

    async def _version(self, scope: Scope, receive: Receive) -> tuple[int, Any]:
        return 200, await self._decider.version()


def _detail(error_type: str, message: str) -> dict[str, Any]:
    return {"detail": {"error_type": error_type, "message": message}}


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
