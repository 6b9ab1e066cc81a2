"""The whole app in this process: Gateway, handle and a real engine, without a cluster."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from ray import serve
from ray.serve.exceptions import RequestCancelledError
from ray.serve.handle import DeploymentHandle

from deployments.app import build
from deployments.config import AppArgs
from deployments.state_calls import perform
from flide_engine import DecisionRequest, DecisionResponse
from flide_engine.engine import Engine
from router.auth import Keys
from router.charging import Charges
from router.http_app import HttpApp
from router.options import CallOptions, HttpLimits
from router.states import StateCall, Told


class ByHandle:
    """A `router.http_app.Decider` over the Gateway's handle."""

    def __init__(self, handle: DeploymentHandle, engine: Engine) -> None:
        self._handle, self._engine = handle, engine

    async def decide(
        self, request: DecisionRequest, body: bytes, options: CallOptions
    ) -> DecisionResponse:
        response = self._handle.ask.remote(request, body, options)
        try:
            answers: DecisionResponse = await response
        except (asyncio.CancelledError, RequestCancelledError):
            response.cancel()  # Serve does that for a call inside a call
            raise asyncio.CancelledError from None
        return answers

    async def states(self, call: StateCall) -> tuple[list[Told], int]:
        return [await asyncio.to_thread(perform, self._engine, call, "local")], 1

    async def models(self) -> list[dict[str, str]]:
        about = await self._handle.describe.remote()
        return [{key: about[key] for key in ("name", "description", "release_date")}]

    async def health(self) -> str:
        return str(await self._handle.health.remote())

    async def version(self) -> dict[str, str]:
        return dict(await self._handle.describe.remote())


class LocalApp:
    """handle: of the Gateway. engine: the one behind it. http: the app as an ASGI callable."""

    def __init__(
        self, args: AppArgs, handle: DeploymentHandle, engine: Engine, charges: Charges | None
    ) -> None:
        self.args, self.handle, self.engine = args, handle, engine
        self.keys = Keys(args.key_hashes)
        self.keys.load(args.api_keys)
        limits = HttpLimits(
            args.max_body_bytes,
            args.engine.max_decoded_bytes,
            args.engine.max_timeout_s,
            args.engine.max_questions,
        )
        self.http = HttpApp(ByHandle(handle, engine), limits, self.keys, charges)

    def client(self) -> httpx.AsyncClient:
        """An HTTP client, in this process."""
        transport = httpx.ASGITransport(self.http)  # type: ignore[arg-type]
        return httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60)

    def post(self, **kw: Any) -> httpx.Response:
        """One decision over HTTP."""

        async def run() -> httpx.Response:
            async with self.client() as client:
                return await client.post("/v1/systemone", **kw)

        return asyncio.run(run())


@contextmanager
def local_app(charges: Charges | None = None, **options: Any) -> Iterator[LocalApp]:
    """An app of these arguments; its engine is closed at the end."""
    engines: list[Engine] = []

    class Seen(Engine):
        def __init__(self, *args: Any, **kw: Any) -> None:
            super().__init__(*args, **kw)
            engines.append(self)

    args = AppArgs.model_validate(options)
    with library_log_kept():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("flide_engine.engine.Engine", Seen)
            handle = serve.run(build(args), _local_testing_mode=True)
        (engine,) = engines
        try:
            yield LocalApp(args, handle, engine, charges)
        finally:
            engine.close()


@contextmanager
def library_log_kept() -> Iterator[None]:
    """A replica joins the library's log to Serve's for good; other tests come after it here."""
    logger = logging.getLogger("flide_engine")
    handlers, propagate, level = list(logger.handlers), logger.propagate, logger.level
    try:
        yield
    finally:
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)
