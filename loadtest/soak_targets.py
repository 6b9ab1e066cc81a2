"""What a soak can ask: an engine in this process, a handle, a server over HTTP."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import aiohttp

from flide_engine import errors
from flide_engine.errors import FlideError
from loadtest.soak import Answers
from loadtest.soak_mix import ANSWERED, LEFT, Ask
from router.http_errors import STATUS


class InProcess:
    """An engine of this process."""

    def __init__(self, engine: Any) -> None:
        """engine: a `flide_engine.engine.Engine`."""
        self._engine = engine

    async def ask(self, ask: Ask) -> tuple[str, Answers]:
        """See `loadtest.soak.Target`."""
        how = {"tenant": ask.tenant, "name": ask.session, "batch": ask.batch}
        try:
            future = self._engine.submit(ask.body, timeout=ask.timeout_s, **how)
            try:
                response = await asyncio.wrap_future(future)
            except asyncio.CancelledError:
                future.cancel()
                raise
        except FlideError as error:
            return type(error).__name__, {}
        return ANSWERED, response.model_dump()["answers"]


class ByHandle:
    """An engine deployment by its handle, as `DecisionClient` asks it."""

    def __init__(self, handle: Any) -> None:
        """handle: of deployment `Engine`, by gRPC."""
        self._handle = handle

    async def ask(self, ask: Ask) -> tuple[str, Answers]:
        """See `loadtest.soak.Target`."""
        from router.asking import ask as asked
        from router.options import CallOptions

        if ask.plain is None:
            return next(iter(ask.ends)), {}  # bytes that are no JSON cannot be handed over
        options = CallOptions(ask.tenant, ask.session, ask.timeout_s, ask.batch)
        try:
            response = await asked(self._handle, ask.plain, options)
        except FlideError as error:
            return type(error).__name__, {}
        except asyncio.CancelledError:
            raise
        except Exception as error:
            return f"raised {type(error).__name__}", {}
        return ANSWERED, response.model_dump()["answers"]


class OverHttp:
    """A server; an async context manager."""

    def __init__(self, url: str, keys: Mapping[str, str]) -> None:
        """keys: API keys by tenant; empty for a server without keys."""
        self._url, self._keys = f"{url.rstrip('/')}/v1/systemone", keys
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> "OverHttp":
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def ask(self, ask: Ask) -> tuple[str, Answers]:
        """See `loadtest.soak.Target`; an end that is no answer is the status."""
        headers = {"content-type": "application/json"}
        if self._keys:
            key = self._keys.get(ask.tenant) or next(iter(self._keys.values()))
            headers["authorization"] = f"Bearer {key}"
        if ask.session:
            headers["x-session-id"] = ask.session
        if ask.timeout_s is not None:
            headers["x-request-timeout-ms"] = str(round(1000 * ask.timeout_s))
        if ask.batch:
            headers["x-priority"] = "batch"
        try:
            async with self._session.post(self._url, data=ask.body, headers=headers) as answer:
                content = await answer.read()
        except aiohttp.ClientError as error:
            return f"transport {type(error).__name__}", {}
        if answer.status != 200:
            return f"HTTP {answer.status}", {}
        return ANSWERED, json.loads(content)["answers"]


def http_ends(ask: Ask) -> frozenset[str]:
    """The ends that a request may have over HTTP."""
    kinds = ask.ends - {ANSWERED, LEFT}
    statuses = {f"HTTP {STATUS[getattr(errors, kind)]}" for kind in kinds}
    return (ask.ends & {ANSWERED, LEFT}) | statuses
