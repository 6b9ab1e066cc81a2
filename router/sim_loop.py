"""The discrete-event loop: agents think and ask, replicas run rounds, some die, some join.

The clock is virtual. Time on the network is left out: it is the same for every policy, and small
beside a round.
"""

import heapq
import random
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from router.sim_fleet import CostModel, Job, Replica, Totals
from router.sim_policies import Chooser
from router.sim_workload import OPENING_BYTES, Documents, Shape, State, tokens_of

ACTOR_DIED_S, CONNECT_FAILED_S = 0.025, 0.005
"""When a router learns that a request in flight, and one just sent, is lost (measured on Serve)."""
HEALTH_S, BROADCAST_S = (0.0, 2.0), (0.1, 0.5)
"""When other routers learn that a replica is dead, and that there is a new one."""


@dataclass(frozen=True)
class Fault:
    """At a time, a share of the replicas die, or as many join; at least one."""

    at: float
    joins: bool
    share: float


@dataclass(frozen=True)
class Scenario:
    """One run.

    replicas, agents, routers: how many. seconds: simulated, of which the first `ramp_s` bring the
    agents in. think_s: mean time between an answer and the next question. documents_per_s: asked by
    callers that are no agents, popularity 1 / rank^zipf among 2,000. careless: share of agents that
    belong to one caller, who sends a single session id for all. held: share of agents whose
    requests pass one router for good.
    cache_tokens: what a replica remembers. cost: of its rounds. faults: what happens when.
    """

    replicas: int
    agents: int
    routers: int
    seconds: float = 150.0
    ramp_s: float = 30.0
    think_s: float = 5.0
    documents_per_s: float = 0.0
    zipf: float = 1.1
    careless: float = 0.001
    held: float = 0.5
    cache_tokens: int = 8_000_000
    cost: CostModel = field(default_factory=CostModel)
    faults: tuple[Fault, ...] = ()
    seed: int = 0

    @property
    def stats_period_s(self) -> float:
        """How often Serve collects routing stats in a fleet of this size."""
        return max(2.0, self.replicas / 20)


@dataclass
class Result:
    """What a run leaves behind.

    asked, answered, waiting: requests, the last at the end of the run. retried: sent again, as a
    replica died. latencies, when: ms and time of every answer. marks: (time, tokens computed,
    tokens needed), each simulated second. windows: ms of work by window of 60 s and replica.
    moved: agents whose replica changed between two steps.
    """

    asked: int = 0
    answered: int = 0
    waiting: int = 0
    retried: int = 0
    moved: int = 0
    latencies: "array[float]" = field(default_factory=lambda: array("f"))
    when: "array[float]" = field(default_factory=lambda: array("f"))
    marks: list[tuple[float, int, int]] = field(default_factory=list)
    windows: list[list[float]] = field(default_factory=list)
    totals: Totals = field(default_factory=Totals)


MakeChooser = Callable[[list[Replica], Scenario], Chooser]
WINDOW_S = 60.0


