"""The load generator on a virtual clock against scripted servers."""

from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest

from loadtest.driver import TIMEOUT, Reply, Sample, closed_loop, open_loop
from loadtest.schedule import even
from loadtest.stats import percentile
from loadtest.workloads import OpenStream, Request, Step, load
from tests.loadtest.virtual import VirtualClock

STALL_FROM, STALL_TO = 19.99, 21.99
DELAYS = (0.010, 0.012, 0.015, 0.011, 0.030, 0.013, 0.010, 0.100)


class Scripted:
    """Answers after the delays of a list in turn; nothing leaves it during the stall."""

    def __init__(self, clock: VirtualClock, stall: bool = True) -> None:
        self.clock, self.stall, self.count = clock, stall, 0
        self.in_flight = self.most_in_flight = 0

    async def send(self, request: Request) -> Reply:
        del request
        delay = DELAYS[self.count % len(DELAYS)]
        self.count += 1
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        now = self.clock.now()
        if self.stall and STALL_FROM <= now < STALL_TO:
            delay += STALL_TO - now
        await self.clock.sleep(delay)
        self.in_flight -= 1
        return Reply("", 1, {"input_tokens": 7})


def scripted_latency(due: float, number: int) -> float:
    """Milliseconds by the script, written down without the generator."""
    waits = STALL_TO - due if STALL_FROM <= due < STALL_TO else 0.0
    return (waits + DELAYS[number % len(DELAYS)]) * 1000


def stream(work: str = "race") -> OpenStream:
    """Requests of a synthetic workload."""
    return load(work, None).open_stream(0)


def run_open(send: Callable[[VirtualClock], Scripted], rate: float, seconds: float) -> list[Sample]:
    """Samples of an evenly spaced open loop."""
    clock, samples = VirtualClock(), list[Sample]()
    clock.run(open_loop(even(rate, seconds), stream(), send(clock), clock, samples.append))
    return sorted(samples, key=lambda s: s.due)


def test_percentiles_are_those_of_the_script_and_the_stall_shows() -> None:
    """20 requests/s for a minute, one stall of 2 s: 40 requests were due during it, all show it."""
    samples = run_open(Scripted, 20, 60)
    dues = [i / 20 for i in range(1200)]
    want = [scripted_latency(due, i) for i, due in enumerate(dues)]
    assert [s.due for s in samples] == pytest.approx(dues)
    assert [s.latency_ms for s in samples] == pytest.approx(want, abs=1e-3)
    for share in (0.5, 0.9, 0.95, 0.99, 1.0):
        got = percentile(sorted(s.latency_ms for s in samples), share)
        assert got == pytest.approx(sorted(want)[int(share * 1200) - 1], abs=1e-3)
    stalled = [s for s in samples if STALL_FROM <= s.due < STALL_TO]
    assert len(stalled) == 40
    for sample in stalled:
        assert sample.latency_ms >= (STALL_TO - sample.due) * 1000
    plain = [DELAYS[i % len(DELAYS)] * 1000 for i in range(1200)]
    slower = [s for s, ms in zip(samples, plain, strict=True) if s.latency_ms > ms + 1]
    assert slower == stalled, "every request due during the stall shows it, and no other"


def test_the_closed_loop_hides_the_stall_but_for_one_request_a_client() -> None:
    """Why latency is taken from the open loop: the same server, and three slow requests of many."""
    clock, samples = VirtualClock(), list[Sample]()
    clients: list[Iterator[Step]] = [load("race", None).client(0, i) for i in range(3)]
    server = Scripted(clock)
    clock.run(closed_loop(clients, 60, server, clock, samples.append))
    assert server.most_in_flight == 3
    assert sum(s.latency_ms > 1000 for s in samples) == 3
    assert len(samples) > 3 * 58 / (sum(DELAYS) / len(DELAYS)) * 0.9
    assert all(s.due < 60 for s in samples)


@pytest.mark.parametrize("clients", [1, 16, 256])
def test_as_many_requests_in_flight_as_clients(clients: int) -> None:
    """Each client waits for its own answer."""
    clock, samples = VirtualClock(), list[Sample]()
    workload = load("race", None)
    server = Scripted(clock, stall=False)
    steps = [workload.client(0, i) for i in range(clients)]
    clock.run(closed_loop(steps, 5, server, clock, samples.append))
    assert server.most_in_flight == clients
    assert len(samples) == server.count


def test_a_generator_that_is_frozen_is_charged_too() -> None:
    """A pause of the client's own process delays what was due meanwhile; latency says so."""

    class Freezing(Scripted):
        async def send(self, request: Request) -> Reply:
            if self.count == 100:
                self.clock.freeze(2.0)
            return await super().send(request)

    samples = run_open(lambda clock: Freezing(clock, stall=False), 20, 10)
    late = [s for s in samples if s.sent - s.due > 0.01]
    assert len(late) == 39  # from 5.05 s to 6.95 s
    for sample in late:
        assert sample.latency_ms >= (7.0 - sample.due) * 1000 - 60


def test_think_time_passes_between_an_answer_and_the_next_step() -> None:
    """An agent's state grows with every step, and it thinks in between."""
    clock, samples = VirtualClock(), list[Sample]()
    states: list[str] = []

    class Reading(Scripted):
        async def send(self, request: Request) -> Reply:
            states.append(request.body["state"])
            return await super().send(request)

    steps = load("agents", None).client(3, 0)
    clock.run(closed_loop([steps], 40, Reading(clock, stall=False), clock, samples.append))
    again = load("agents", None).client(3, 0)
    for before, sample, step in zip([None, *samples], samples, again, strict=False):
        ready = (before.done if before else 0.0) + step.think_s
        assert sample.due == pytest.approx(ready, abs=1e-6)
    assert all(b.startswith(a) for a, b in pairwise(states[:6]))


def test_errors_and_timeouts_are_replies() -> None:
    """A client that is refused pauses, and goes on."""

    class Refusing(Scripted):
        async def send(self, request: Request) -> Reply:
            await super().send(request)
            return Reply("429 rate_limit_error" if self.count % 2 else TIMEOUT)

    clock, samples = VirtualClock(), list[Sample]()
    steps = load("race", None).client(0, 0)
    clock.run(closed_loop([steps], 5, Refusing(clock, stall=False), clock, samples.append))
    assert {s.reply.error for s in samples} == {"429 rate_limit_error", TIMEOUT}
    assert 35 < len(samples) < 50
