"""Clients in processes of their own, as Ray actors: closed loops over HTTP or by handle.

Ray is imported where it is used: after `benchmarks.fleet.cluster`, which makes its settings.
"""

import asyncio
import json
import os
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast
from urllib.parse import urlsplit

import httptools

Answer = dict[str, Any]
Ask = Callable[[bytes], Coroutine[Any, Any, Answer]]


def a_node() -> dict[str, Any]:
    """A node with all that this machine has, for `benchmarks.fleet.cluster.running`."""
    import torch

    return {"num_cpus": max(4, os.cpu_count() or 1), "num_gpus": torch.cuda.device_count()}


def engine_handle() -> Any:
    """A handle of the engines as `DecisionClient` holds one."""
    from ray import serve

    return serve.get_deployment_handle("Engine", "default").options(_by_reference=False)


class _Line(asyncio.Protocol):
    """A connection to a server that answers one request after the other. What a client library
    does beside sending and parsing takes a tenth of a short request's time, and is not what is
    measured.
    """

    transport: asyncio.Transport

    def __init__(self, host: str) -> None:
        self._head = f"POST /v1/systemone HTTP/1.1\r\nhost: {host}\r\n".encode()
        self._head += b"content-type: application/json\r\ncontent-length: "
        self._next()

    @classmethod
    async def to(cls, url: str) -> "_Line":
        """A connection. url: of the server."""
        where = urlsplit(url)
        loop = asyncio.get_running_loop()
        _, made = await loop.create_connection(
            lambda: cls(where.netloc), where.hostname, where.port
        )
        return made

    async def ask(self, body: bytes) -> Answer:
        """What an answer says of its time, and its tokens."""
        self.transport.write(b"%b%d\r\n\r\n%b" % (self._head, len(body), body))
        status, text = await self._answered
        self._next()
        found = json.loads(text)
        assert status == 200, found
        return {**found["x_timing"], "tokens": found["usage"]["input_tokens"]}

    def _next(self) -> None:
        self._answered: asyncio.Future[tuple[int, bytes]]
        self._answered = asyncio.get_running_loop().create_future()
        self._parser, self._text = httptools.HttpResponseParser(self), b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        self._parser.feed_data(data)

    def on_body(self, text: bytes) -> None:
        """See httptools."""
        self._text += text

    def on_message_complete(self) -> None:
        """See httptools."""
        self._answered.set_result((self._parser.get_status_code(), self._text))

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        if not self._answered.done():
            self._answered.set_exception(ConnectionError(str(exc or "the server hung up")))


class Caller:
    """Some of the clients of a closed loop. spans are (end, milliseconds, stages) of answers."""

    def __init__(self, bodies: Sequence[bytes], url: str) -> None:
        """bodies: JSON of requests, asked in turn. url: of the server; "": by handle."""
        self._bodies, self._url, self._turn = bodies, url, 0

    async def run(self, clients: int, seconds: float) -> list[tuple[float, float, Answer]]:
        """Every client asks again as soon as it is answered."""
        found: list[tuple[float, float, Answer]] = []
        began = time.perf_counter()

        async def client(ask: Ask) -> None:
            while (asked := time.perf_counter()) - began < seconds:
                self._turn += 1
                answer = await ask(self._bodies[self._turn % len(self._bodies)])
                ended = time.perf_counter()
                found.append((ended - began, 1000 * (ended - asked), answer))

        if not self._url:
            await asyncio.gather(*(client(self._by_handle()) for _ in range(clients)))
            return found
        lines = await asyncio.gather(*(_Line.to(self._url) for _ in range(clients)))
        try:
            await asyncio.gather(*(client(line.ask) for line in lines))
        finally:
            for line in lines:
                line.transport.close()
        return found

    def _by_handle(self) -> Ask:
        from flide_engine.wire import from_json
        from router.asking import ask as asked
        from router.options import CallOptions

        handle, options = engine_handle(), CallOptions(timeout_s=60.0)

        async def ask(body: bytes) -> Answer:
            response = await asked(handle, from_json(body), options, body)
            return {**response.x_timing, "tokens": response.usage.input_tokens}

        return ask


@contextmanager
def warm_callers(
    bodies: Sequence[bytes], url: str, clients: int, processes: int
) -> Iterator[Callable[[float], list[tuple[float, float, Answer]]]]:
    """A loop of clients that have asked for half a second, one a process: from seconds to the spans
    of all clients, which so many processes share.
    """
    import ray

    shares = [clients // processes + (i < clients % processes) for i in range(processes)]
    actor: Any = ray.remote(num_cpus=0)(Caller)
    callers = [actor.remote(bodies[i::processes], url) for i, n in enumerate(shares) if n]
    try:
        ray.get([caller.run.remote(1, 0.5) for caller in callers])  # connections, code, pages
        each = list(zip(callers, filter(None, shares), strict=True))

        def run(seconds: float) -> list[tuple[float, float, Answer]]:
            told = ray.get([caller.run.remote(n, seconds) for caller, n in each])
            return [span for spans in told for span in spans]

        yield run
    finally:
        for caller in callers:
            ray.kill(caller)
