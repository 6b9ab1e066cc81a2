"""The policies compared: ours, Ray Serve's own as they are built, and an oracle."""

import random
from bisect import bisect_left
from typing import Protocol

import numpy as np

from router.policy import Limits, Load, Policy
from router.ring import mix
from router.sim_fleet import CostModel, Job, Replica

_RING_POINTS = 100


class Chooser(Protocol):
    """How requests reach replicas; `router` is which of several router processes."""

    def choose(self, job: Job, now: float) -> int:
        """Index of the replica a job goes to."""
        ...

    def answered(self, job: Job, replica: Replica, load: Load, now: float) -> None:
        """An answer came back to the job's router."""
        ...

    def stats(self, replica: Replica, now: float) -> None:
        """A replica's routing stats reach every router."""
        ...

    def join(self, router: int, replica: Replica) -> None:
        """A router learns of a replica."""
        ...

    def leave(self, router: int, replica: Replica) -> None:
        """A router learns that a replica is gone; it may know already."""
        ...


class Members:
    """Live replicas by router; the base of the policies that look at nothing else."""

    def __init__(self, replicas: list[Replica], routers: int, seed: int) -> None:
        self.replicas = replicas
        self.live: list[list[int]] = [[] for _ in range(routers)]
        self.rng = random.Random(seed)

    def answered(self, job: Job, replica: Replica, load: Load, now: float) -> None:
        """Learns nothing."""

    def stats(self, replica: Replica, now: float) -> None:
        """Learns nothing."""

    def join(self, router: int, replica: Replica) -> None:
        """See Chooser.join."""
        self.live[router].append(replica.index)

    def leave(self, router: int, replica: Replica) -> None:
        """See Chooser.leave."""
        if replica.index in self.live[router]:
            self.live[router].remove(replica.index)

    def least_queued(self, indices: list[int]) -> int:
        """The one with the fewest requests, as Serve's queue length probes would tell."""
        return min(
            indices, key=lambda i: len(self.replicas[i].queue) + len(self.replicas[i].running)
        )


class Ours(Members):
    """`router.policy`, one Policy a router process."""

    def __init__(
        self, replicas: list[Replica], routers: int, seed: int, limits: Limits | None = None
    ) -> None:
        super().__init__(replicas, routers, seed)
        self.policies = [Policy(limits=limits) for _ in range(routers)]
        self.index = {r.name: r.index for r in replicas}
        self.reasons: dict[str, int] = {}

    def choose(self, job: Job, now: float) -> int:
        """See Chooser.choose."""
        choice = self.policies[job.router].choose(job.key, now)
        assert choice is not None, "a router without replicas"
        job.choice = choice
        self.reasons[choice.reason] = self.reasons.get(choice.reason, 0) + 1
        return self.index[choice.replica]

    def answered(self, job: Job, replica: Replica, load: Load, now: float) -> None:
        """See Chooser.answered."""
        self.policies[job.router].board.answered(replica.name, load, now)

    def stats(self, replica: Replica, now: float) -> None:
        """See Chooser.stats."""
        told = replica.receiver.stats(replica.load(now), now).encode()
        for policy in self.policies:
            policy.hear(replica.name, told, now)

    def join(self, router: int, replica: Replica) -> None:
        """See Chooser.join."""
        self.index[replica.name] = replica.index
        self.policies[router].add(replica.name)

    def leave(self, router: int, replica: Replica) -> None:
        """See Chooser.leave."""
        self.policies[router].remove(replica.name)


class RoundRobin(Members):
    """Each router takes replicas in turn."""

    def __init__(self, replicas: list[Replica], routers: int, seed: int) -> None:
        super().__init__(replicas, routers, seed)
        self._turns = [self.rng.randrange(1 << 20) for _ in range(routers)]

    def choose(self, job: Job, now: float) -> int:
        """See Chooser.choose."""
        live = self.live[job.router]
        self._turns[job.router] += 1
        return live[self._turns[job.router] % len(live)]


class TwoChoices(Members):
    """Serve's default: the shorter queue of two replicas drawn at random."""

    def choose(self, job: Job, now: float) -> int:
        """See Chooser.choose."""
        live = self.live[job.router]
        return self.least_queued([self.rng.choice(live), self.rng.choice(live)])


