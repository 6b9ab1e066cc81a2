"""Asks a fleet what callers ask, all at once, from processes of its own."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from benchmarks.fleet.callers import Caller
from benchmarks.fleet.choosing import Choosing
from benchmarks.fleet.oracle import Told, Values, distance, values
from deployments.client import DecisionClient
from flide_engine.api import DecisionRequest

ALL = 1 << 30

At = tuple[str, int]
"""A caller's name and the number of its request."""


@dataclass
class Seen:
    """What came of a run.

    answers: by caller and number of the request, each time it was asked. failed: what went wrong.
    asked, reused: tokens of all answered requests, and those of them that were resumed from.
    last_reused: the same of the last answer of each request. ms: of each answer. hash_ms,
    choose_ms: what some of the requests by handle took to be hashed, and to be given a replica.
    """

    answers: dict[At, list[Values]] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    asked: int = 0
    reused: int = 0
    last_reused: dict[At, int] = field(default_factory=dict)
    ms: list[float] = field(default_factory=list)
    hash_ms: list[float] = field(default_factory=list)
    choose_ms: list[float] = field(default_factory=list)

    def add(self, other: "Seen") -> None:
        """Counts what came of another part of the run."""
        for at, answers in other.answers.items():
            self.answers.setdefault(at, []).extend(answers)
        for name in ("failed", "ms", "hash_ms", "choose_ms"):
            getattr(self, name).extend(getattr(other, name))
        self.asked += other.asked
        self.reused += other.reused
        self.last_reused |= other.last_reused

    def differences(self, told: Told) -> dict[str, float]:
        """How far the farthest answer of each request is from an undisturbed engine's."""
        return {
            f"{at[0]} {at[1]}": max(distance(answer, told.answers[at]) for answer in answers)
            for at, answers in self.answers.items()
        }


class Asker:
    """Some of the callers; an actor of Ray."""

    def __init__(
        self, url: str, everyone: Sequence[Caller], deadline_s: float, ramp_s: float
    ) -> None:
        """As for `Asking`."""
        self._ramp_s = ramp_s
        self._url, self._callers = url + "/v1/systemone", everyone
        self._client = DecisionClient(timeout=deadline_s)
        self._deadline_s = deadline_s
        self._choosing = Choosing()
        self._seen = Seen()

    async def run(self, start: int, stop: int) -> None:
        """Every caller asks its requests `start` to `stop` in its own order, all at the same time;
        the first ones begin one after the other. Returns when all are answered.
        """
        timeout = aiohttp.ClientTimeout(total=self._deadline_s)
        connector = aiohttp.TCPConnector(limit=0)
        async with (
            aiohttp.ClientSession(timeout=timeout, connector=connector) as http,
            asyncio.TaskGroup() as group,
        ):
            for caller in self._callers:
                group.create_task(self._caller(http, caller, start, stop))
                await asyncio.sleep(0.0 if start else self._ramp_s / len(self._callers))

    async def answered(self) -> int:
        """How many answers have come so far."""
        return len(self._seen.ms)

    async def seen(self) -> Seen:
        """What came so far."""
        self._seen.hash_ms, self._seen.choose_ms = self._choosing.hash_ms, self._choosing.choose_ms
        return self._seen

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
                self._seen.failed.append(f"{caller.name} {number} by {caller.way}: {cause}")
                continue
            self._answered(caller, number, found, 1000 * (loop.time() - began))

    async def _ask(
        self, http: aiohttp.ClientSession, caller: Caller, request: dict[str, Any]
    ) -> dict[str, Any]:
        if caller.way == "client":
            typed = DecisionRequest.model_validate(request)
            found = (await self._client.adecide(typed, caller.session)).model_dump()
            self._choosing.watch(self._client)
            return found
        headers = {"X-Session-Id": caller.session} if caller.session else {}
        async with http.post(self._url, json=request, headers=headers) as answer:
            if answer.status != 200:
                raise RuntimeError(f"{answer.status} {await answer.text()}")
            told: dict[str, Any] = await answer.json()
            return told

    def _answered(self, caller: Caller, number: int, found: dict[str, Any], ms: float) -> None:
        seen, usage = self._seen, found["usage"]
        seen.answers.setdefault((caller.name, number), []).append(values(found))
        seen.asked += usage["input_tokens"]
        seen.reused += usage["x_reused_tokens"]
        seen.last_reused[caller.name, number] = usage["x_reused_tokens"]
        seen.ms.append(ms)


class Asking:
    """Callers that so many processes share. Ends them at the end of a `with` block."""

    def __init__(
        self,
        url: str,
        everyone: Sequence[Caller],
        processes: int,
        deadline_s: float,
        ramp_s: float = 0.0,
    ) -> None:
        """url: of the Gateways. deadline_s: of each request. ramp_s: seconds over which callers
        begin; 0: all at once.
        """
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        actor: Any = ray.remote(num_cpus=0, scheduling_strategy=here)(Asker)
        # neighbours ask by different ways: each process has callers of both
        pairs = [everyone[i : i + 2] for i in range(0, len(everyone), 2)]
        parts = [[c for pair in pairs[i::processes] for c in pair] for i in range(processes)]
        self._askers = [actor.remote(url, part, deadline_s, ramp_s) for part in parts if part]
        self._running: list[Any] = []

    def __enter__(self) -> "Asking":
        return self

    def __exit__(self, *error: object) -> None:
        for asker in self._askers:
            ray.kill(asker)

    def start(self, start: int = 0, stop: int = ALL) -> None:
        """Has every caller ask its requests `start` to `stop`."""
        self._running = [asker.run.remote(start, stop) for asker in self._askers]

    def done(self) -> bool:
        """Whether all are answered."""
        return not ray.wait(self._running, num_returns=len(self._running), timeout=0)[1]

    def answered(self) -> int:
        """How many answers have come so far."""
        return sum(ray.get([asker.answered.remote() for asker in self._askers]))

    def seen(self) -> Seen:
        """What came so far, once all that was started is answered."""
        ray.get(self._running)
        seen = Seen()
        for part in ray.get([asker.seen.remote() for asker in self._askers]):
            seen.add(part)
        return seen

    def run(self, start: int = 0, stop: int = ALL) -> Seen:
        """`start`, and what came of it and all before."""
        self.start(start, stop)
        return self.seen()
