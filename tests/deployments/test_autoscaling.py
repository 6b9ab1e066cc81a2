"""The scaling rule against bursts, ramps and silence on a virtual clock, and against nonsense."""

import math
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.autoscaling import (
    FleetPolicy,
    Objectives,
    Signal,
    demand,
    needs_of,
    read_signals,
    wanted,
)


class Fleet:
    """Replicas that work off a shared load; new ones take 20 s to come, as a cold start does.

    Nothing is added sooner than asked for; what is too many goes after 60 s. A tick is a second.
    period: seconds for which a new replica does not tell, and of which the others tell the mean.
    """

    def __init__(
        self, policy: FleetPolicy, least: int = 1, most: int = 50, period: int = 1
    ) -> None:
        self.policy, self.least, self.most = policy, least, most
        self.seen: deque[tuple[float, float]] = deque(maxlen=period)
        self.ready = least
        self.coming: list[int] = []
        self.came: list[int] = []
        self.backlog = 0.0  # replica-seconds
        self.targets: list[int] = []
        self.waits: list[float] = []
        self._low_since: int | None = None

    def run(self, seconds: int, load: Callable[[int], float], noise: float = 0.0) -> None:
        """load: replicas' worth of work that arrives at a second."""
        for now in range(seconds):
            self.ready += sum(t == now for t in self.coming)
            self.came += [t for t in self.coming if t == now]
            self.coming = [t for t in self.coming if t > now]
            work = self.backlog + load(now)
            done = min(work, float(self.ready))
            self.backlog = work - done
            busy = done / self.ready if self.ready else 0.0
            wait_ms = 1000 * self.backlog / max(self.ready, 1)
            self.waits.append(wait_ms)
            busy = min(1.0, busy * (1 + noise * math.sin(now * 1.7)))
            self._follow(now, busy, wait_ms, work)

    def _follow(self, now: int, busy: float, wait_ms: float, work: float) -> None:
        target = self.ready + len(self.coming)
        self.seen.append((busy, wait_ms))
        busy, wait_ms = (sum(seen) / len(self.seen) for seen in zip(*self.seen, strict=True))
        silent = sum(now - t < len(self.seen) - 1 for t in self.came)
        per_replica = dict.fromkeys(range(self.ready - min(silent, self.ready)), busy)
        context = SimpleNamespace(
            target_num_replicas=target,
            current_num_replicas=self.ready,
            total_num_requests=work,
            aggregated_metrics={
                "busy": per_replica,
                "wait_ms": dict.fromkeys(per_replica, wait_ms),
            },
        )
        asked, _ = self.policy(context)
        asked = min(max(asked, self.least), self.most)
        if asked > target:
            self.coming += [now + 20] * (asked - target)
            self._low_since = None
        elif asked < target:
            self._low_since = now if self._low_since is None else self._low_since
            if now - self._low_since >= 60:
                self.ready = max(asked, 0)
                self._low_since = None
        else:
            self._low_since = None
        self.targets.append(self.ready + len(self.coming))

    def turns(self) -> int:
        """How often the fleet changed direction."""
        moves = [b - a for a, b in pairwise(self.targets) if b != a]
        return sum((a > 0) != (b > 0) for a, b in pairwise(moves))


def test_a_ramp_is_met_before_the_objective_breaks() -> None:
    """To 20 replicas' worth in ten minutes, from where the head room holds what a cold start
    brings: waits stay under the objective throughout.
    """
    fleet = Fleet(FleetPolicy(), least=3)
    fleet.run(700, lambda now: 1.5 + min(now, 600) / 600 * 18.5)
    assert max(fleet.waits) < 500
    assert fleet.targets[-1] == math.ceil(20 / 0.7)
    assert fleet.turns() == 0


def test_a_burst_is_met_by_its_size_at_once_and_forgotten_slowly() -> None:
    """Tenfold load for two minutes: one decision for nearly all of it, and one way down."""
    fleet = Fleet(FleetPolicy(), least=2)
    fleet.run(900, lambda now: 12.0 if 100 <= now < 220 else 1.0)
    before = fleet.targets[99]
    assert fleet.targets[115] >= 12
    assert before <= 3
    assert fleet.waits[219] < 500
    assert fleet.targets[-1] == 2
    assert fleet.turns() == 1


@pytest.mark.parametrize("load", [0.65, 0.7, 1.4, 2.1, 6.99])
def test_steady_load_does_not_flap(load: float) -> None:
    """Also where the need is a whole number, and measurements swing by 10%."""
    fleet = Fleet(FleetPolicy())
    fleet.run(1200, lambda now: load, noise=0.1)
    assert len(set(fleet.targets[200:])) == 1


