"""The load generator: due times in, samples out. Clock and transport are its arguments.

In the open loop every due time has a task of its own and latency counts from the due time, so a
server (or a client) that stalls is charged for every request that was due meanwhile. In the closed
loop a client sends when its answer has come and its think time is over; its latency counts from
there, and a stall costs one request a client: use it to find capacity, not latency.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from loadtest.schedule import Clock
from loadtest.workloads import OpenStream, Request, Step

TIMEOUT = "timeout"
"""Kind of error of a request that was given up; its latency so far counts in the percentiles."""


@dataclass(frozen=True)
class Reply:
    """What came back: error "" for an answer, else its kind.

    usage: tokens by name, as the answer says. stages: milliseconds by stage, where it says so.
    """

    error: str = ""
    answers: int = 0
    usage: Mapping[str, float] = field(default_factory=dict)
    stages: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Sample:
    """One request of a level: times in seconds from the level's start."""

    work: str
    questions: int
    due: float
    sent: float
    done: float
    reply: Reply

    @property
    def latency_ms(self) -> float:
        """From when it was due until it was answered or refused."""
        return (self.done - self.due) * 1000


class Transport(Protocol):
    """What carries a request to a server."""

    async def send(self, request: Request) -> Reply:
        """The reply; an error of the server or on the way is a reply too, never an exception."""
        ...


Seen = Callable[[Sample], None]


async def open_loop(
    arrivals: Iterator[float], stream: OpenStream, transport: Transport, clock: Clock, seen: Seen
) -> None:
    """Sends each request when it is due, whatever has become of those before; returns when the
    last is answered.

    seen: called with each sample, in the order of the answers.
    """
    start = clock.now()

    async def one(due: float, request: Request) -> None:
        sent = clock.now() - start
        reply = await transport.send(request)
        done = clock.now() - start
        seen(Sample(request.work, request.questions, due, sent, done, reply))

    async with asyncio.TaskGroup() as group:
        for due in arrivals:
            # built before it is due: a large state must not delay its own sending
            request = stream.at(due)
            wait = due - (clock.now() - start)
            # always yields, or a burst of late ones would keep the loop from reading answers
            await clock.sleep(max(0.0, wait))
            group.create_task(one(due, request))


async def closed_loop(
    clients: list[Iterator[Step]], seconds: float, transport: Transport, clock: Clock, seen: Seen
) -> None:
    """Each client asks, waits for the answer, thinks, and asks again, for so many seconds; returns
    when the last is answered.
    """
    start = clock.now()

    async def client(steps: Iterator[Step]) -> None:
        for step in steps:
            due = clock.now() - start + step.think_s
            if due >= seconds:
                return
            await clock.sleep(step.think_s)
            sent = clock.now() - start
            reply = await transport.send(step.request)
            done = clock.now() - start
            asked = step.request.questions
            seen(Sample(step.request.work, asked, due, sent, done, reply))
            if reply.error:
                # a refusal takes no time: without a pause its client would ask in a tight loop
                await clock.sleep(0.1)

    async with asyncio.TaskGroup() as group:
        for steps in clients:
            group.create_task(client(steps))