class Simulation:
    """One scenario under one policy."""

    def __init__(self, scenario: Scenario, make: MakeChooser, shapes: list[Shape]) -> None:
        self.scenario, self._shapes = scenario, shapes
        self._rng = random.Random(scenario.seed)
        self.replicas: list[Replica] = []
        self.result = Result()
        self._events: list[tuple[float, int, Callable[..., None], Any]] = []
        self._number = self._order = 0
        self._seen: set[str] = set()
        self._documents = Documents(2000, scenario.zipf, self._rng)
        for _ in range(scenario.replicas):
            self._new_replica()
        self.chooser = make(self.replicas, scenario)
        for router in range(scenario.routers):
            for replica in self.replicas:
                self.chooser.join(router, replica)

    def run(self) -> Result:
        """Simulates to the end."""
        scenario, rng = self.scenario, self._rng
        for _ in range(scenario.agents):
            self._at(rng.random() * scenario.ramp_s, self._wake, self._new_agent())
        for replica in self.replicas:
            self._at(rng.random() * scenario.stats_period_s, self._stats, replica)
        for fault in scenario.faults:
            self._at(fault.at, self._join if fault.joins else self._die, fault)
        if scenario.documents_per_s:
            self._at(scenario.ramp_s / 2, self._document, None)
        self._at(0.0, self._mark, None)
        events = self._events
        while events and events[0][0] < scenario.seconds:
            now, _, action, what = heapq.heappop(events)
            action(now, what)
        resent = sum(action in (self._send, self._lost) for _, _, action, _ in events)
        queued = sum(len(r.queue) + len(r.running) for r in self.replicas)
        self.result.waiting = queued + resent
        return self.result

    def _at(self, when: float, action: Callable[..., None], what: object) -> None:
        self._order += 1  # events of one moment happen in the order they were made in
        heapq.heappush(self._events, (when, self._order, action, what))

    def _new_replica(self) -> Replica:
        index, scenario = len(self.replicas), self.scenario
        replica = Replica(f"engine#{index}", index, scenario.cost, scenario.cache_tokens)
        self.replicas.append(replica)
        return replica

    def _new_agent(self) -> State:
        self._number += 1
        careless = self._rng.random() < self.scenario.careless
        shape = self._shapes[self._rng.randrange(len(self._shapes))]
        return State(self._number, shape, "one for all" if careless else "")

    def _wake(self, now: float, state: State) -> None:
        """An agent asks."""
        held = mix_held(state.number, self.scenario)
        self._ask(now, state, held if held >= 0 else self._any_router(), agent=True)

    def _document(self, now: float, _: None) -> None:
        """A document is asked about."""
        gap = self._rng.expovariate(self.scenario.documents_per_s)
        self._at(now + gap, self._document, None)
        self._ask(now, self._documents.draw(), self._any_router(), agent=False)

    def _any_router(self) -> int:
        return self._rng.randrange(self.scenario.routers)

    def _ask(self, now: float, state: State, router: int, agent: bool) -> None:
        size, questions = state.size, state.shape.questions[state.step]
        job = Job(state, state.key(), tokens_of(size), questions, router, now, agent)
        if state.best == 0 and state.shape.common:
            if state.source in self._seen:
                state.best = tokens_of(state.shape.common)
            elif self._seen:
                state.best = tokens_of(OPENING_BYTES)
            self._seen.add(state.source)
        self.result.asked += 1
        job.needed = max(0, job.tokens - state.best) + questions
        state.best = max(state.best, job.tokens)
        self._send(now, job)

    def _send(self, now: float, job: Job) -> None:
        index = self.chooser.choose(job, now)
        replica = self.replicas[index]
        if not replica.alive:
            self.chooser.leave(job.router, replica)
            self.result.retried += 1
            self._at(now + CONNECT_FAILED_S, self._send, job)
            return
        if job.agent and job.state.home != index:
            self.result.moved += job.state.home >= 0
            job.state.home = index
        replica.take(job, now)
        if not replica.running:
            self._start(now, replica)

    def _start(self, now: float, replica: Replica) -> None:
        ms = replica.start(now, self.result.totals)
        for job in replica.running:
            self.result.totals.needed += job.needed
            job.needed = 0  # what dies with its replica is computed twice, and needed once
        self._at(replica.until, self._done, replica)
        at = int((now - self.scenario.ramp_s) // WINDOW_S)
        if at >= 0:
            windows = self.result.windows
            while len(windows) <= at:
                windows.append([])
            work = windows[at]
            work.extend([0.0] * (len(self.replicas) - len(work)))
            work[replica.index] += ms

    def _done(self, now: float, replica: Replica) -> None:
        """A round ends: its callers are answered, the next round begins."""
        if not replica.alive:
            return
        jobs, replica.running = replica.running, []
        load = replica.load(now)
        result, think = self.result, 1 / self.scenario.think_s
        for job in jobs:
            self.chooser.answered(job, replica, load, now)
            result.answered += 1
            result.latencies.append(1000 * (now - job.started))
            result.when.append(now)
            if job.agent:
                state = job.state
                if state.step + 1 < len(state.shape.ends):
                    state.step += 1
                else:
                    state = self._new_agent()
                self._at(now + self._rng.expovariate(think), self._wake, state)
        if replica.queue:
            self._start(now, replica)

    def _stats(self, now: float, replica: Replica) -> None:
        """Serve collects a replica's routing stats and hands them to every router."""
        if replica.alive:
            self.chooser.stats(replica, now)
            self._at(now + self.scenario.stats_period_s, self._stats, replica)

    def _mark(self, now: float, _: None) -> None:
        totals = self.result.totals
        self.result.marks.append((now, totals.computed, totals.needed))
        self._at(now + 1.0, self._mark, None)

    def _die(self, now: float, fault: Fault) -> None:
        live = [r for r in self.replicas if r.alive]
        for replica in self._rng.sample(live, max(1, round(fault.share * len(live)))):
            for job in replica.drain_dead():
                self.result.retried += 1
                self._at(now + ACTOR_DIED_S, self._lost, (job, replica))
            for router in range(self.scenario.routers):
                self._at(now + self._rng.uniform(*HEALTH_S), self._left, (router, replica))

    def _lost(self, now: float, what: tuple[Job, Replica]) -> None:
        job, replica = what
        self.chooser.leave(job.router, replica)
        self._send(now, job)

    def _left(self, now: float, what: tuple[int, Replica]) -> None:
        self.chooser.leave(*what)

    def _join(self, now: float, fault: Fault) -> None:
        for _ in range(max(1, round(fault.share * sum(r.alive for r in self.replicas)))):
            replica = self._new_replica()
            self._at(now + self._rng.random() * self.scenario.stats_period_s, self._stats, replica)
            for router in range(self.scenario.routers):
                self._at(now + self._rng.uniform(*BROADCAST_S), self._joined, (router, replica))

    def _joined(self, now: float, what: tuple[int, Replica]) -> None:
        self.chooser.join(*what)


def mix_held(number: int, scenario: Scenario) -> int:
    """The router an agent holds itself, or -1 for one whose requests come through any."""
    if number % 1000 >= 1000 * scenario.held:
        return -1
    return number % scenario.routers


def per_window(result: Result) -> list[tuple[float, float]]:
    """(p99 over mean, busiest share) of the work of each whole window."""
    found = []
    for work in result.windows:
        ms = np.array(work)
        found.append((float(np.quantile(ms, 0.99) / ms.mean()), float(ms.max() / ms.sum())))
    return found