def test_silence_goes_to_the_least_and_zero_if_that_is_it() -> None:
    """And from zero the first who waits wakes it."""
    fleet = Fleet(FleetPolicy(), least=0)
    fleet.run(400, lambda now: 2.0 if now < 100 else 0.0)
    assert fleet.targets[-1] == 0
    fleet.run(60, lambda now: 0.1)
    assert fleet.targets[400] == 1
    assert 1 <= fleet.ready <= 2  # the backlog of the start is worth a second one for a while


@pytest.mark.parametrize(("load", "most"), [(0.9, 2), (1.1, 3), (1.3, 4), (1.8, 6)])
def test_what_has_just_started_does_not_multiply_demand(load: float, most: int) -> None:
    """One replica, and suddenly more than it can do; new ones are silent at first."""
    fleet = Fleet(FleetPolicy(), period=5)
    fleet.run(200, lambda now: load)
    assert max(fleet.targets) <= most
    assert fleet.waits[-1] == 0.0


def counted(target: int, running: int, *told: tuple[float, float]) -> int:
    """What the policy wants. told: (busy, wait_ms) of those that have told."""
    busy, wait = ({i: each[k] for i, each in enumerate(told)} for k in (0, 1))
    context = SimpleNamespace(
        target_num_replicas=target, current_num_replicas=running, total_num_requests=1,
        aggregated_metrics={"busy": busy, "wait_ms": wait},
    )  # fmt: skip
    return FleetPolicy()(context)[0]


def test_a_silent_replica_is_no_reason_to_grow_and_none_to_shrink() -> None:
    """It may be idle, and it may be as busy as the others."""
    assert counted(1, 1, (1.0, 0.0)) == counted(2, 2, (1.0, 0.0)) == 2
    assert counted(1, 1, (1.0, 4000.0)) == 2
    assert counted(4, 4, (1.0, 4000.0)) == 4
    assert counted(2, 2, (1.0, 10_500.0)) == 3
    assert counted(4, 4, (0.7, 0.0), (0.7, 0.0)) == 4
    assert counted(4, 4, (0.1, 0.0), (0.1, 0.0)) == 1


def test_refused_work_and_agents_count() -> None:
    """What an engine turned away is demand; states want memory, busy or not."""
    objectives = Objectives()

    def asked(*signals: Signal, running: int = 0) -> tuple[float, str]:
        return demand(needs_of(signals, objectives, running))

    assert asked(Signal(busy=0.7, refused=1.4)) == (pytest.approx(3.0), "refused")
    assert asked(Signal(busy=0.1, agents=96)) == (3.0, "agents")
    assert asked(Signal(0.7, 10_500.0)) == (pytest.approx(1.7 / 0.7), "wait")
    assert asked(Signal(0.7), running=3) == (pytest.approx(3.0), "load")
    assert asked(Signal(agents=64), running=3) == (2.0, "agents")


@given(st.integers(0, 100), st.floats(0, 100))
def test_the_rule_is_never_short_and_settles(now: int, need: float) -> None:
    """Enough for the need; asked again at its own answer, it stays."""
    objectives = Objectives()
    answer = wanted(now, need, objectives)
    assert answer >= need - 1e-6
    assert wanted(answer, need, objectives) == answer


JUNK: list[Any] = [
    None,
    {},
    {"busy": None},
    {"busy": {"a": "x", "b": math.nan, "c": None}},
    {"busy": {"a": -1.0}, "wait_ms": {"b": math.inf}},
    {"other": {"a": 1}},
    7,
]


@pytest.mark.parametrize("metrics", JUNK, ids=repr)
def test_nonsense_never_raises(metrics: Any) -> None:
    """The fleet stays as it is, or follows what can be read."""
    for running in (0, 3):
        context = SimpleNamespace(
            target_num_replicas=3, current_num_replicas=running, total_num_requests=1,
            aggregated_metrics=metrics,
        )  # fmt: skip
        count, state = FleetPolicy()(context)
        assert isinstance(count, int)
        assert 0 <= count <= 3
        assert isinstance(state, dict)
    assert FleetPolicy()(object())[0] == 1


def test_signals_are_read_by_replica() -> None:
    """Names that one replica lacks count as nothing."""
    told = read_signals({"busy": {"a": 0.5, "b": 1.0}, "wait_ms": {"a": 20}})
    assert sorted((s.busy, s.wait_ms) for s in told) == [(0.5, 20.0), (1.0, 0.0)]
    with pytest.raises(ValueError, match="busy_target 1.5"):
        FleetPolicy(busy_target=1.5)
