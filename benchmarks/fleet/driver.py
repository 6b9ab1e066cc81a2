"""Asks a fleet what callers ask, all at once, and lets things happen to it meanwhile."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from benchmarks.fleet.callers import Caller
from benchmarks.fleet.oracle import Told, Values, distance, values
from deployments.client import DecisionClient
from flide_engine.api import DecisionRequest

DEADLINE_S = 60.0

Event = Callable[[], None]


@dataclass
class Seen:
    """What came of a run.

    answers: by caller and number of the request. failed: what went wrong. computed: tokens that
    answers say were computed for them. ms: of each answered request.
    """

    answers: dict[tuple[str, int], Values] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    computed: int = 0
    ms: list[float] = field(default_factory=list)
    reused: dict[tuple[str, int], int] = field(default_factory=dict)

    def changed(self, told: Told, tolerance: float) -> list[str]:
        """Answers that differ from those of an undisturbed engine."""
        far = []
        for at, answer in self.answers.items():
            if (d := distance(answer, told.answers[at])) > tolerance:
                far.append(f"{at[0]} {at[1]}: {d:.2g}")
        return far


class Asking:
    """One run: every caller asks in its own order, all at the same time."""

    def __init__(self, url: str, events: Mapping[int, Event] | None = None) -> None:
        """events: what happens when so many requests have been answered."""
        self._url = url + "/v1/systemone"
        self._client = DecisionClient(timeout=DEADLINE_S)
        self._events = dict(events or {})
        self._happening: list[asyncio.Task[None]] = []
        self.seen = Seen()

    async def run(self, everyone: Sequence[Caller], start: int = 0, stop: int = 1 << 30) -> Seen:
        """Asks requests `start` to `stop` of each caller; returns when all are answered."""
        timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
        connector = aiohttp.TCPConnector(limit=0)
        async with (
            aiohttp.ClientSession(timeout=timeout, connector=connector) as http,
            asyncio.TaskGroup() as group,
        ):
            for caller in everyone:
                group.create_task(self._caller(http, caller, start, stop))
        await asyncio.gather(*self._happening)
        return self.seen

    async def _caller(
        self, http: aiohttp.ClientSession, caller: Caller, start: int, stop: int
    ) -> None:
        loop = asyncio.get_running_loop()
        for number, request in enumerate(caller.requests[start:stop], start):
            began = loop.time()
            try:
                found = await self._ask(http, caller, request)
            except Exception as error:
                cause = f"{type(error).__name__}: {error}"[:300]
                self.seen.failed.append(f"{caller.name} {number} by {caller.way}: {cause}")
                continue
            self._answered(caller, number, found, 1000 * (loop.time() - began))

    async def _ask(
        self, http: aiohttp.ClientSession, caller: Caller, request: dict[str, Any]
    ) -> dict[str, Any]:
        if caller.way == "client":
            typed = DecisionRequest.model_validate(request)
            return (await self._client.adecide(typed, caller.session)).model_dump()
        headers = {"X-Session-Id": caller.session} if caller.session else {}
        async with http.post(self._url, json=request, headers=headers) as answer:
            if answer.status != 200:
                raise RuntimeError(f"{answer.status} {await answer.text()}")
            found: dict[str, Any] = await answer.json()
            return found

    def _answered(self, caller: Caller, number: int, found: dict[str, Any], ms: float) -> None:
        seen, usage = self.seen, found["usage"]
        seen.answers[caller.name, number] = values(found)
        seen.reused[caller.name, number] = usage["x_reused_tokens"]
        seen.computed += usage["input_tokens"] - usage["x_reused_tokens"]
        seen.ms.append(ms)
        event = self._events.pop(len(seen.answers), None)
        if event is not None:
            self._happening.append(asyncio.create_task(asyncio.to_thread(event)))
