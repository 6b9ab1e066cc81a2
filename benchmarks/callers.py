"""Clients in processes of their own, as Ray actors: closed loops over HTTP or by handle.

Ray is imported where it is used: after `benchmarks.fleet.cluster`, which makes its settings.
"""

import asyncio
import os
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import aiohttp

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
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            await asyncio.gather(*(client(self._over(session)) for _ in range(clients)))
        return found

    def _over(self, session: aiohttp.ClientSession) -> Ask:
        headers = {"content-type": "application/json"}

        async def ask(body: bytes) -> Answer:
            path = f"{self._url}/v1/systemone"
            async with session.post(path, data=body, headers=headers) as answer:
                found: Answer = await answer.json()
                assert answer.status == 200, found
            return {**found["x_timing"], "tokens": found["usage"]["input_tokens"]}

        return ask

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
