"""Requests over HTTP to any `/v1/systemone` server."""

import json
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import aiohttp

from loadtest.driver import TIMEOUT, Reply
from loadtest.workloads import Request

PATH = "/v1/systemone"


class HttpTransport:
    """A client of one server, with as many connections as requests in flight.

    Use it as an async context manager.
    """

    def __init__(self, host: str, key: str = "", timeout_s: float = 60.0) -> None:
        """host: URL of the server. key: API key, if it needs one. timeout_s: for one request."""
        self._url = host.rstrip("/")
        self._headers = headers(key)
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> Self:
        # 0: no limit; a request that is due must not wait for another's connection
        connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=self._timeout, headers=self._headers
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        await self._session.close()

    async def send(self, request: Request) -> Reply:
        """The reply; kind of error: the status with the body's code, `timeout`, or the transport's
        own.
        """
        try:
            body = json.dumps(request.body).encode()
            async with self._session.post(self._url + PATH, data=body) as answer:
                return reply_of(answer.status, await answer.read())
        except TimeoutError:
            return Reply(TIMEOUT)
        except aiohttp.ClientError as error:
            return Reply(f"transport {type(error).__name__}")

    async def about(self) -> dict[str, Any]:
        """What `GET /version` says of the server; empty where there is no such path."""
        try:
            async with self._session.get(self._url + "/version") as answer:
                found = json.loads(await answer.read()) if answer.status == 200 else {}
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}


def headers(key: str) -> dict[str, str]:
    """Headers of every request."""
    made = {"content-type": "application/json"}
    return {**made, "authorization": f"Bearer {key}"} if key else made


def reply_of(status: int, body: bytes) -> Reply:
    """A response as a reply, whichever server's shape of errors it has."""
    try:
        data = json.loads(body)
    except ValueError:
        data = None
    if status != 200:
        return Reply(f"{status} {_code(data)}".strip())
    if not isinstance(data, dict) or not isinstance(data.get("answers"), dict):
        return Reply("200 without answers")
    return answered(data)


def answered(data: Mapping[str, Any]) -> Reply:
    """The reply of an answer's JSON: its token counts, and its times where it gives them."""
    return Reply(
        "", len(data["answers"]), _numbers(data.get("usage")), _numbers(data.get("x_timing"))
    )


def _numbers(data: Any) -> dict[str, float]:
    if not isinstance(data, dict):
        return {}
    return {k: v for k, v in data.items() if type(v) in (int, float)}


def _code(data: Any) -> str:
    if not isinstance(data, dict):
        return ""
    for key in ("detail", "error"):
        inner = data.get(key)
        if isinstance(inner, list):
            return "invalid_request_error"
        if isinstance(inner, dict):
            for name in ("error_type", "code", "type"):
                if isinstance(inner.get(name), str):
                    return str(inner[name])
    return ""