class PrefixAffinity(Members):
    """PrefixCacheAffinityRouter with its defaults: one tree of what was sent where, no load term.

    A text goes to the replicas at the deepest node it matches, of which the shortest queue is
    taken; where less than a tenth of it matches, to the replica that was sent the fewest bytes.
    """

    MATCH_RATE = 0.1

    def __init__(self, replicas: list[Replica], routers: int, seed: int) -> None:
        super().__init__(replicas, routers, seed)
        self._last: dict[int, int] = {}  # state -> who got it last, and so matches deepest
        self._common: dict[str, set[int]] = {}  # common beginning -> who has it
        self._bytes: dict[int, int] = {}

    def choose(self, job: Job, now: float) -> int:
        """See Chooser.choose."""
        live, state = set(self.live[job.router]), job.state
        shape = state.shape
        found = self._last.get(state.number, -1)
        if found in live:
            at = found
        else:
            holders = self._common.get(shape.source, set()) & live
            matched = shape.common if holders else 0
            if matched >= self.MATCH_RATE * state.size:
                at = self.least_queued(sorted(holders))
            else:
                at = min(live, key=lambda i: (self._bytes.get(i, 0), i))
        self._last[state.number] = at
        if shape.common:
            self._common.setdefault(shape.source, set()).add(at)
        self._bytes[at] = self._bytes.get(at, 0) + (state.size if found != at else 0)
        return at


class ConsistentHash(Members):
    """ConsistentHashRouter: a ring of 100 points a replica by session id, no load term.

    Every agent is given a session id here, as without one it hashes the request's id.
    """

    def __init__(self, replicas: list[Replica], routers: int, seed: int) -> None:
        super().__init__(replicas, routers, seed)
        self._rings: list[list[tuple[int, int]]] = [[] for _ in range(routers)]

    def choose(self, job: Job, now: float) -> int:
        """See Chooser.choose."""
        ring = self._rings[job.router]
        place = mix(job.state.number) if job.agent else self.rng.getrandbits(64)
        return ring[bisect_left(ring, (place, 0)) % len(ring)][1]

    def join(self, router: int, replica: Replica) -> None:
        """See Chooser.join."""
        base = mix(replica.index + (1 << 50))
        self._rings[router] += [(mix(base + i), replica.index) for i in range(_RING_POINTS)]
        self._rings[router].sort()

    def leave(self, router: int, replica: Replica) -> None:
        """See Chooser.leave."""
        self._rings[router] = [p for p in self._rings[router] if p[1] != replica.index]


class Oracle(Members):
    """One router that sees every replica's contents and queue at once.

    The least predicted wait plus work is taken; of several idle replicas, the one that has worked
    least.
    """

    def __init__(self, replicas: list[Replica], routers: int, seed: int, cost: CostModel) -> None:
        super().__init__(replicas, routers, seed)
        self._cost = cost
        self._free = np.full(2 * len(replicas), np.inf)  # when each has done what it was sent
        self._work = np.full(2 * len(replicas), np.inf)
        self._sent: dict[int, list[int]] = {}

    def choose(self, job: Job, now: float) -> int:
        """See Chooser.choose."""
        at, least = -1, float("inf")
        sent = self._sent.setdefault(job.state.number, [])
        for i in sent:
            replica = self.replicas[i]
            if replica.alive and job.state.number in replica.held:
                finish = replica.wait_ms(now) + self._cost.ms(replica.missing(job), job.tokens)
                if finish < least:
                    at, least = i, finish
        if at < 0 or least > self._cost.ms(job.tokens + job.questions, job.tokens):
            i = self._least_loaded(now)
            replica = self.replicas[i]
            finish = replica.wait_ms(now) + self._cost.ms(replica.missing(job), job.tokens)
            if finish < least:
                at, least = i, finish
                if i not in sent:
                    sent.append(i)
        self._free[at] = now + least / 1000
        self._work[at] += self._cost.ms(self.replicas[at].missing(job), job.tokens)
        return at

    def _least_loaded(self, now: float) -> int:
        idle = self._free <= now
        if idle.any():
            return int(np.where(idle, self._work, np.inf).argmin())
        return int(self._free.argmin())

    def join(self, router: int, replica: Replica) -> None:
        """See Chooser.join."""
        if not np.isfinite(self._free[replica.index]):
            at_work = self._work[np.isfinite(self._work)]
            self._free[replica.index] = 0.0
            self._work[replica.index] = at_work.mean() if len(at_work) else 0.0

    def leave(self, router: int, replica: Replica) -> None:
        """See Chooser.leave."""
        self._free[replica.index] = self._work[replica.index] = np.inf
